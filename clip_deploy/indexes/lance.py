"""LanceDB, in this process and on this disk: the row for a folder."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lancedb
import pyarrow as pa
from lancedb.index import FTS, BTree, IvfFlat

from clip_deploy.errors import ConfigError
from clip_deploy.indexes.lance_folder import TABLE, LanceFolder, Newest
from clip_deploy.indexes.port import IndexStats, require_items, require_query
from clip_deploy.indexes.ranking import Candidate, ranked, window
from clip_deploy.indexes.words import STOP_WORDS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from clip_deploy.indexes.port import Hit, IndexIdentity, Item

# Below so many vectors every one is compared, exactly. From here on they are kept in cells of LanceDB's own size (IVF),
# and a quarter of the cells is looked at, LEAST_PROBED at least: all of them up to some 130,000 vectors. docs/search.md
# has what that costs in recall and gains in time.
IVF_FROM = 50_000
IVF_CELL = 8192
PROBED_SHARE = 1 / 4
LEAST_PROBED = 16
# A reader may still be in the middle of a version that was replaced so long ago.
_KEPT = timedelta(hours=1)
# Pictures that are the same to the last bit tie; so many of them are put in order.
_MAX_TIES = 2_000
_IDS_AT_ONCE = 500


class LanceIndex:
    """A table of LanceDB. Every search sees one whole version, the newest; writers take turns."""

    def __init__(
        self, folder: LanceFolder, identity: IndexIdentity, connection: Any, table: Any
    ) -> None:
        self.identity = identity
        self._folder, self._connection, self._table = folder, connection, table

    @classmethod
    async def open(cls, place: str, create: IndexIdentity | None) -> LanceIndex:
        """Open the index in a folder, or make one; see ``open_index``."""
        folder = LanceFolder(place)
        if not folder.exists():
            if create is None:
                raise ConfigError(
                    f"there is no index at {folder}", remedy="make one: clip-deploy index add"
                )
            with folder.making(create) as temporary:
                version = await _make_table(temporary, create)
                LanceFolder(str(temporary)).record(Newest(create.weights_sha256, version))
        identity, newest = folder.identity(), folder.newest()
        with folder.translated():
            connection = await _connect(folder.path)
            table = await connection.open_table(TABLE)
            schema, version = await table.schema(), await table.version()
        if schema != _schema(identity):
            raise folder.damaged("the table is not of the model that index.json names")
        if version < newest.version:
            raise folder.damaged(
                f"version {newest.version} is not there, and {version} is not all of it"
            )
        return cls(folder, identity, connection, table)

    async def search(
        self,
        *,
        vector: NDArray[Any] | None = None,
        text: str | None = None,
        limit: int = 12,
    ) -> list[Hit]:
        """See ``Index.search``."""
        require_query(self.identity, vector, text, limit)
        count = window(limit, both=vector is not None and text is not None)
        with self._folder.translated():
            nearest = None if vector is None else await self._nearest(vector, count)
            matching = None if text is None else await self._matching(text, count)
        return ranked(nearest, matching, limit)

    async def thumbnail(self, id: str) -> bytes | None:
        """See ``Index.thumbnail``."""
        with self._folder.translated():
            query = self._table.query().where(f"id = {_quoted(id)}").select(["thumbnail"]).limit(1)
            rows = (await query.to_arrow())["thumbnail"].to_pylist()
        return rows[0] if rows else None

    async def stats(self) -> IndexStats:
        """See ``Index.stats``."""
        with self._folder.translated():
            items = await self._table.count_rows()
        size = await asyncio.to_thread(self._folder.bytes)
        return IndexStats(items, self.identity, size, str(self._folder), "lancedb")

    async def digests(self, origin: str | None = None) -> dict[str, str]:
        """See ``Index.digests``."""
        query = self._table.query().select(["id", "sha256"])
        if origin is not None:
            query = query.where(f"origin = {_quoted(origin)}")
        with self._folder.translated():
            rows = await query.to_arrow()
        return dict(zip(rows["id"].to_pylist(), rows["sha256"].to_pylist()))

    async def add(self, items: Sequence[Item]) -> None:
        """See ``Index.add``."""
        require_items(self.identity, items)
        if not items:
            return
        rows = _rows(items, _schema(self.identity))
        async with self._folder.writing():
            with self._folder.translated():
                merge = self._table.merge_insert("id")
                merge = merge.when_matched_update_all().when_not_matched_insert_all()
                await merge.execute(rows)
            await self._record()

    async def remove(self, ids: Collection[str]) -> None:
        """See ``Index.remove``."""
        gone = sorted(ids)
        for start in range(0, len(gone), _IDS_AT_ONCE):
            names = ", ".join(_quoted(id) for id in gone[start : start + _IDS_AT_ONCE])
            async with self._folder.writing():
                with self._folder.translated():
                    await self._table.delete(f"id IN ({names})")
                await self._record()

    async def compact(self) -> None:
        """See ``Index.compact``."""
        async with self._folder.writing():
            trained = self._folder.newest().trained_rows
            with self._folder.translated():
                rows = await self._table.count_rows()
                if rows >= max(IVF_FROM, 2 * trained):
                    cells = IvfFlat(distance_type="cosine", target_partition_size=IVF_CELL)
                    await self._table.create_index("vector", config=cells, replace=True)
                    trained = rows
                await self._table.optimize(cleanup_older_than=_KEPT)
            await self._record(trained)

    async def close(self) -> None:
        """See ``Index.close``."""
        self._table.close()
        self._connection.close()

    async def _record(self, trained_rows: int | None = None) -> None:
        with self._folder.translated():
            version = await self._table.version()
        if trained_rows is None:
            trained_rows = self._folder.newest().trained_rows
        self._folder.record(Newest(self.identity.weights_sha256, version, trained_rows))

    async def _nearest(self, vector: NDArray[Any], count: int) -> list[Candidate]:
        newest = self._folder.newest()
        if newest.weights_sha256 != self.identity.weights_sha256:
            raise ConfigError(
                f"the index {self._folder} was replaced by one of another model",
                remedy="open it again: restart what searches in it",
            )
        rows = await self._table.count_rows() if newest.trained_rows else 0
        probed = max(LEAST_PROBED, round(rows / IVF_CELL * PROBED_SHARE))
        query = self._table.query().nearest_to(vector).distance_type("cosine").nprobes(probed)
        rows = await _best(query, "_distance", count)
        cosines = [min(1.0, max(-1.0, 1 - d)) for d in rows["_distance"].to_pylist()]
        return _candidates(rows, cosines)

    async def _matching(self, text: str, count: int) -> list[Candidate]:
        query = self._table.query().nearest_to_text(text, columns=["caption"])
        rows = await _best(query, "_score", count)
        return _candidates(rows, rows["_score"].to_pylist())


async def _best(query: Any, score: str, count: int) -> pa.Table:
    """The ``count`` best rows, and as many more as tie with the last of them, so that ids can decide."""
    query, wanted = query.select(["id", "caption", "source", score]), count + 1
    while True:
        rows = await query.limit(wanted).to_arrow()
        if wanted >= _MAX_TIES or len(rows) < wanted:
            return rows
        scores = rows[score]
        if scores[wanted - 1] != scores[count - 1]:
            return rows
        wanted = min(4 * wanted, _MAX_TIES)


async def _connect(path: Path) -> Any:
    # Each read looks for a newer version first: a gateway finds what was added a moment ago.
    return await lancedb.connect_async(path, read_consistency_interval=timedelta(0))


async def _make_table(path: Path, identity: IndexIdentity) -> int:
    """An empty table with its indexes; gives its version."""
    connection = await _connect(path)
    try:
        table = await connection.create_table(TABLE, schema=_schema(identity))
        # ICU finds the words of languages that do not separate them by spaces. Its own stop words are those of many
        # languages at once, and "cat" and "dog" are among them: seen in lancedb 0.40.
        words = FTS(base_tokenizer="icu", custom_stop_words=list(STOP_WORDS))
        await table.create_index("caption", config=words)
        await table.create_index("id", config=BTree())
        return int(await table.version())
    finally:
        connection.close()


def _schema(identity: IndexIdentity) -> pa.Schema:
    return pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), identity.embed_dim)),
            *(pa.field(name, pa.string()) for name in ("caption", "source", "sha256", "origin")),
            pa.field("thumbnail", pa.binary()),
        ]
    )


def _rows(items: Sequence[Item], schema: pa.Schema) -> pa.Table:
    columns = {name: [getattr(item, name) for item in items] for name in schema.names}
    columns["vector"] = [vector.tolist() for vector in columns["vector"]]
    return pa.Table.from_pydict(columns, schema=schema)


def _candidates(rows: pa.Table, scores: list[float]) -> list[Candidate]:
    columns = (rows[name].to_pylist() for name in ("id", "caption", "source"))
    return [Candidate(*row) for row in zip(*columns, scores)]


def _quoted(text: str) -> str:
    """A text as a literal of LanceDB's SQL, whose only special character is the quote."""
    return "'" + text.replace("'", "''") + "'"
