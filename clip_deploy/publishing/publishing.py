"""A repository → a destination: the new version complete and verified there before anything can see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy import __version__
from clip_deploy.errors import CheckFailed, ConfigError, DestinationBusy, PublishError, ServerError
from clip_deploy.progress import Progress, silent
from clip_deploy.publishing.configs import (
    current,
    present,
    require_known,
    require_one_set_of_weights,
    serving,
    sha256,
    switch,
)
from clip_deploy.publishing.locking import Lock, locked, now, who
from clip_deploy.publishing.objects import open_objects
from clip_deploy.publishing.records import History, Publication, PublishedModel, State
from clip_deploy.publishing.reloading import Fleet
from clip_deploy.publishing.sources import Source, read_sources
from clip_deploy.publishing.stores import Folder, Store
from clip_deploy.publishing.uploading import (
    Transfer,
    announce,
    described,
    same_version,
    unwatched,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clip_deploy.lint import Target


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication did.

    Args:
        publication: what serves now.
        former: number of what served before; None where nothing did.
        changed: names of the models whose config was replaced; empty where all was as it should be already.
        uploaded_bytes: how much went up.
        found_bytes: how much of an earlier, cut upload was there and right.
        servers: the servers that were switched, by address.
    """

    place: str
    publication: Publication
    former: int | None
    changed: tuple[str, ...]
    uploaded_bytes: int = 0
    found_bytes: int = 0
    servers: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "number": self.publication.number,
            "former": self.former,
            "models": {
                model.name: {"version": model.version, "changed": model.name in self.changed}
                for model in self.publication.models
            },
            "uploaded_bytes": self.uploaded_bytes,
            "found_bytes": self.found_bytes,
            "servers": list(self.servers),
        }


def open_store(place: str | Path | Store) -> Store:
    """The destination behind an address: a folder, ``file://…``, or object storage as tritonserver writes it.

    Raises:
        ConfigError: it is no address, or a file.
        MissingDependency: the package that speaks to this storage is not installed.
    """
    if not isinstance(place, (str, Path)):
        return place
    text = str(place).removeprefix("file://")
    if "://" in text:
        return open_objects(text)
    folder = Path(text).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", remedy="name a folder, or object storage")
    return Folder(folder)


def publish(
    repository: Path,
    destination: str | Path | Store,
    *,
    reload: Sequence[str] = (),
    target: Target | None = None,
    timeout_s: float = 300.0,
    concurrency: int = 16,
    progress: Progress = silent,
    moved: Callable[[int, int], None] = unwatched,
) -> Published:
    """Publish the served version of every model of a repository.

    What served before serves until every file of the new version is there and verified, and whenever something fails.

    Args:
        repository: a model repository on this machine.
        destination: a folder, ``s3://…``, ``gs://…`` or ``as://…``.
        reload: gRPC addresses of running servers on that destination: the new version is tried on each of them beside
            the old one, then each is switched; where one fails, all go back.
        target: what the models will run on, for the linter.
        timeout_s: how long a server may take to load a model, or a polling one to notice it.
        concurrency: requests at once when a version is tried.
        progress: told each step.
        moved: told bytes done and bytes in all of the files that go up.

    Raises:
        ConfigError: the repository cannot be published as it is.
        CheckFailed: the linter found an error, or a server answered wrongly with the new version.
        ServerError: a server refused the new version, or is not there.
        PublishError: the destination is foreign, newer, damaged, held by somebody else, or cannot be written to.
    """
    store = open_store(destination)
    _require_apart(repository, store)
    sources = read_sources(repository, target, progress)
    History.read(store)  # a foreign place is left untouched, without even a lock
    with locked(store, "publish") as lock:
        draft = _Draft(store, lock, History.read(store), sources)
        draft.require_publishable()
        fleet = Fleet(
            reload, store, timeout_s=timeout_s, concurrency=concurrency, progress=progress
        )
        with fleet:
            transfer = Transfer(store, progress, moved)
            publication, texts = draft.upload(transfer)
            lock.require_held()
            publication, changed = _served(publication, draft, texts, fleet)
    return Published(
        store.place,
        publication,
        draft.former.number if draft.former else None,
        changed,
        transfer.uploaded_bytes,
        transfer.found_bytes,
        tuple(reload),
    )


def _served(
    publication: Publication, draft: _Draft, texts: dict[str, bytes], fleet: Fleet
) -> tuple[Publication, tuple[str, ...]]:
    """Switch to a complete publication; it and the names of the models that changed."""
    store = draft.store
    there = present(store, set(texts))
    changed = {name: text for name, text in texts.items() if there.get(name) != sha256(text)}
    folders = {source.name: source.folder for source in draft.sources if not source.is_ensemble}
    try:
        fleet.try_beside(publication, changed, folders)
        draft.lock.require_held()
        fleet.switch(publication, changed, folders, replacing=lambda: switch(store, changed))
    except (ServerError, CheckFailed) as error:
        if publication.state is State.COMPLETE:
            publication.now(store, State.REFUSED, str(error))
        raise
    return publication.now(store, State.SERVED), tuple(changed)


def _require_apart(repository: Path, store: Store) -> None:
    if not isinstance(store, Folder):
        return
    ours, theirs = repository.resolve(), store.path.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ConfigError(
            f"{store.place} and {repository} lie inside one another",
            remedy="publish to a folder of its own",
        )


@dataclass(slots=True)
class _Draft:
    """A publication in the making, under the lock."""

    store: Store
    lock: Lock
    history: History
    sources: list[Source]
    former: Publication | None = None

    def __post_init__(self) -> None:
        self.former = current(self.store, self.history)

    def require_publishable(self) -> None:
        """Raise where the destination, or the encoders together, would not be right afterwards."""
        require_known(self.store, self.history, {each.name: each.backend for each in self.sources})
        told = tuple(
            PublishedModel(each.name, 1, each.backend, each.weights, "", {}, {})
            for each in self.sources
        )
        require_one_set_of_weights((*told, *self._carried()))

    def upload(self, transfer: Transfer) -> tuple[Publication, dict[str, bytes]]:
        """The publication with all its files in place, and the configs that will serve it."""
        versions = {
            each.name: same_version(self.store, self.history, each, self.former)
            for each in self.sources
        }
        if (unchanged := self._unchanged(versions)) is not None:
            return unchanged, {
                each.name: _config(each, unchanged.model(each.name)) for each in self.sources
            }
        publication = self._claimed(versions)
        new = [each for each in self.sources if versions[each.name] is None]
        self.store.require_room(sum(each.size_bytes for each in new))
        for source in self.sources:
            announce(self.store, source)
            if source in new:
                transfer.version(source, publication.number)
            transfer.companions(source)
        models, texts = [], {}
        for source in self.sources:
            model, text = described(source, versions[source.name] or publication.number)
            transfer.config_copy(model, text)
            models.append(model)
            texts[source.name] = text.encode()
        complete = replace(publication, state=State.COMPLETE, models=(*models, *self._carried()))
        self.lock.require_held()
        complete.write(self.store)
        return complete, texts

    def _unchanged(self, versions: dict[str, int | None]) -> Publication | None:
        """What serves already, where it is just what is to be published."""
        if self.former is None:
            return None
        for source in self.sources:
            version, model = versions[source.name], self.former.model(source.name)
            if version is None or model is None or model.version != version:
                return None
            if sha256(_config(source, model)) != model.config:
                return None
            companions = {name: stamp.sha256 for name, stamp in model.companions.items()}
            ours = {name: s.sha256 for name, s in source.stamps(source.companions).items()}
            if companions != ours:
                return None
        return self.former

    def _claimed(self, versions: dict[str, int | None]) -> Publication:
        """A record under a number that nobody used: that of an upload that was cut, or a new one."""
        last = self.history.publications[-1] if self.history.publications else None
        is_resumed = last is not None and last.state is State.UPLOADING
        number = last.number if last is not None and is_resumed else self._free_number()
        publication = Publication(
            number=number,
            state=State.UPLOADING,
            began=now(),
            by=who(),
            tool=f"clip-deploy {__version__}",
            source=str(self.sources[0].folder.parent.parent.resolve()),
            models=tuple(
                self._planned(each, versions[each.name] or number) for each in self.sources
            ),
        )
        if is_resumed:
            publication.write(self.store)
        elif not publication.claim(self.store):
            raise DestinationBusy(
                f"{self.store.place}/{publication.key} appeared meanwhile",
                remedy="see that nobody else publishes there, then run the same command again",
            )
        return publication

    def _planned(self, source: Source, version: int) -> PublishedModel:
        config = sha256(serving(source.config, version))
        return PublishedModel(source.name, version, source.backend, source.weights, config, {}, {})

    def _free_number(self) -> int:
        """Beyond every publication, and every version's folder, whoever put it there."""
        names = {key.split("/")[1] for each in self.sources for key in self.store.files(each.name)}
        return max(self.history.next_number, *(int(n) + 1 for n in names if n.isdecimal()), 1)

    def _carried(self) -> list[PublishedModel]:
        """Models that serve there, and are not part of this repository: they stay as they are."""
        ours = {source.name for source in self.sources}
        known = {
            (model.name, model.config): model
            for each in self.history.publications
            for model in each.models
            if model.name not in ours and each.state is not State.UPLOADING
        }
        there = present(self.store, {name for name, _ in known})
        return [known[pair] for pair in there.items() if pair in known]


def _config(source: Source, model: PublishedModel | None) -> bytes:
    if model is None:
        raise PublishError(
            f"nothing is recorded of {source.name}", remedy="run the same command again"
        )
    return serving(source.config, model.version).encode()
