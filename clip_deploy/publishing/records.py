"""What was published where: one sealed file per publication at the top of the destination, and all of them together."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import PublishError
from clip_deploy.files import digest_json
from clip_deploy.publishing.locking import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from clip_deploy.publishing.stores import Store

SCHEMA = 1
_KIND = "clip-deploy publication"
_NAME = re.compile(r"publication-([1-9][0-9]{0,8})\.json")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class State(str, Enum):
    """How far a publication came."""

    UPLOADING = "uploading"  # its files are on their way, or were cut
    COMPLETE = "complete"  # every file is there and verified; no config named it yet
    SERVED = "served"
    WITHDRAWN = "withdrawn"  # it served, and was rolled back from
    REFUSED = "refused"  # a server or its answers were not right; the reason is kept


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file's digest and length."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """One model of a publication.

    Args:
        name: the Triton model's.
        version: the folder that holds its files; the number of the publication that brought them.
        backend: what runs it.
        weights: the weights' digest that the model tells clients; empty where it tells none.
        config: SHA-256 of the config.pbtxt that serves this version and no other.
        files: what lies in the version's folder.
        companions: what lies beside it in the model's folder, as warmup data: shared by versions, never changed.
    """

    name: str
    version: int
    backend: str
    weights: str
    config: str
    files: Mapping[str, Stamp]
    companions: Mapping[str, Stamp]

    @property
    def folder(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def config_copy(self) -> str:
        """Where its config.pbtxt is kept: at the top, since any other file in the model's folder would have a polling
        server load the model again."""
        return f"config-{self.config[:16]}.pbtxt"

    def stamps(self) -> Iterator[tuple[str, Stamp]]:
        """(key, stamp) of everything that it needs beside its config."""
        yield from ((f"{self.folder}/{name}", stamp) for name, stamp in self.files.items())
        yield from ((f"{self.name}/{name}", stamp) for name, stamp in self.companions.items())

    @property
    def size_bytes(self) -> int:
        return sum(stamp.bytes for stamp in self.files.values())


@dataclass(frozen=True, slots=True)
class Publication:
    """One state of the whole destination: which version of each model serves, under which config."""

    number: int
    state: State
    began: str
    by: str
    tool: str
    source: str
    models: tuple[PublishedModel, ...]
    reason: str = ""

    @property
    def key(self) -> str:
        return f"publication-{self.number}.json"

    def model(self, name: str) -> PublishedModel | None:
        return next((model for model in self.models if model.name == name), None)

    def to_json(self) -> dict[str, Any]:
        body = {"kind": _KIND, "schema": SCHEMA} | asdict(self) | {"state": self.state.value}
        return body | {"seal": digest_json(body)}

    def write(self, store: Store) -> None:
        """Record it, in the place of what was recorded under its number."""
        store.write(self.key, _text(self))

    def claim(self, store: Store) -> bool:
        """Record it where nothing has its number."""
        return store.create(self.key, _text(self))

    def now(self, store: Store, state: State, reason: str = "") -> Publication:
        """The same with another state, and recorded so."""
        changed = replace(self, state=state, reason=reason)
        if changed != self:
            changed.write(store)
        return changed


def _text(publication: Publication) -> bytes:
    return (json.dumps(publication.to_json(), indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True, slots=True)
class History:
    """All publications of a destination, oldest first."""

    place: str
    publications: tuple[Publication, ...] = field(default=())

    @classmethod
    def read(cls, store: Store) -> History:
        """What is recorded at a destination; empty where nothing is there at all.

        Raises:
            PublishError: it holds models that nobody recorded, or a record that is damaged, changed, or too new.
        """
        folders = store.folders()  # first: a publisher writes its record before its first folder
        names = [name for name in store.files() if _NAME.fullmatch(name)]
        if folders and not names:
            raise PublishError(
                f"{store.place} holds {', '.join(folders[:3])}, which clip-deploy did not publish",
                remedy="publish to an empty place, or to a new folder in it",
            )
        found = [_read(store, name) for name in names]
        return cls(store.place, tuple(sorted(found, key=lambda each: each.number)))

    def get(self, number: int) -> Publication:
        """The publication of a number.

        Raises:
            PublishError: there is none.
        """
        for each in self.publications:
            if each.number == number:
                return each
        known = ", ".join(str(each.number) for each in self.publications) or "none"
        raise PublishError(
            f"{self.place} holds no publication {number}", remedy=f"there are: {known}"
        )

    @property
    def next_number(self) -> int:
        return self.publications[-1].number + 1 if self.publications else 1


def _read(store: Store, name: str) -> Publication:
    place = f"{store.place}/{name}"
    remedy = (
        "put the original back; without it, move the file away: its versions stay, but are then "
        "no longer rolled back to"
    )
    try:
        data = json.loads(store.read(name) or b"")
        if not isinstance(data, dict) or data.pop("kind", None) != _KIND:
            raise ValueError("it is no publication")
        schema = data.pop("schema")
    except (ValueError, KeyError, RecursionError) as error:
        raise PublishError(f"{place} is damaged: {error}", remedy=remedy) from error
    if schema != SCHEMA:
        raise PublishError(
            f"{place} follows layout {schema}, and this clip-deploy knows {SCHEMA}",
            remedy="upgrade clip-deploy on this machine: pip install --upgrade clip-deploy",
        )
    seal = data.pop("seal", None)
    if seal != digest_json({"kind": _KIND, "schema": schema} | data):
        raise PublishError(f"{place} was changed by hand, or is damaged", remedy=remedy)
    try:
        found = _publication(data)
        if found.key != name:
            raise ValueError(f"it is number {found.number}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PublishError(f"{place} is damaged: {error!r}", remedy=remedy) from error
    return found


def _publication(data: dict[str, Any]) -> Publication:
    models = tuple(_model(each) for each in data.pop("models"))
    state = State(data.pop("state"))
    return Publication(models=models, state=state, **data)


def _model(data: dict[str, Any]) -> PublishedModel:
    """What is read here is later removed by name: a name must stay inside the model's folder."""
    files, companions = (
        {_inside(name): Stamp(**row) for name, row in data.pop(key).items()}
        for key in ("files", "companions")
    )
    model = PublishedModel(files=files, companions=companions, **data)
    if not _MODEL.fullmatch(model.name) or not _SHA256.fullmatch(model.config):
        raise ValueError(f"model {model.name!r}")
    if not isinstance(model.version, int) or model.version < 1:
        raise ValueError(f"version {model.version!r}")
    return model


def _inside(name: str) -> str:
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise ValueError(f"file {name!r}")
    return name


def is_record(name: str) -> bool:
    """Whether a file at the top of a destination is one of ours."""
    return name == LOCK or bool(_NAME.fullmatch(name))
