"""Pictures from a source into an index, through a server: many at a time, each for itself."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from clip_deploy.errors import InputError, ServerBusy
from clip_deploy.indexes.port import Item
from clip_deploy.indexes.sources import Unread
from clip_deploy.inputs.gallery import thumbnail
from clip_deploy.inputs.images import LIMITS, load
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from clip_deploy.indexes.port import Index
    from clip_deploy.indexes.sources import Entry, Loaded, Source
    from clip_deploy.inputs.images import ImageLimits, ImageSource

# Pictures in flight, so that the server has something to batch, and pictures that are written together.
BATCH = 64
# Small additions are slow to search: they are put in order after so many pictures, and at the end.
_COMPACTED_AFTER = 20_000
# A server whose queue is full is asked again: after 0.1, 0.2, 0.4 … s, half a minute in all.
_BUSY_PAUSES_S = tuple(min(0.1 * 2**i, 5.0) for i in range(11))

# How many of how many entries are done.
Watch = Callable[[int, int], None]


class Embedder(Protocol):
    """What is asked of ``client.AsyncTritonInferenceClient``."""

    async def prepare_images(self, images: Iterable[ImageSource]) -> NDArray[Any]: ...

    async def embed(self, tower: Tower, inputs: NDArray[Any]) -> NDArray[np.float32]: ...


@dataclass(slots=True)
class Ingestion:
    """What became of every entry; filled while it goes on.

    ``others`` are files that are no pictures and do not pretend to be; ``removed`` is what was pruned.
    """

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    others: int = 0
    removed: int = 0
    unread: list[Unread] = field(default_factory=list)

    @property
    def read(self) -> int:
        return self.added + self.updated + self.unchanged

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def ingest(
    source: Source,
    embedder: Embedder,
    index: Index,
    *,
    batch: int = BATCH,
    prune: bool = False,
    limits: ImageLimits = LIMITS,
    watch: Watch = lambda done, total: None,
) -> Ingestion:
    """Bring an index up to date with a source.

    What is there unchanged is skipped, so that an interrupted run goes on where it was. A picture that cannot be read
    is noted, and its neighbours are none the worse. A server that fails ends it, after what was embedded is stored.

    Raises:
        InputError: nothing could be read.
        ServerError: the server, or the index's server, fails.
    """
    work = _Work(embedder, index, await index.digests(), limits)
    try:
        await work.run(source, batch, watch)
    finally:
        await work.end()
    done = work.result
    done.unread.extend(source.gaps)
    if not done.read:
        raise InputError(
            f"no picture could be read from {source.origin}{_first(done.unread)}",
            remedy="name a folder of pictures, or a Parquet file with them",
        )
    if prune and not source.gaps:
        gone = set(await index.digests(source.origin)) - work.seen
        await index.remove(gone)
        done.removed = len(gone)
    await index.compact()
    return done


class _Work:
    """The pictures in flight, and those that wait to be written."""

    def __init__(
        self, embedder: Embedder, index: Index, known: dict[str, str], limits: ImageLimits
    ) -> None:
        self.result = Ingestion()
        self.seen: set[str] = set()
        self._embedder, self._index, self._known, self._limits = embedder, index, known, limits
        # Decoded pictures are large; pixels of the model's size are not.
        self._decoding = asyncio.Semaphore(os.cpu_count() or 1)
        self._flying: set[asyncio.Task[None]] = set()
        self._ready: list[Item] = []
        self._written = 0

    async def run(self, source: Source, batch: int, watch: Watch) -> None:
        entries, total, begun = iter(source), len(source), 0
        watch(0, total)
        while (entry := await asyncio.to_thread(next, entries, None)) is not None:
            begun += 1
            if entry.id in self.seen:
                self.result.unread.append(Unread(entry.source, f"its id {entry.id} occurs twice"))
                continue
            self.seen.add(entry.id)
            self._flying.add(asyncio.create_task(self._take(entry, source.origin)))
            while len(self._flying) >= 2 * batch:
                await self._land()
            watch(begun - len(self._flying), total)
            if len(self._ready) >= batch:
                await self._write()
        while self._flying:
            await self._land()
            watch(begun - len(self._flying), total)

    async def end(self) -> None:
        """Store what is ready, whatever happened; what still flies is let go."""
        for task in self._flying:
            task.cancel()
        await asyncio.gather(*self._flying, return_exceptions=True)
        await self._write()

    async def _land(self) -> None:
        landed, self._flying = await asyncio.wait(self._flying, return_when=asyncio.FIRST_COMPLETED)
        failures = [error for task in landed if (error := task.exception())]
        if failures:  # of many that fail with the server, the first says it
            raise failures[0]

    async def _write(self) -> None:
        items, self._ready = self._ready, []
        await self._index.add(items)
        counts = Counter(item.id in self._known for item in items)
        self.result.updated += counts[True]
        self.result.added += counts[False]
        self._written += len(items)
        if self._written >= _COMPACTED_AFTER:
            self._written = 0
            await self._index.compact()

    async def _take(self, entry: Entry, origin: str) -> None:
        try:
            async with self._decoding:
                loaded = await asyncio.to_thread(entry.load)
                if loaded is None:
                    self.result.others += 1
                    return
                digest = await asyncio.to_thread(loaded.digest)
                if self._known.get(entry.id) == digest:
                    self.result.unchanged += 1
                    return
                pixels, small = await self._prepared(loaded)
        except InputError as error:
            self.result.unread.append(Unread(entry.source, str(error)))
            return
        (vector,) = await self._embedded(pixels)
        self._ready.append(
            Item(entry.id, vector, loaded.caption, entry.source, digest, small, origin)
        )

    async def _prepared(self, loaded: Loaded) -> tuple[NDArray[Any], bytes]:
        """Pixels and a thumbnail, from decoding the file once."""
        picture = await asyncio.to_thread(load, loaded.data, self._limits)
        small = await asyncio.to_thread(thumbnail, picture)
        return await self._embedder.prepare_images([picture]), small

    async def _embedded(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        for pause_s in _BUSY_PAUSES_S:
            try:
                return await self._embedder.embed(Tower.IMAGE, pixels)
            except ServerBusy:
                await asyncio.sleep(pause_s)
        return await self._embedder.embed(Tower.IMAGE, pixels)


def _first(unread: list[Unread]) -> str:
    return f": {unread[0].source}: {unread[0].why}" if unread else ""
