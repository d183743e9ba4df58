"""What is remembered of each step beside the build: digests of all that it read and made. Damaged, it is forgotten."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import SCHEMA, read_manifest
from clip_deploy.errors import ConfigError
from clip_deploy.files import digest, digest_json, storage, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

STATE = "deploy.json"
_LOCK = ".deploy.lock"
_KIND = "deploy-state"


class Digests:
    """SHA-256 of files, each read once in a run for as long as it does not change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], str] = {}

    def file(self, path: Path) -> str | None:
        """The digest of a file; None where there is none."""
        try:
            stat = path.stat()
            key = (str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if key not in self._known:
                self._known[key] = digest([path])
        except OSError:
            return None
        return self._known[key]

    def tree(self, place: Path) -> str | None:
        """The digest of a file, or of all names and files in a folder; None where there is nothing."""
        if not place.is_dir():
            return self.file(place)
        paths = sorted(path for path in place.rglob("*") if path.is_file())
        return digest_json([(str(path.relative_to(place)), self.file(path)) for path in paths])


@dataclass(frozen=True, slots=True)
class Record:
    """What a step that succeeded read and made.

    Args:
        reads: everything that decided the outcome, by name: values as JSON, digests of files, versions.
        makes: SHA-256 of each file that it left, by its path seen from the state's folder.
        said: the line that told what it made.
        seconds: how long it took.
    """

    reads: Mapping[str, str]
    makes: Mapping[str, str]
    said: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class State:
    """What is remembered of a deployment's steps, in ``<out>/deploy.json``."""

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)
    is_damaged: bool = False

    @classmethod
    def read(cls, folder: Path) -> State:
        """What is remembered there; nothing, where it was never written, or cannot be trusted."""
        path = folder / STATE
        if not path.is_file():
            return cls(folder)
        try:
            data = read_manifest(path, "")
            if data.get("kind") != _KIND:
                raise ValueError(f"kind {data.get('kind')!r}")
            return cls(folder, {name: _record(row) for name, row in data["steps"].items()})
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
            return cls(folder, is_damaged=True)

    def keep(self, step: str, record: Record) -> None:
        self.records[step] = record
        self._write()

    def forget(self, step: str) -> None:
        if self.records.pop(step, None) is not None:
            self._write()

    def _write(self) -> None:
        steps = {name: asdict(record) for name, record in self.records.items()}
        with storage(self.folder / STATE, ConfigError):
            write_json(self.folder / STATE, {"schema": SCHEMA, "kind": _KIND, "steps": steps})

    def changed(self, step: str, reads: Mapping[str, str]) -> str | None:
        """What differs between what a step has read and what it would read now; None where nothing does."""
        return difference(self.records[step].reads, reads)

    def whole(self, step: str, digests: Digests) -> str | None:
        """Which file of a step is no longer what it made; None where all are."""
        for name, sha256 in self.records[step].makes.items():
            found = digests.file(self.folder / name)
            if found != sha256:
                return f"{name} is {'gone' if found is None else 'not what it made'}"
        return None

    def made(self, paths: Iterable[Path], digests: Digests) -> dict[str, str]:
        """Digests of what a step has made, as ``makes`` of a record has them."""
        found = {os.path.relpath(path, self.folder): digests.file(path) for path in paths}
        return {name: sha256 for name, sha256 in found.items() if sha256 is not None}


def _record(row: Mapping[str, Any]) -> Record:
    for name in ("reads", "makes"):
        if not all(isinstance(text, str) for pair in row[name].items() for text in pair):
            raise TypeError(name)
    return Record(dict(row["reads"]), dict(row["makes"]), str(row["said"]), float(row["seconds"]))


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first of what a step reads that changed, in words; None where nothing did."""
    for name in [*now, *before]:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if new is None:
            return f"{name} is no longer read"
        if old is None:
            return f"{name} is new"
        is_digest = len(new) == len(old) == 64
        return f"{name} changed" if is_digest else f"{name} is {_short(new)}, was {_short(old)}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else deploys into this folder meanwhile.

    Raises:
        ConfigError: somebody does, or the folder cannot be written to.
    """
    with storage(folder, ConfigError):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another clip-deploy deploy is at work in {folder}",
                remedy="wait until it ends, or give this deployment an out of its own",
            ) from None
        yield
