"""Elasticsearch 8 as its protocol shows it: what is not asked exactly as it documents is refused and remembered.

It keeps documents in memory, shows them to searches after a refresh only, answers kNN by comparing everything, and match
by BM25 on words without endings.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

MIME = "application/vnd.elasticsearch+{}; compatible-with=8"
SHARDS = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.body = {"error": {"type": kind, "reason": reason}, "status": status}


@dataclass
class Table:
    """One index."""

    mappings: dict[str, Any]
    settings: dict[str, Any]
    documents: dict[str, dict] = field(default_factory=dict)
    visible: dict[str, dict] = field(default_factory=dict)


class Elastic:
    """The server's state. ``faults`` are requests of the wrong shape; ``before`` may wait, or raise ``Refusal``."""

    def __init__(self, key: str | None = None, product: str | None = "Elasticsearch") -> None:
        self.key, self.product = key, product
        self.tables: dict[str, Table] = {}
        self.asked: list[str] = []
        self.faults: list[str] = []
        self.before: Callable[[str], None] = lambda route: None
        self.bulk_item: Callable[[str], tuple[int, str] | None] = lambda id: None
        self.failed_shards = 0
        self._scrolls: dict[str, list[dict]] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, dict]:
        url = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = [unquote(part) for part in url.path.split("/")[1:]]
        with self._lock:
            try:
                self._check_headers(headers, url.path, body)
                return self._route(method, path, query, body)
            except Refusal as refusal:
                return refusal.status, refusal.body
            except Exception as error:  # a body that is not what the route reads
                self.faults.append(f"{method} {target}: {error!r} {body[:300]!r}")
                return 400, {
                    "error": {"type": "parsing_exception", "reason": repr(error)},
                    "status": 400,
                }

    def _check_headers(self, headers: Any, path: str, body: bytes) -> None:
        kind = "x-ndjson" if path.endswith(("_bulk", "_msearch")) else "json"
        assert headers["Accept"] == MIME.format("json"), headers["Accept"]
        if body:  # aiohttp names a type where there is nothing, too
            assert headers["Content-Type"] == MIME.format(kind), headers["Content-Type"]
        assert re.match(r"elasticsearch-py/8\.", headers["User-Agent"]), headers["User-Agent"]
        assert re.match(r"es=8\.", headers["x-elastic-client-meta"]), headers[
            "x-elastic-client-meta"
        ]
        if self.key and headers.get("Authorization") != f"ApiKey {self.key}":
            raise Refusal(401, "security_exception", "missing authentication credentials")

    def _route(self, method: str, path: list[str], query: dict, body: bytes) -> tuple[int, dict]:
        routes: dict[tuple[str, ...], Callable] = {
            ("PUT", "*"): self._create,
            ("GET", "*", "_mapping"): self._mapping,
            ("POST", "*", "_msearch"): self._msearch,
            ("PUT", "*", "_bulk"): self._bulk,
            ("GET", "*", "_doc", "*"): self._get,
            ("POST", "*", "_refresh"): self._refresh,
            ("POST", "*", "_count"): self._count,
            ("GET", "*", "_stats", "store"): self._stats,
            ("POST", "*", "_search"): self._scan,
            ("POST", "_search", "scroll"): self._scroll,
            ("DELETE", "_search", "scroll"): self._clear,
        }
        asked = (method, *path)
        for pattern, handler in routes.items():
            if len(pattern) == len(asked) and all(p in ("*", a) for p, a in zip(pattern, asked)):
                route = " ".join(pattern)
                self.asked.append(route)
                self.before(route)
                names = [a for p, a in zip(pattern, asked) if p == "*"]
                return 200, handler(*names, query, body)
        raise AssertionError("there is no such route")

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            raise Refusal(404, "index_not_found_exception", f"no such index [{name}]")
        return self.tables[name]

    def _create(self, name: str, query: dict, body: bytes) -> dict:
        if name in self.tables:
            raise Refusal(
                400, "resource_already_exists_exception", f"index [{name}] already exists"
            )
        asked = json.loads(body)
        assert asked.keys() == {"settings", "mappings"}
        mappings = asked["mappings"]
        assert mappings.keys() == {"_meta", "dynamic", "properties"}
        vector = mappings["properties"]["vector"]
        assert vector == {
            "type": "dense_vector",
            "dims": vector["dims"],
            "index": True,
            "similarity": "cosine",
            "index_options": {"type": "hnsw"},
        }
        assert 1 <= vector["dims"] <= 4096
        analysis = asked["settings"]["analysis"]
        analyzer = analysis["analyzer"][mappings["properties"]["caption"]["analyzer"]]
        assert analyzer["tokenizer"] == "standard"
        builtin = {"lowercase", "asciifolding"}
        assert set(analyzer["filter"]) - builtin == analysis["filter"].keys()
        self.tables[name] = Table(mappings, asked["settings"])
        return {"acknowledged": True, "shards_acknowledged": True, "index": name}

    def _mapping(self, name: str, query: dict, body: bytes) -> dict:
        return {name: {"mappings": self._table(name).mappings}}

    def _bulk(self, name: str, query: dict, body: bytes) -> dict:
        table, rows = self._table(name), []
        lines = [json.loads(line) for line in body.splitlines()]
        assert body.endswith(b"\n")
        while lines:
            ((kind, about),) = lines.pop(0).items()
            id = about["_id"]
            assert about.keys() == {"_id"}
            refused = self.bulk_item(id)
            document = lines.pop(0) if kind == "index" else None
            if refused:
                status, reason = refused
                rows.append(
                    {kind: {"_id": id, "status": status, "error": {"type": "x", "reason": reason}}}
                )
            elif kind == "index":
                self._check_document(table, document)
                status = 200 if id in table.documents else 201
                table.documents[id] = document
                rows.append({kind: {"_id": id, "status": status}})
            else:
                assert kind == "delete"
                status = 404 if table.documents.pop(id, None) is None else 200
                rows.append({kind: {"_id": id, "status": status}})
        errors = any("error" in outcome for row in rows for outcome in row.values())
        return {"took": 1, "errors": errors, "items": rows}

    def _check_document(self, table: Table, document: dict) -> None:
        properties = table.mappings["properties"]
        assert document.keys() == properties.keys(), document.keys()  # dynamic: strict
        assert len(document["vector"]) == properties["vector"]["dims"]
        assert all(type(value) is float for value in document["vector"])
        assert all(isinstance(document[name], str) for name in properties if name != "vector")

    def _refresh(self, name: str, query: dict, body: bytes) -> dict:
        table = self._table(name)
        table.visible = dict(table.documents)
        return {"_shards": SHARDS}

    def _get(self, name: str, id: str, query: dict, body: bytes) -> dict:
        assert query == {"_source_includes": "thumbnail"}
        found = self._table(name).documents.get(id)
        about = {"_index": name, "_id": id, "found": found is not None}
        if found is None:
            refusal = Refusal(404, "", "")
            refusal.body = about
            raise refusal
        return about | {"_source": {"thumbnail": found["thumbnail"]}}

    def _count(self, name: str, query: dict, body: bytes) -> dict:
        return {"count": len(self._table(name).visible), "_shards": SHARDS}

    def _stats(self, name: str, query: dict, body: bytes) -> dict:
        size = len(json.dumps(self._table(name).documents))
        return {"_shards": SHARDS, "_all": {"total": {"store": {"size_in_bytes": size}}}}

    def _msearch(self, name: str, query: dict, body: bytes) -> dict:
        lines = [json.loads(line) for line in body.splitlines()]
        assert body.endswith(b"\n")
        assert 2 <= len(lines) <= 4
        assert len(lines) % 2 == 0
        answers = []
        for header, search in zip(lines[::2], lines[1::2]):
            assert header == {"allow_partial_search_results": False}
            assert search.keys() in ({"knn", "size", "_source"}, {"query", "size", "_source"})
            table = self._table(name)
            scores = (
                _nearest(table, search["knn"])
                if "knn" in search
                else _matching(table, search["query"])
            )
            best = sorted(scores.items(), key=lambda row: -row[1])[: search["size"]]
            hits = [
                {
                    "_index": name,
                    "_id": id,
                    "_score": score,
                    "_source": {key: table.visible[id][key] for key in search["_source"]},
                }
                for id, score in best
            ]
            shards = SHARDS | {"failed": self.failed_shards}
            answers.append(
                {
                    "took": 1,
                    "timed_out": False,
                    "_shards": shards,
                    "hits": {"hits": hits},
                    "status": 200,
                }
            )
        return {"took": 1, "responses": answers}

    def _scan(self, name: str, query: dict, body: bytes) -> dict:
        assert query.keys() == {"scroll"}
        search = json.loads(body)
        assert search["size"] == 1000
        assert search["_source"] == ["sha256"]
        assert search["sort"] == "_doc"
        asked = search["query"]
        rows = [
            {"_id": id, "_source": {"sha256": document["sha256"]}}
            for id, document in self._table(name).visible.items()
            if asked == {"match_all": {}} or document["origin"] == asked["term"]["origin"]
        ]
        self._scrolls["s1"] = rows[1000:]
        return {
            "_scroll_id": "s1",
            "_shards": SHARDS,
            "timed_out": False,
            "hits": {"hits": rows[:1000]},
        }

    def _scroll(self, query: dict, body: bytes) -> dict:
        asked = json.loads(body)
        rows = self._scrolls[asked["scroll_id"]]
        self._scrolls[asked["scroll_id"]] = rows[1000:]
        return {
            "_scroll_id": "s1",
            "_shards": SHARDS,
            "timed_out": False,
            "hits": {"hits": rows[:1000]},
        }

    def _clear(self, query: dict, body: bytes) -> dict:
        del self._scrolls[json.loads(body)["scroll_id"]]
        return {"succeeded": True, "num_freed": 1}


def _nearest(table: Table, asked: dict) -> dict[str, float]:
    assert asked.keys() == {"field", "query_vector", "k", "num_candidates"}
    assert asked["field"] == "vector"
    assert asked["k"] <= asked["num_candidates"] <= 10_000
    vector = np.array(asked["query_vector"])
    if len(vector) != table.mappings["properties"]["vector"]["dims"]:
        raise Refusal(400, "x", "the query vector has a different number of dimensions")
    cosines = {id: float(np.array(row["vector"]) @ vector) for id, row in table.visible.items()}
    best = sorted(cosines.items(), key=lambda row: -row[1])[: asked["k"]]
    return {id: (1 + cosine) / 2 for id, cosine in best}


def _matching(table: Table, asked: dict) -> dict[str, float]:
    (text,) = asked["match"].values()
    assert asked == {"match": {"caption": text}}
    stop = set(table.settings["analysis"]["filter"]["clip_deploy_stop"]["stopwords"])
    documents = {id: Counter(_words(row["caption"], stop)) for id, row in table.visible.items()}
    average = sum(map(Counter.total, documents.values())) / max(len(documents), 1)
    scores: dict[str, float] = {}
    for word in set(_words(text, stop)):
        having = [id for id, words in documents.items() if word in words]
        weight = math.log(1 + (len(documents) - len(having) + 0.5) / (len(having) + 0.5))
        for id in having:
            often, length = documents[id][word], documents[id].total()
            part = often / (often + 1.2 * (0.25 + 0.75 * length / average))
            scores[id] = scores.get(id, 0.0) + weight * part
    return scores


def _words(text: str, stop: set[str]) -> list[str]:
    folded = unicodedata.normalize("NFKD", text.lower())
    words = re.findall(r"\w+", "".join(c for c in folded if not unicodedata.combining(c)))
    return [re.sub(r"(ning|ing|s)$", "", word) for word in words if word not in stop]


@contextmanager
def serving(elastic: Elastic) -> Iterator[str]:
    """The server on a port of its own; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = elastic.answer(self.command, self.path, self.headers, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            if elastic.product:
                self.send_header("X-Elastic-Product", elastic.product)
            self.send_header("Content-Type", MIME.format("json"))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.request_queue_size = 128
    server.server_bind()
    server.server_activate()
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def slowly(seconds: float) -> Callable[[str], None]:
    return lambda route: time.sleep(seconds)
