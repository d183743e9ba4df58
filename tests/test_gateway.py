"""The gateway around stand-ins: the shapes of its answers, every way to refuse, and what it writes down."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from clip_deploy import errors
from clip_deploy.cli import main
from clip_deploy.errors import ConfigError
from clip_deploy.gateway import GatewaySettings
from clip_deploy.gateway.models import EmbeddingAnswer, Ready, SearchAnswer, Status
from clip_deploy.gateway.problems import MEDIA_TYPE, REASONS, ProblemBody
from clip_deploy.indexes import IndexIdentity, open_index
from tests.gateway_parts import (
    DIM,
    WEIGHTS,
    FakeClient,
    FakeIndex,
    data_uri,
    deployment,
    gateway,
    image_form,
    jpeg,
    vectors,
)

TOKEN = "a-token-of-some-length"
IMAGE, TEXT, EMBED = "/api/v1/search/image", "/api/v1/search/text", "/v1/embeddings"
THUMBNAIL = "/api/v1/images/a%20folder/1.jpg"


def _reference(client: FakeClient, items: list[str | bytes]) -> np.ndarray:
    async def rows():
        made = []
        for item in items:
            prepare = client.prepare_texts if isinstance(item, str) else client.prepare_images
            made.append(vectors(await prepare([item]))[0])
        return np.stack(made)

    return asyncio.run(rows())


# Search


def test_an_image_finds_pictures():
    client, index = FakeClient(), FakeIndex()
    with gateway(client, index) as g:
        answer = g.post(IMAGE, **image_form(), params={"limit": 2})
    found = SearchAnswer.model_validate_json(answer.content)
    assert answer.status_code == 200
    assert [row.id for row in found.results] == ["a folder/1.jpg", "a folder/2.jpg"]
    assert found.results[0].thumbnail == THUMBNAIL
    assert found.model.weights_sha256 == WEIGHTS
    assert not found.model.trained
    assert set(found.timings_ms) == {"prepare", "embed", "search", "total"}
    assert found.request_id == answer.headers["x-request-id"] == client.request_ids[0]
    assert np.array_equal(index.asked[0]["vector"], _reference(client, [jpeg()])[0])
    assert index.asked[0]["limit"] == 2


@pytest.mark.parametrize(
    ("mode", "vector", "text"),
    [(None, True, True), ("hybrid", True, True), ("vector", True, False), ("text", False, True)],
)
def test_words_search_by_vector_by_caption_or_by_both(mode, vector: bool, text: bool):
    client, index = FakeClient(), FakeIndex()
    query = {"text": "a red cat"} | ({"mode": mode} if mode else {})
    with gateway(client, index) as g:
        answer = g.post(TEXT, json=query)
    assert answer.status_code == 200
    asked = index.asked[0]
    assert (asked["vector"] is not None) is vector
    assert asked["text"] == ("a red cat" if text else None)
    if vector:
        assert np.array_equal(asked["vector"], _reference(client, ["a red cat"])[0])


def test_a_thumbnail_is_sent_once():
    with gateway(index=FakeIndex()) as g:
        first = g.get(THUMBNAIL)
        again = g.get(THUMBNAIL, headers={"If-None-Match": first.headers["etag"]})
    assert first.content == jpeg(1)
    assert first.headers["content-type"] == "image/jpeg"
    assert (again.status_code, again.content) == (304, b"")


# Embeddings


def test_vectors_come_in_the_order_of_texts_and_images():
    client, items = FakeClient(), ["a cat", jpeg(1), "two red dogs", jpeg(2)]
    inputs = [item if isinstance(item, str) else data_uri(item) for item in items]
    with gateway(client) as g:
        answer = g.post(EMBED, json={"input": inputs, "model": "tiny"})
    found = EmbeddingAnswer.model_validate_json(answer.content)
    assert [row.index for row in found.data] == [0, 1, 2, 3]
    got = np.array([row.embedding for row in found.data], np.float32)
    assert np.array_equal(got, _reference(client, items))
    assert found.usage.num_images == 2
    assert found.usage.prompt_tokens == found.usage.total_tokens == 5


def test_base64_vectors_are_the_same_float32():
    client = FakeClient()
    with gateway(client) as g:
        answer = g.post(EMBED, json={"input": "a cat", "encoding_format": "base64"})
    packed = answer.json()["data"][0]["embedding"]
    got = np.frombuffer(base64.b64decode(packed), "<f4")
    assert np.array_equal(got, _reference(client, ["a cat"])[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openais_own_client_understands_it():
    openai = pytest.importorskip("openai")
    client = FakeClient()
    with gateway(client, names=("nvidia/nvclip",), tokens=(TOKEN,)) as g:
        api = openai.AsyncOpenAI(
            api_key=TOKEN, base_url="http://localhost/v1", http_client=g.http, max_retries=0
        )
        names = [model.id for model in g.run(api.models.list()).data]
        inputs = ["a cat", data_uri(jpeg(1))]
        found = g.run(api.embeddings.create(model=names[1], input=inputs))
        with pytest.raises(openai.NotFoundError):
            g.run(api.embeddings.create(model="text-embedding-3-small", input="a cat"))
        wrong = openai.AsyncOpenAI(
            api_key="x", base_url="http://localhost/v1", http_client=g.http, max_retries=0
        )
        with pytest.raises(openai.AuthenticationError):
            g.run(wrong.models.list())
    assert names == ["tiny", "nvidia/nvclip"]
    got = np.array([row.embedding for row in found.data], np.float32)
    assert np.array_equal(got, _reference(client, ["a cat", jpeg(1)]))


@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        ([], "0 texts"),
        (["a"] * 9, "9 texts"),
        (["a", " "], "input.1: an empty text"),
        (["a", "https://shop.example/cat.jpg"], "input.1: refers"),
        (["data:image/png;asset_id,1234"], "input.0: refers"),
        (['<img src="data:image/png;base64,AAAA" />'], "input.0: refers"),
        (["data:application/pdf;base64,AAAA"], "input.0: refers"),
        (["data:image/png;base64,A*A="], "input.0: its base64 is damaged"),
        ([[1, 2, 3]], "input"),
        ([1], "input"),
    ],
)
def test_inputs_that_would_be_misunderstood_are_refused(inputs: list, fault: str):
    with gateway(max_inputs=8) as g:
        answer = g.post(EMBED, json={"input": inputs})
    assert answer.status_code == 422
    assert fault in answer.json()["detail"]


def test_words_that_only_resemble_a_reference_are_embedded():
    texts = ["data: the new oil", "see https://shop.example for more", "image/png"]
    with gateway() as g:
        assert g.post(EMBED, json={"input": texts}).status_code == 200


def test_a_bad_picture_among_good_ones_has_its_number():
    with gateway() as g:
        answer = g.post(
            EMBED, json={"input": [data_uri(jpeg()), "a cat", data_uri(b"not a picture")]}
        )
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("input.2: ")


def test_many_images_are_taken_a_few_at_a_time_and_their_pixels_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("clip_deploy.gateway.embeddings._IMAGES_AT_ONCE", 3)
    client, held = FakeClient(), []
    images = [jpeg(i) for i in range(8)]
    with gateway(client) as g:
        embed, gate = client.embed, g.app.state.service._gate

        async def look(tower, inputs, **options):
            held.append((len(inputs), gate.held_bytes))
            return await embed(tower, inputs, **options)

        client.embed = look
        answer = g.post(EMBED, json={"input": [data_uri(image) for image in images]})
    got = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
    assert np.array_equal(got, _reference(client, images))
    assert [count for count, _ in held] == [3, 3, 2]
    body = held[0][1] - 2 * 3 * 192
    assert [size - body for _, size in held] == [2 * count * 192 for count, _ in held]
    assert gate.held_bytes == 0


@pytest.mark.parametrize("query", [{"dimensions": 8}, {"encoding_format": "int8"}])
def test_what_is_not_done_is_not_ignored(query: dict):
    with gateway() as g:
        assert g.post(EMBED, json={"input": "a cat", **query}).status_code == 422
        assert g.post(EMBED, json={"input": "a cat", "dimensions": DIM}).status_code == 200


# Refusals: every error status of every route in OpenAPI is produced here


def _request(path: str) -> dict:
    return {
        IMAGE: image_form(),
        TEXT: {"json": {"text": "a cat"}},
        EMBED: {"json": {"input": "a cat"}},
    }.get(path, {})


async def _slowly():
    yield b"{"
    await asyncio.sleep(1)
    yield b"}"


async def _endlessly():
    while True:
        yield b"x" * 10_000
        await asyncio.sleep(0)


def _failing(error: Exception):
    """The client fails once the gateway knows its model."""

    def spoil(client: FakeClient, index: FakeIndex) -> None:
        client.failure = error

    return spoil


def _damaged(client: FakeClient, index: FakeIndex) -> None:
    index.failure = errors.IndexDamaged("a file is gone", remedy="make it again")


def _unreachable(client: FakeClient, index: FakeIndex) -> None:
    index.failure = errors.ServerUnavailable("no Elasticsearch", remedy="start it")


_OUR = {"remedy": "do this"}
WORK = (IMAGE, TEXT, EMBED)
# reason, routes, settings, what happens to client and index, what the request has instead
REFUSALS = [
    ("token", (*WORK, THUMBNAIL, "/api/v1/status", "/v1/models"), {"tokens": (TOKEN,)}, None, {}),
    ("not-found", (THUMBNAIL.replace("1.", "9."),), {}, None, {}),
    ("no-index", (IMAGE, TEXT, THUMBNAIL), {"index": None}, None, {}),
    ("unknown-model", (EMBED,), {}, None, {"json": {"input": "a", "model": "gpt"}}),
    ("slow-upload", WORK, {"upload_timeout_s": 0.02}, None, {"content": _slowly}),
    ("too-large", WORK, {"max_upload_bytes": 2000}, None, {"content": b"x" * 200_000}),
    ("too-large", WORK, {"max_upload_bytes": 2000}, None, {"content": _endlessly}),
    ("shape", WORK, {}, None, {"content": b"{"}),
    ("shape", (IMAGE,), {}, None, {"files": {"image": b"x"}}),
    ("shape", (IMAGE,), {}, None, {"files": [("file", b"x"), ("file", b"y")]}),
    ("shape", (IMAGE,), {}, None, {"params": {"limit": 0}}),
    ("shape", (TEXT,), {}, None, {"json": {"text": "  "}}),
    ("shape", (TEXT,), {}, None, {"json": {"text": "a", "mode": "magic"}}),
    ("shape", (TEXT,), {}, None, {"json": {"text": "a", "limt": 5}}),
    ("input", (IMAGE,), {}, None, image_form(b"<html>not a picture")),
    ("input", (IMAGE,), {}, None, image_form(jpeg()[:200])),
    ("input", (IMAGE,), {}, None, image_form(jpeg(size=(2000, 1)))),
    ("input", (EMBED,), {}, None, {"json": {"input": "x" * 9000}}),
    ("bug", WORK, {}, _failing(ZeroDivisionError("secret")), {}),
    ("triton-answer", WORK, {}, _failing(errors.ServerError("length 2, not 1", **_OUR)), {}),
    ("triton-busy", WORK, {}, _failing(errors.ServerBusy("queue", **_OUR)), {}),
    ("triton-unavailable", WORK, {}, _failing(errors.ServerUnavailable("gone", **_OUR)), {}),
    ("model-changed", WORK, {}, _failing(errors.ModelChanged("other", **_OUR)), {}),
    ("triton-timeout", WORK, {}, _failing(errors.ServerTimeout("late", **_OUR)), {}),
    ("memory", WORK, {"max_buffered_bytes": 2000, "max_upload_bytes": 2000}, None, {"held": 1999}),
    ("index-damaged", (IMAGE, TEXT, THUMBNAIL, "/api/v1/status"), {}, _damaged, {}),
    ("index-unavailable", (IMAGE, TEXT, THUMBNAIL, "/api/v1/status"), {}, _unreachable, {}),
    ("origin", WORK, {}, None, {"headers": {"Origin": "https://evil.example"}}),
    ("origin", WORK, {}, None, {"headers": {"Origin": "null"}}),
    ("host", WORK, {}, None, {"headers": {"Host": "evil.example"}}),
    ("not-found", ("/api/v2/search",), {}, None, {}),
    ("method", ("/livez",), {}, None, {"method": "DELETE"}),
]
CASES = [
    pytest.param(reason, path, *rest, id=f"{reason} {path}")
    for reason, paths, *rest in REFUSALS
    for path in paths
]


@pytest.mark.parametrize(("reason", "path", "settings", "spoil", "instead"), CASES)
def test_every_refusal_is_a_problem_with_a_remedy(
    reason: str, path: str, settings: dict, spoil, instead: dict
):
    client, index = FakeClient(), FakeIndex()
    settings, instead = dict(settings), dict(instead)
    if "index" in settings:
        index = settings.pop("index")
    if callable(instead.get("content")):
        instead["content"] = instead["content"]()
    replaced = {} if "content" in instead else _request(path)
    with gateway(client, index, **settings) as g:
        if spoil:
            spoil(client, index)
        g.app.state.service._gate.held_bytes += instead.pop("held", 0)
        method = instead.pop("method", "POST" if path in WORK else "GET")
        answer = g.run(g.http.request(method, path, **(replaced | instead)))
        metrics = g.get("/metrics", headers={"Host": "localhost"}).text
    problem = ProblemBody.model_validate_json(answer.content)
    assert answer.status_code == problem.status == REASONS[reason][0]
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert problem.type == f"urn:clip-deploy:{reason}"
    assert problem.detail
    assert problem.remedy
    assert problem.request_id == answer.headers["x-request-id"]
    assert ("retry-after" in answer.headers) is (answer.status_code == 503)
    assert "secret" not in answer.text
    assert f'clip_gateway_refused_total{{reason="{reason}"}} 1.0' in metrics
    assert g.lines()[0]["refused"] == reason


def test_openapi_names_no_error_that_is_not_tested():
    tested = {(path, REASONS[reason][0]) for reason, paths, *_ in REFUSALS for path in paths}
    tested |= {("/readyz", 503), ("/v1/models", 503), ("/v1/models", 504)}  # further down
    with gateway() as g:
        api = g.get("/openapi.json").json()
    for path, operations in api["paths"].items():
        for operation in operations.values():
            for status in operation["responses"]:
                if int(status) >= 400:
                    place = THUMBNAIL if path.startswith("/api/v1/images") else path
                    assert (place, int(status)) in tested or (
                        (THUMBNAIL.replace("1.", "9."), int(status)) in tested
                    ), (path, status)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded():
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000)))
    with gateway(index=FakeIndex()) as g:
        answer = g.post(IMAGE, **image_form(bomb))
    assert answer.status_code == 422
    assert "pixels" in answer.json()["detail"]


def test_what_a_request_says_wrongly_is_never_echoed():
    with gateway(index=FakeIndex()) as g:
        answer = g.post(TEXT, json={"text": "a", "password": "hunter2"})
    assert answer.json()["errors"] == [
        {"field": "password", "message": "Extra inputs are not permitted"}
    ]


# Who may ask


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
        (f"Bearer {TOKEN}x", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer", 401),
        ("", 401),
    ],
)
def test_a_token_opens_the_api(header: str, status: int):
    with gateway(tokens=(TOKEN, "another-one-of-theirs")) as g:
        answer = g.get("/v1/models", headers={"Authorization": header})
        assert answer.status_code == status
        assert ("www-authenticate" in answer.headers) is (status == 401)
        for path in ("/livez", "/readyz", "/metrics", "/docs"):
            assert g.get(path).status_code == 200


def test_a_web_site_may_ask_when_it_is_allowed():
    site = {"Origin": "https://shop.example"}
    with gateway(origins=("https://shop.example",), tokens=(TOKEN,)) as g:
        before = g.run(
            g.http.options(
                EMBED,
                headers=site
                | {
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization",
                },
            )
        )
        answer = g.post(
            EMBED, json={"input": "a cat"}, headers=site | {"Authorization": f"Bearer {TOKEN}"}
        )
    for got in (before, answer):
        assert got.status_code == 200
        assert got.headers["access-control-allow-origin"] == "https://shop.example"


def test_the_gateways_own_page_may_ask():
    with gateway() as g:
        headers = {"Origin": "http://localhost:8080", "Host": "localhost:8080"}
        assert g.post(EMBED, json={"input": "a"}, headers=headers).status_code == 200


def test_names_are_checked_where_they_are_given_or_the_gateway_is_local():
    for settings, host, status in (
        ({}, "127.0.0.1:8080", 200),
        ({}, "[::1]:8080", 200),
        ({"host": "0.0.0.0"}, "shop.example", 200),
        ({"host": "0.0.0.0", "hosts": ("shop.example",)}, "shop.example:80", 200),
        ({"host": "0.0.0.0", "hosts": ("shop.example",)}, "10.0.0.1", 421),
    ):
        with gateway(**settings) as g:
            assert g.get("/livez", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens": ("short",)},
        {"tokens": ("with a line\nin its middle",)},
        {"origins": ("shop.example",)},
        {"origins": ("*",)},
        {"max_in_flight": 0},
        {"max_wait_s": float("nan")},
        {"max_buffered_bytes": 1},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict):
    with pytest.raises(ConfigError):
        GatewaySettings("h:1", **settings)


# Ready, and what it is made of


def test_ready_says_of_which_model():
    with gateway(index=FakeIndex()) as g:
        answer = g.get("/readyz")
    ready = Ready.model_validate_json(answer.content)
    assert answer.status_code == 200
    assert ready.ready
    assert ready.model.weights_sha256 == WEIGHTS


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (errors.ServerUnavailable("no server answers", **_OUR), 503),
        (errors.ConfigError("the encoders come from different weights", **_OUR), 503),
        (errors.ServerTimeout("no answer", **_OUR), 504),
    ],
)
def test_it_starts_without_triton_and_becomes_ready_later(
    monkeypatch: pytest.MonkeyPatch, failure: errors.ClipDeployError, status: int
):
    monkeypatch.setattr("clip_deploy.gateway.service._FRESH_S", 0)
    client = FakeClient()
    client.failure = failure
    with gateway(client, FakeIndex()) as g:
        answer = g.get("/readyz")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "reason": str(failure), "model": None}
        assert g.get("/livez").status_code == 200
        assert g.get("/v1/models").status_code == status
        assert g.post(IMAGE, **image_form()).status_code == status
        now = Status.model_validate_json(g.get("/api/v1/status").content)
        assert (now.ready, now.model, now.index.items) == (False, None, 3)
        client.failure = None
        assert g.get("/readyz").status_code == 200
        assert g.post(IMAGE, **image_form()).status_code == 200
        assert g.get("/api/v1/status").json()["model"]["name"] == "tiny"


def test_another_model_makes_it_unready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clip_deploy.gateway.service._FRESH_S", 0)
    client = FakeClient()
    with gateway(client) as g:
        assert g.get("/readyz").status_code == 200
        client.serves = deployment("b" * 64)
        answer = g.get("/readyz")
        assert answer.status_code == 503
        assert "bbbb" in answer.json()["reason"]


def test_a_bug_while_looking_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr("clip_deploy.gateway.service._FRESH_S", 0)
    monkeypatch.setattr("clip_deploy.gateway.service._WATCH_S", 0.005)
    client = FakeClient()
    with gateway(client) as g:
        service = g.app.state.service

        async def until(is_ready: bool) -> None:
            while service.was_ready is not is_ready:
                await asyncio.sleep(0.005)

        for failure, is_ready in ((RuntimeError("a bug"), False), (None, True)):
            client.failure = failure
            g.run(asyncio.wait_for(until(is_ready), 20))
    assert "a bug" in caplog.text


def test_an_index_of_another_model_ends_the_start():
    with (
        pytest.raises(ConfigError, match="holds vectors of tiny"),
        gateway(FakeClient(), FakeIndex("b" * 64)),
    ):
        pass


def test_an_index_of_another_model_is_never_searched(monkeypatch: pytest.MonkeyPatch):
    """Triton comes up after the gateway, with another model."""
    monkeypatch.setattr("clip_deploy.gateway.service._FRESH_S", 0)
    client, index = FakeClient(), FakeIndex("b" * 64)
    client.failure = errors.ServerUnavailable("no server answers", **_OUR)
    with gateway(client, index) as g:
        client.failure = None
        assert g.get("/readyz").status_code == 503
        for path in (IMAGE, TEXT):
            answer = g.post(path, **_request(path))
            assert answer.status_code == 503
            assert "holds vectors of tiny" in answer.json()["detail"]
        assert index.asked == []


def test_triton_is_looked_at_once_a_second_however_many_ask():
    client = FakeClient()
    with gateway(client) as g:

        async def everybody():
            return await asyncio.gather(*(g.http.get("/readyz") for _ in range(50)))

        assert {answer.status_code for answer in g.run(everybody())} == {200}
    assert client.looks == 1


def test_what_it_was_given_stays_open_and_what_it_opened_is_closed(
    monkeypatch: pytest.MonkeyPatch,
):
    given, opened = FakeClient(), FakeClient()
    with gateway(given):
        pass
    assert not given.closed
    monkeypatch.setattr(
        "clip_deploy.client.AsyncTritonInferenceClient", lambda *a, **o: opened, raising=False
    )
    from clip_deploy.gateway import create_app
    from tests.gateway_parts import Gateway

    with Gateway(create_app(GatewaySettings("h:1"))) as g:
        assert g.get("/readyz").status_code == 200
    assert opened.closed


# What is written down


def test_a_line_per_request_without_what_was_asked():
    with gateway(index=FakeIndex()) as g:
        g.post(TEXT, json={"text": "a secret wish"}, headers={"X-Request-ID": "order-17"})
        g.get("/nowhere/of/this/name?q=secret")
    found, missed = g.lines()
    assert found["request_id"] == "order-17"
    assert (found["method"], found["route"], found["status"]) == ("POST", TEXT, 200)
    assert set(found["stages_ms"]) == {"prepare", "embed", "search"}
    assert found["ms"] >= sum(found["stages_ms"].values())
    assert found["bytes_in"] == len(json.dumps({"text": "a secret wish"}, separators=(",", ":")))
    assert missed["route"] == "unmatched"
    assert "secret" not in g.log.getvalue()


@pytest.mark.parametrize("sent", ["", "x" * 129, "two words", 'quo"te', "new\tline"])
def test_a_request_id_that_is_not_sane_is_replaced(sent: str):
    client = FakeClient()
    with gateway(client) as g:
        answer = g.post(EMBED, json={"input": "a"}, headers={"X-Request-ID": sent})
    assert answer.headers["x-request-id"] == client.request_ids[0] != sent


def test_a_request_id_travels_to_triton():
    client = FakeClient()
    with gateway(client) as g:
        answer = g.post(EMBED, json={"input": "a"}, headers={"X-Request-ID": "order-17"})
    assert client.request_ids == ["order-17"]
    assert answer.headers["x-request-id"] == "order-17"


def test_metrics_have_bounded_labels():
    from prometheus_client.parser import text_string_to_metric_families as parse

    with gateway(index=FakeIndex()) as g:
        for i in range(20):
            g.get(f"/api/v1/images/{i}.jpg")
            g.get(f"/nowhere/{i}")
            g.run(g.http.request(f"VERB{i}", "/livez"))
        g.post(IMAGE, **image_form())
        text = g.get("/metrics").text
    rows = [sample for family in parse(text) for sample in family.samples]
    seen = {row.labels["route"] for row in rows if "route" in row.labels}
    assert seen == {"/api/v1/images/{id:path}", "unmatched", "/livez", IMAGE}
    assert {row.labels["method"] for row in rows if "method" in row.labels} == {
        *("GET", "POST", "other")
    }
    stages = {row.labels["stage"] for row in rows if "stage" in row.labels}
    assert stages == {"prepare", "embed", "search"}
    values = {row.name: row.value for row in rows if not row.labels}
    assert values["clip_gateway_in_flight"] == 0
    assert values["clip_gateway_received_bytes_total"] > len(jpeg())


# The page


def test_the_page_and_its_files_come_with_a_strict_policy(tmp_path: Path):
    for name, text in (("index.html", "<h1>hello"), ("page.js", "1"), ("page.css", "a{}")):
        (tmp_path / name).write_text(text)
    with gateway(page=tmp_path) as g:
        page, script = g.get("/"), g.get("/page.js")
        again = g.get("/page.js", headers={"If-None-Match": script.headers["etag"]})
        assert g.get("/../settings.py").status_code == 404
        assert g.get("/page.py").status_code == 404
    assert page.text == "<h1>hello"
    assert page.headers["content-type"].startswith("text/html")
    assert "javascript" in script.headers["content-type"]
    assert again.status_code == 304
    for answer in (page, script):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_docs_need_nothing_from_elsewhere():
    with gateway() as g:
        page = g.get("/docs").text
        api = g.get("/openapi.json").json()
    for path in api["paths"]:
        assert path in page
    for outside in ("http://", "https://", "<script", "<style", "src="):
        assert outside not in page


@pytest.mark.parametrize("tokens", [(), (TOKEN,)])
def test_openapi_is_whole_and_says_where_a_token_is_needed(tokens: tuple):
    with gateway(tokens=tokens) as g:
        api = g.get("/openapi.json").json()
    text = json.dumps(api)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in api["components"]["schemas"]
    guarded = {
        path for path, one in api["paths"].items() for row in one.values() if "security" in row
    }
    expected = {path for path in api["paths"] if path.startswith(("/api/", "/v1/"))}
    assert guarded == (expected if tokens else set())


def test_the_examples_in_openapi_can_be_sent_as_they_stand():
    with gateway(index=FakeIndex()) as g:
        api = g.get("/openapi.json").json()
        for path in (TEXT, EMBED):
            content = api["paths"][path]["post"]["requestBody"]["content"]
            (example,) = _examples(content["application/json"]["schema"], api)
            assert g.post(path, json=example).status_code == 200
    assert "multipart/form-data" in api["paths"][IMAGE]["post"]["requestBody"]["content"]


def _examples(schema: dict, api: dict) -> list[dict]:
    """Those of a request as a whole, or one put together from those of its required fields."""
    if name := schema.get("$ref"):
        schema = api["components"]["schemas"][name.rpartition("/")[2]]
    fields = schema["properties"]
    return schema.get("examples") or [
        {key: fields[key]["examples"][0] for key in schema["required"]}
    ]


# The command


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    seen: list[GatewaySettings] = []
    monkeypatch.setattr(
        "clip_deploy.gateway.running.run", lambda settings, log, announce: seen.append(settings)
    )
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n{TOKEN}\n\nanother-one-of-theirs\n")
    assert main(["gateway", "--triton", "h:1", "--token-file", str(file)]) == 0
    assert seen[-1].tokens == (TOKEN, "another-one-of-theirs")
    monkeypatch.setenv("CLIP_DEPLOY_TOKENS", TOKEN)
    assert main(["gateway", "--triton", "h:1", "--host", "0.0.0.0"]) == 0
    assert seen[-1].tokens == (TOKEN,)
    assert "warning" not in capsys.readouterr().err
    monkeypatch.delenv("CLIP_DEPLOY_TOKENS")
    assert main(["gateway", "--triton", "h:1", "--host", "0.0.0.0"]) == 0
    assert "anybody who reaches 0.0.0.0 may ask" in " ".join(capsys.readouterr().err.split())
    file.write_text("# none\n")
    assert main(["gateway", "--triton", "h:1", "--token-file", str(file)]) == 2
    assert main(["gateway", "--triton", "h:1", "--token-file", str(tmp_path / "no")]) == 2


@pytest.mark.processes
@pytest.mark.parametrize(
    ("damage", "code", "what"),
    [
        ("missing", 2, "there is no index"),
        ("empty", 2, "there is no index"),
        ("index.json", 8, "index.json"),
        ("table", 8, "damaged"),
    ],
)
def test_an_index_that_does_not_open_ends_the_start_in_two_lines(
    tmp_path: Path, capsys, damage: str, code: int, what: str
):
    pytest.importorskip("lancedb")
    place = tmp_path / "photos.index"
    if damage == "empty":
        place.mkdir()
    elif damage != "missing":

        async def make() -> None:
            await (await open_index(str(place), create=IndexIdentity(WEIGHTS, DIM, "t"))).close()

        asyncio.run(make())
        for path in place.rglob("index.json" if damage == "index.json" else "*.manifest"):
            path.write_bytes(b"")
    arguments = ["gateway", "--triton", "127.0.0.1:9", "--port", "0", "--index", str(place)]
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "fix"]
    assert what in err
