"""Elasticsearch 8, over HTTP: the row for a URL."""

from __future__ import annotations

import base64
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elasticsearch import BadRequestError, NotFoundError
from elasticsearch.helpers import async_scan, async_streaming_bulk

from clip_deploy.errors import ConfigError, ServerBusy, ServerError
from clip_deploy.indexes.elastic_server import ElasticServer
from clip_deploy.indexes.port import IndexIdentity, IndexStats, require_items, require_query
from clip_deploy.indexes.ranking import Candidate, ranked, window
from clip_deploy.indexes.words import STOP_WORDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from clip_deploy.indexes.port import Hit, Item

_SCHEMA = 1
_FOUND = ["caption", "source"]
# So many neighbours are looked at on each shard for every one that is asked for; Elasticsearch allows 10,000 in all.
_CANDIDATES_EACH, _MIN_CANDIDATES, _MAX_CANDIDATES = 4, 200, 10_000
# Far below what a server takes at once (100 MB), and small enough to be tried again.
_MAX_BULK_BYTES = 8 * 2**20
_BULK_TIMEOUT_S = 120.0
# A name may be given to another index while a gateway runs: so often it is asked whose vectors it holds.
_TRUSTED_S = 10.0


class ElasticIndex:
    """An index of Elasticsearch. What is added can be searched within a second, or at once after ``compact``."""

    def __init__(self, server: ElasticServer, identity: IndexIdentity) -> None:
        self.identity = identity
        self._server = server
        self._asked_at = time.monotonic()

    @classmethod
    async def open(cls, place: str, create: IndexIdentity | None) -> ElasticIndex:
        """Connect to the index at a URL, or make one; see ``open_index``."""
        server = ElasticServer.at(place)
        try:
            try:
                return cls(server, await _identity(server))
            except _NoIndex:
                if create is None:
                    raise
            await _make(server, create)
            return cls(server, await _identity(server))
        except BaseException:
            await server.close()
            raise

    async def search(
        self,
        *,
        vector: NDArray[Any] | None = None,
        text: str | None = None,
        limit: int = 12,
    ) -> list[Hit]:
        """See ``Index.search``. Both rankings come with one request and are fused here: Elastic's own is not free."""
        require_query(self.identity, vector, text, limit)
        await self._require_same_model()
        count = window(limit, both=vector is not None and text is not None)
        searches: list[dict[str, Any]] = []
        for query in (
            None if vector is None else _neighbours(vector, count),
            None if text is None else {"query": {"match": {"caption": text}}},
        ):
            if query is not None:
                searches.append({"allow_partial_search_results": False})
                searches.append({**query, "size": count, "_source": _FOUND})
        with self._server.translated():
            answer = await self._server.client.msearch(index=self._server.name, searches=searches)
        answers = iter(self._hits(each) for each in answer["responses"])
        nearest = None if vector is None else [_by_cosine(row) for row in next(answers)]
        return ranked(nearest, None if text is None else next(answers), limit)

    async def thumbnail(self, id: str) -> bytes | None:
        """See ``Index.thumbnail``."""
        with self._server.translated():
            try:
                found = await self._server.client.get(
                    index=self._server.name, id=id, source_includes=["thumbnail"]
                )
            except NotFoundError as error:
                if isinstance(error.body, dict) and error.body.get("found") is False:
                    return None
                raise
        return base64.b64decode(found["_source"]["thumbnail"])

    async def stats(self) -> IndexStats:
        """See ``Index.stats``."""
        client, name = self._server.client, self._server.name
        with self._server.translated():
            await client.indices.refresh(index=name)
            items = (await client.count(index=name))["count"]
            totals = (await client.indices.stats(index=name, metric=["store"]))["_all"]["total"]
        size = totals["store"]["size_in_bytes"]
        return IndexStats(items, self.identity, size, self._server.place, "elasticsearch")

    async def digests(self, origin: str | None = None) -> dict[str, str]:
        """See ``Index.digests``."""
        client, name = self._server.client, self._server.name
        query = {"match_all": {}} if origin is None else {"term": {"origin": origin}}
        body = {"query": query, "_source": ["sha256"]}
        with self._server.translated():
            await client.indices.refresh(index=name)
            return {
                row["_id"]: row["_source"]["sha256"]
                async for row in async_scan(client, index=name, query=body)
            }

    async def add(self, items: Sequence[Item]) -> None:
        """See ``Index.add``. In Elasticsearch each item is stored for itself: a search may see some of them first."""
        require_items(self.identity, items)
        await self._require_same_model()
        await self._bulk({"_op_type": "index", "_id": item.id, **_document(item)} for item in items)

    async def remove(self, ids: Collection[str]) -> None:
        """See ``Index.remove``."""
        await self._bulk({"_op_type": "delete", "_id": id} for id in sorted(ids))

    async def compact(self) -> None:
        """See ``Index.compact``: Elasticsearch does so by itself; what was added is made visible."""
        with self._server.translated():
            await self._server.client.indices.refresh(index=self._server.name)

    async def close(self) -> None:
        """See ``Index.close``."""
        await self._server.close()

    async def _bulk(self, actions: Iterable[dict[str, Any]]) -> None:
        """Many documents at once. Those that a full queue refused are sent again; others that fail are a failure."""
        with self._server.translated():
            async for fine, row in async_streaming_bulk(
                self._server.client.options(request_timeout=_BULK_TIMEOUT_S),
                actions,
                index=self._server.name,
                max_chunk_bytes=_MAX_BULK_BYTES,
                max_retries=5,
                initial_backoff=0.2,
                max_backoff=10,
                raise_on_error=False,
            ):
                ((kind, outcome),) = row.items()
                if not (fine or (kind == "delete" and outcome["status"] == 404)):
                    raise self._refused(outcome)

    def _refused(self, outcome: dict[str, Any]) -> ServerError:
        failure = ServerBusy if outcome["status"] == 429 else ServerError
        error = outcome.get("error") or {}
        why = error.get("reason", error) if isinstance(error, dict) else error
        return failure(
            f"{self._server.place} did not store {outcome['_id']}: {why}",
            remedy="see the server's log; run clip-deploy index add again to go on",
        )

    def _hits(self, answer: dict[str, Any]) -> list[Candidate]:
        """The rows of one search, if all shards took part."""
        if "error" in answer or answer["timed_out"] or answer["_shards"]["failed"]:
            error = answer.get("error", "not all shards answered")
            why = error.get("reason", error) if isinstance(error, dict) else error
            raise ServerError(
                f"{self._server.place} cannot be searched: {why}", remedy="see the server's log"
            )
        return [
            Candidate(
                row["_id"], row["_source"]["caption"], row["_source"]["source"], row["_score"]
            )
            for row in answer["hits"]["hits"]
        ]

    async def _require_same_model(self) -> None:
        if time.monotonic() - self._asked_at > _TRUSTED_S:
            self.identity.require(await _identity(self._server), self._server.place)
            self._asked_at = time.monotonic()


class _NoIndex(ConfigError):
    """There is no index of this name."""


async def _identity(server: ElasticServer) -> IndexIdentity:
    with server.translated():
        try:
            answer = await server.client.indices.get_mapping(index=server.name)
        except NotFoundError:
            raise _NoIndex(
                f"there is no index {server.place}", remedy="make one: clip-deploy index add"
            ) from None
    mappings = [each["mappings"] for each in answer.values()]
    try:
        (mapping,) = mappings
        about = mapping["_meta"]["clip_deploy"]
        identity = IndexIdentity(**about["identity"])
        right = mapping["properties"]["vector"]["dims"] == identity.embed_dim
    except (ValueError, KeyError, TypeError):
        right = False
    if not right or about["schema"] != _SCHEMA:
        raise ConfigError(
            f"{server.place} is no index of this version of clip-deploy",
            remedy="name another index; clip-deploy index add makes it",
        )
    return identity


async def _make(server: ElasticServer, identity: IndexIdentity) -> None:
    """Make the index, unless somebody else just did."""
    with server.translated():
        try:
            await server.client.indices.create(
                index=server.name,
                settings={"analysis": _ANALYSIS},
                mappings={
                    "_meta": {"clip_deploy": {"schema": _SCHEMA, "identity": asdict(identity)}},
                    "dynamic": "strict",
                    "properties": _properties(identity.embed_dim),
                },
            )
        except BadRequestError as error:
            if "resource_already_exists_exception" not in str(error):
                raise


# The words of captions as LanceDB's index has them: folded, without the words that say nothing, English ones stemmed.
_ANALYSIS = {
    "filter": {
        "clip_deploy_stop": {"type": "stop", "stopwords": list(STOP_WORDS)},
        "clip_deploy_stem": {"type": "stemmer", "language": "english"},
    },
    "analyzer": {
        "clip_deploy_caption": {
            "type": "custom",
            "tokenizer": "standard",
            "filter": ["lowercase", "clip_deploy_stop", "asciifolding", "clip_deploy_stem"],
        }
    },
}


def _properties(embed_dim: int) -> dict[str, Any]:
    unsearched = {"type": "keyword", "index": False, "doc_values": False}
    return {
        # HNSW on the numbers as they are: the default of recent versions compares them rounded to 8 bits.
        "vector": {
            "type": "dense_vector",
            "dims": embed_dim,
            "index": True,
            "similarity": "cosine",
            "index_options": {"type": "hnsw"},
        },
        "caption": {"type": "text", "analyzer": "clip_deploy_caption"},
        "source": unsearched,
        "sha256": unsearched,
        "origin": {"type": "keyword"},
        "thumbnail": {"type": "binary"},
    }


def _document(item: Item) -> dict[str, Any]:
    return {
        "vector": item.vector.tolist(),
        "caption": item.caption,
        "source": item.source,
        "sha256": item.sha256,
        "origin": item.origin,
        "thumbnail": base64.b64encode(item.thumbnail).decode(),
    }


def _neighbours(vector: NDArray[Any], count: int) -> dict[str, Any]:
    candidates = min(max(_CANDIDATES_EACH * count, _MIN_CANDIDATES), _MAX_CANDIDATES)
    return {
        "knn": {
            "field": "vector",
            "query_vector": vector.tolist(),
            "k": count,
            "num_candidates": candidates,
        }
    }


def _by_cosine(row: Candidate) -> Candidate:
    """Elasticsearch scores a cosine as (1 + cosine) / 2."""
    return Candidate(row.id, row.caption, row.source, min(1.0, max(-1.0, 2 * row.score - 1)))
