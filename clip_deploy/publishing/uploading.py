"""Files on their way up: each verified by reading it back, those that are there already recognised by their digest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clip_deploy.errors import PublishError
from clip_deploy.progress import Progress, silent
from clip_deploy.publishing.configs import serving, sha256, waiting
from clip_deploy.publishing.records import PublishedModel
from clip_deploy.repository.assembly import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clip_deploy.publishing.records import History, Publication
    from clip_deploy.publishing.sources import Source
    from clip_deploy.publishing.stores import Store


def unwatched(done: int, total: int) -> None:
    """Nobody counts the bytes."""


@dataclass(slots=True)
class Transfer:
    """An upload: where to, who watches, and what it has done so far.

    ``moved`` is told bytes done and bytes in all, of the files that go up.
    """

    store: Store
    progress: Progress = silent
    moved: Callable[[int, int], None] = unwatched
    uploaded_bytes: int = 0
    found_bytes: int = 0
    _total: int = field(default=0)
    _done: int = field(default=0)

    def version(self, source: Source, number: int) -> None:
        """Put a model's files up as version ``number``, which no config names yet: no server looks at them."""
        folder = f"{source.name}/{number}"
        files = {f"{folder}/{name}": path for name, path in source.files.items()}
        there = self.store.files(folder)
        for key in sorted(set(there) - set(files)):  # of another upload that was cut
            self.store.remove(key)
        self._total, self._done = source.size_bytes, 0
        for key, path in files.items():
            self.file(source, path, key, there.get(key))
        self.store.settle(folder)

    def companions(self, source: Source) -> None:
        """Put up what lies beside the versions.

        Raises:
            PublishError: another file has that name there already, and a published config may need it.
        """
        there = self.store.files(source.name)
        for name, path in source.companions.items():
            key = f"{source.name}/{name}"
            if key in there and self.store.digest(key) != source.stamp(path).sha256:
                raise PublishError(
                    f"{self.store.place}/{key} is there with other contents, and published versions share it",
                    remedy=f"give {path} another name, and name that in config.pbtxt",
                )
            self.file(source, path, key, there.get(key))

    def config_copy(self, model: PublishedModel, text: str) -> None:
        """Keep a config where rolling back finds it."""
        key = model.config_copy
        self.store.write(key, text.encode())
        if self.store.digest(key) != model.config:
            raise self._mangled(key)

    def file(self, source: Source, path: Path, key: str, size_there: int | None) -> None:
        """Put one file up and read it back, unless it is there as it should be."""
        size = path.stat().st_size
        if size_there == size and self.store.digest(key) == source.stamp(path).sha256:
            self.found_bytes += size
            self._move(size)
            return
        self.progress(f"{key}, {size / 1e6:,.1f} MB")
        with ThreadPoolExecutor(2) as pool:
            wanted = pool.submit(source.stamp, path)  # hashes while the bytes go up
            self.store.put(path, key, self._move)
            settled = pool.submit(self.store.settle, key)
            got = self.store.digest(key)
            settled.result()
            if got != wanted.result().sha256:
                raise self._mangled(key)
        self.uploaded_bytes += size

    def _move(self, count: int) -> None:
        self._done += count
        self.moved(self._done, self._total)

    def _mangled(self, key: str) -> PublishError:
        return PublishError(
            f"{self.store.place}/{key} reads back as other bytes than were sent",
            remedy="see that nobody writes to the repository meanwhile, then run the same command again",
        )


def announce(store: Store, source: Source) -> None:
    """Before a model's first file: a config under which nothing of it is loaded."""
    key = f"{source.name}/{CONFIG}"
    if store.read(key) is None:
        store.write(key, waiting(source.name, source.backend).encode())


def same_version(
    store: Store, history: History, source: Source, served: Publication | None
) -> int | None:
    """The version that has exactly these files already; None where none has.

    One that does not serve now is read back first: nobody would have noticed what became of it. Small files are
    compared first: other weights of one architecture have graphs of equal length, and other manifests.
    """
    by_size = sorted(source.files, key=lambda name: source.files[name].stat().st_size)
    sizes = {name: path.stat().st_size for name, path in source.files.items()}
    for each in reversed(history.publications):
        model = each.model(source.name)
        if model is None or each.state.value == "uploading":
            continue
        if {name: stamp.bytes for name, stamp in model.files.items()} != sizes:
            continue
        if all(model.files[n].sha256 == source.stamp(source.files[n]).sha256 for n in by_size):
            serves = served.model(source.name) if served else None
            is_served = serves is not None and serves.version == model.version
            is_whole = not missing(store, model) and (is_served or _reads_back(store, model))
            return model.version if is_whole else None
    return None


def _reads_back(store: Store, model: PublishedModel) -> bool:
    files = {f"{model.folder}/{name}": stamp.sha256 for name, stamp in model.files.items()}
    return all(store.digest(key) == sha256 for key, sha256 in files.items())


def missing(store: Store, model: PublishedModel) -> list[str]:
    """Keys of a published model's files that are gone, or of another length."""
    there = store.files(model.name)
    return [key for key, stamp in model.stamps() if there.get(key) != stamp.bytes]


def described(source: Source, version: int) -> tuple[PublishedModel, str]:
    """A source as it will be recorded, and the text of its config. Needs the digest of every file."""
    text = serving(source.config, version, place=source.folder.parent / CONFIG)
    model = PublishedModel(
        name=source.name,
        version=version,
        backend=source.backend,
        weights=source.weights,
        config=sha256(text),
        files=source.stamps(source.files),
        companions=source.stamps(source.companions),
    )
    return model, text
