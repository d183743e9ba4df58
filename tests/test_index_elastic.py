"""The index in Elasticsearch: against a stand-in that checks every request, and a real server where there is one.

``CLIP_DEPLOY_ES_URL=http://127.0.0.1:9200`` names the real one (its key, if it wants one, in ``CLIP_DEPLOY_ES_API_KEY``);
an index is made there for the tests, and deleted.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.errors import (
    ClipDeployError,
    ConfigError,
    ServerBusy,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)
from clip_deploy.indexes import open_index
from clip_deploy.indexes.ingestion import ingest
from clip_deploy.indexes.sources import open_source
from clip_deploy.resources import photographs_dir
from tests.elastic_standin import Elastic, Refusal, serving, slowly
from tests.index_parts import DIM, IDENTITY, ITEMS, Embedder, item, run, vector

pytestmark = pytest.mark.processes
pytest.importorskip(
    "elasticsearch", reason="needs its client: pip install 'clip-deploy[elasticsearch]'"
)

REAL = os.environ.get("CLIP_DEPLOY_ES_URL")


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Elastic:
    monkeypatch.delenv("CLIP_DEPLOY_ES_API_KEY", raising=False)
    monkeypatch.delenv("CLIP_DEPLOY_ES_CA_FILE", raising=False)
    return Elastic()


@pytest.fixture
def place(elastic: Elastic) -> Iterator[str]:
    """An index of the stand-in; every request must have been of the right shape."""
    with serving(elastic) as url:
        yield f"{url}/pictures"
    assert elastic.faults == []


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "real",
            marks=pytest.mark.skipif(
                not REAL,
                reason="needs an Elasticsearch 8: CLIP_DEPLOY_ES_URL=http://127.0.0.1:9200",
            ),
        ),
    ]
)
def anywhere(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "stand-in":
        yield request.getfixturevalue("place")
        return
    place = f"{REAL}/clip-deploy-test-{uuid.uuid4().hex[:8]}"
    yield place

    async def delete() -> None:
        from clip_deploy.indexes.elastic_server import ElasticServer

        server = ElasticServer.at(place)
        await server.client.indices.delete(index=server.name, ignore_unavailable=True)
        await server.close()

    asyncio.run(delete())


async def _with(place: str, *works, create=None):
    index = await open_index(place, create=create)
    try:
        return [await work(index) for work in works]
    finally:
        await index.close()


def _filled(place: str, *works):
    """The answers of an index that holds ITEMS."""

    async def fill(index) -> None:
        await index.add(ITEMS)
        await index.compact()

    return run(_with(place, fill, *works, create=IDENTITY))[1:]


def _ids(hits) -> list[str]:
    return [hit.id for hit in hits]


def test_an_index_finds_by_vector_by_words_and_by_both(anywhere: str):
    asked = vector(77)
    by_vector, by_text, both = _filled(
        anywhere,
        lambda index: index.search(vector=asked, limit=9),
        lambda index: index.search(text="the Cats", limit=9),
        lambda index: index.search(vector=asked, text="cat", limit=4),
    )
    cosines = {each.id: float(each.vector @ asked) for each in ITEMS}
    assert _ids(by_vector) == sorted(cosines, key=cosines.__getitem__, reverse=True)
    assert all(
        abs(hit.cosine - cosines[hit.id]) < 1e-5 and hit.score == hit.cosine for hit in by_vector
    )
    assert set(_ids(by_text)) == {"i0", "i3", "i7"}
    assert {hit.cosine for hit in by_text} == {None}
    expected: dict[str, float] = {}
    for hits in (by_text, by_vector):
        for rank, hit in enumerate(hits, 1):
            expected[hit.id] = expected.get(hit.id, 0) + 1 / (60 + rank)
    assert [(hit.id, hit.score) for hit in both] == sorted(
        expected.items(), key=lambda row: (-row[1], row[0])
    )[:4]


def test_words_are_the_same_as_in_the_other_engine(anywhere: str):
    words = {
        "Café": {"i3"},
        "running": {"i8"},
        "고양이": {"i2"},
        "the a of": set(),
        "": set(),
        "dog": {"i1"},
    }
    found = _filled(
        anywhere, *((lambda index, text=text: index.search(text=text)) for text in words)
    )
    assert {text: set(_ids(hits)) for text, hits in zip(words, found)} == words


def test_items_are_replaced_removed_and_counted(anywhere: str):
    odd = item("a/b é%2F' OR 1", 41, "a zebra", origin="x")
    other = replace(item("i1", 50, "a zebra"), sha256="new")
    _, digests, mine, hits, picture, none, _, stats = _filled(
        anywhere,
        lambda index: index.add([other, odd]),
        lambda index: index.digests(),
        lambda index: index.digests("x"),
        lambda index: index.search(text="zebra"),
        lambda index: index.thumbnail(odd.id),
        lambda index: index.thumbnail("never there"),
        lambda index: index.remove(["i1", "i2", "never there"]),
        lambda index: index.stats(),
    )
    assert digests == {each.id: each.sha256 for each in ITEMS} | {"i1": "new", odd.id: odd.sha256}
    assert mine == {odd.id: odd.sha256}
    assert set(_ids(hits)) == {"i1", odd.id}
    assert (picture, none) == (odd.thumbnail, None)
    assert (stats.items, stats.engine, stats.identity) == (
        len(ITEMS) - 1,
        "elasticsearch",
        IDENTITY,
    )
    assert stats.bytes > 0


def test_an_index_refuses_another_model(anywhere: str):
    _filled(anywhere)
    for other in (replace(IDENTITY, weights_sha256="b" * 64), replace(IDENTITY, embed_dim=64)):
        with pytest.raises(ConfigError, match="holds vectors of tiny/random"):
            run(_with(anywhere, create=other))
    with pytest.raises(ConfigError, match=r"float32 \[64\]"):
        run(_with(anywhere, lambda index: index.search(vector=np.ones(64, np.float32) / 8)))


def test_thousands_of_items_are_listed_whole(anywhere: str):
    many = [item(f"m{n}", n) for n in range(2500)]
    (digests,) = run(
        _with(
            anywhere, lambda index: index.add(many), lambda index: index.digests(), create=IDENTITY
        )
    )[1:]
    assert len(digests) == 2500


def test_photographs_are_ingested_and_a_second_time_skipped(anywhere: str):
    async def story() -> tuple:
        index = await open_index(anywhere, create=IDENTITY)
        source = open_source(photographs_dir())
        first = await ingest(source, Embedder(), index, batch=3)
        second = await ingest(source, Embedder(), index, batch=3, prune=True)
        hits = await index.search(text="coffee espresso")
        await index.close()
        return first.added, second.added, second.unchanged, _ids(hits), [hit.source for hit in hits]

    added, again, unchanged, ids, sources = run(story())
    assert (added, again, unchanged, len(ids)) == (10, 0, 10, 1)
    assert sources == ["coffee.jpg"]


# ---- what only the stand-in can do


def test_both_rankings_are_one_request(elastic: Elastic, place: str):
    _filled(place, lambda index: index.search(vector=vector(1), text="cat"))
    assert elastic.asked.count("POST * _msearch") == 1


def test_an_index_is_made_once_however_many_want_it(elastic: Elastic, place: str):
    async def many() -> None:
        for index in await asyncio.gather(*(open_index(place, create=IDENTITY) for _ in range(5))):
            await index.close()

    run(many())
    assert len(elastic.tables) == 1
    about = elastic.tables["pictures"].mappings["_meta"]["clip_deploy"]
    assert about == {
        "schema": 1,
        "identity": {"weights_sha256": "a" * 64, "embed_dim": DIM, "model": "tiny/random"},
    }


def test_items_that_a_full_queue_refused_are_sent_again(elastic: Elastic, place: str):
    refused: list[str] = []

    def refuse(id: str) -> tuple[int, str] | None:
        if id in ("i1", "i5") and refused.count(id) < 2:
            refused.append(id)
            return 429, "the queue is full"
        return None

    elastic.bulk_item = refuse
    (digests,) = _filled(place, lambda index: index.digests())
    assert len(digests) == len(ITEMS)
    assert len(refused) == 4


@pytest.mark.parametrize(("status", "kind"), [(400, ServerError), (500, ServerError)])
def test_an_item_that_cannot_be_stored_is_named(
    elastic: Elastic, place: str, status: int, kind: type
):
    elastic.bulk_item = lambda id: (status, "no room") if id == "i3" else None
    with pytest.raises(kind, match="did not store i3: no room") as caught:
        _filled(place)
    assert "again to go on" in caught.value.remedy


def _refuse(status: int, what: str = "because"):
    def refuse(route: str) -> None:
        if "_msearch" in route:
            raise Refusal(status, "x", what)

    return refuse


@pytest.mark.parametrize(
    ("status", "kind", "what"),
    [
        (500, ServerError, "because"),
        (503, ServerError, "because"),
        (429, ServerBusy, "is busy: because"),
        (404, ConfigError, "there is no index"),
        (403, ConfigError, "refuses the access: because"),
        (400, ServerError, "because"),
    ],
)
def test_refusals_are_said_in_words(
    elastic: Elastic, place: str, status: int, kind: type, what: str
):
    run(_with(place, create=IDENTITY))
    elastic.before = _refuse(status)
    with pytest.raises(kind, match=what) as caught:
        run(_with(place, lambda index: index.search(text="cat")))
    assert caught.value.remedy


def test_a_search_of_which_a_shard_failed_is_no_answer(elastic: Elastic, place: str):
    _filled(place)
    elastic.failed_shards = 1
    with pytest.raises(ServerError, match="not all shards answered"):
        run(_with(place, lambda index: index.search(text="cat")))


def test_a_server_that_hangs_meets_a_deadline(
    elastic: Elastic, place: str, monkeypatch: pytest.MonkeyPatch
):
    run(_with(place, create=IDENTITY))
    monkeypatch.setattr("clip_deploy.indexes.elastic_server._TIMEOUT_S", 0.2)
    elastic.before = slowly(0.6)
    with pytest.raises(ServerTimeout, match="no answer from"):
        run(_with(place))


def test_nobody_there_is_said():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ServerUnavailable, match="no server answers at"):
            run(_with(f"http://127.0.0.1:{free.getsockname()[1]}/x"))


def test_another_product_is_refused(elastic: Elastic, monkeypatch: pytest.MonkeyPatch):
    elastic.product = None
    with serving(elastic) as url, pytest.raises(ConfigError, match="is not Elasticsearch"):
        elastic.tables["x"] = elastic.tables.get("x") or _empty()
        run(_with(f"{url}/x"))


def _empty():
    from tests.elastic_standin import Table

    return Table({"properties": {}}, {})


def test_an_index_of_somebody_else_is_left_alone(elastic: Elastic, place: str):
    elastic.tables["pictures"] = _empty()
    for create in (None, IDENTITY):
        with pytest.raises(ConfigError, match="is no index of this version of clip-deploy"):
            run(_with(place, create=create))
    assert "PUT * _bulk" not in elastic.asked


def test_an_index_that_was_replaced_by_another_models_is_noticed(
    elastic: Elastic, place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("clip_deploy.indexes.elastic._TRUSTED_S", 0.0)

    async def story() -> None:
        index = await open_index(place, create=IDENTITY)
        del elastic.tables["pictures"]
        await _with(place, create=replace(IDENTITY, weights_sha256="b" * 64))
        for work in (index.search(vector=vector(1)), index.add([item("x", 1)])):
            with pytest.raises(ConfigError, match="holds vectors of"):
                await work
        await index.close()

    run(story())


def test_the_key_travels_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    elastic = Elastic(key="secret")
    with serving(elastic) as url:
        monkeypatch.setenv("CLIP_DEPLOY_ES_API_KEY", "secret")
        run(_with(f"{url}/x", create=IDENTITY))
        monkeypatch.setenv("CLIP_DEPLOY_ES_API_KEY", "another")
        with pytest.raises(ConfigError, match="refuses the access") as caught:
            run(_with(f"{url}/x"))
        assert "CLIP_DEPLOY_ES_API_KEY" in caught.value.remedy
        assert "another" not in f"{caught.value}{caught.value.remedy}"


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("http://10.0.0.1:9200/x", "would travel to 10.0.0.1 for everybody to read"),
        ("https://elastic:secret@host:9200/x", "do not belong into an address"),
        ("https://host/x", "names no server and index"),
        ("https://host:9200", "names no server and index"),
        ("https://host:9200/", "names no server and index"),
        ("https://host:9200/Big", "names no server and index"),
        ("https://host:9200/_all", "names no server and index"),
        ("https://host:9200/a,b", "names no server and index"),
        ("https://host:9200/a*", "names no server and index"),
        ("https://host:9200/x?y=1", "names no server and index"),
        ("https://host:99999/x", "is no address"),
    ],
)
def test_addresses_that_are_none_are_refused(
    place: str, what: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CLIP_DEPLOY_ES_API_KEY", "secret")
    with pytest.raises(ConfigError, match=what) as caught:
        run(_with(place))
    assert "secret" not in f"{caught.value}"


def test_certificates_are_verified(
    elastic: Elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server that does not speak TLS, and a file of certificates that is not there."""
    with serving(elastic) as url, pytest.raises(ClipDeployError, match="https://"):
        run(_with(f"{url.replace('http', 'https')}/x"))
    monkeypatch.setenv("CLIP_DEPLOY_ES_CA_FILE", str(tmp_path / "none.crt"))
    with pytest.raises(ConfigError, match="names no file"):
        run(_with("https://127.0.0.1:9/x"))
