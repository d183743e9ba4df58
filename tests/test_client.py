"""The client against a stand-in for the connection: what it sends, what it believes, what it refuses."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from clip_deploy import client as clients
from clip_deploy.client import (
    AsyncTritonInferenceClient,
    Connection,
    ServedModel,
    TritonInferenceClient,
)
from clip_deploy.client.lines import LoopLine
from clip_deploy.client.protocol import ConnectionLost, NotServed, translated
from clip_deploy.errors import (
    ConfigError,
    InputError,
    ModelChanged,
    ServerBusy,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)
from clip_deploy.inputs.images import to_pixels
from clip_deploy.repository.rendering import parse_config
from clip_deploy.resources import photographs_dir
from clip_deploy.spec import Scoring, Tower
from tests.factories import CLIP_PREPROCESS
from tests.standin import MemoryConnection, Refusal, StandIn

CAT = photographs_dir() / "cat.jpg"


class _MemoryLine(LoopLine):
    """In place of ``LoopLine``: a loop, threads, and no channel."""

    def __init__(self, server: StandIn) -> None:
        super().__init__("stand-in:8001")
        self._memory = MemoryConnection(server)
        self._pool = ThreadPoolExecutor(2)

    def _open(self) -> None:
        pass

    async def ask(self, question, deadline):
        await asyncio.sleep(0)
        return self._memory.ask(question, deadline)

    async def close(self) -> None:
        self._pool.shutdown()


class _Awaited:
    """The asynchronous client with the methods of the other, for tests of what both do."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, **options) -> None:
        self._client, self._loop = AsyncTritonInferenceClient(url, **options), loop

    def __getattr__(self, name: str):
        method = getattr(self._client, name)
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.fixture
def server(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.fixture(params=["blocking", "awaited"])
def connect(request, loop, monkeypatch: pytest.MonkeyPatch):
    """Makes a client of a stand-in, in memory; the tests below hold for both kinds."""
    clients = []

    def made(server: StandIn, **options):
        monkeypatch.setattr(
            "clip_deploy.client.inference.Connection",
            lambda url, timeout_s: MemoryConnection(server),
        )
        monkeypatch.setattr(
            "clip_deploy.client.inference.LoopLine", lambda url: _MemoryLine(server)
        )
        awaited = request.param == "awaited"
        clients.append(
            _Awaited("x:1", loop, **options) if awaited else TritonInferenceClient("x:1", **options)
        )
        return clients[-1]

    yield made
    for client in clients:
        client.close()


@pytest.fixture
def client(connect, server: StandIn):
    return connect(server)


def test_the_public_names_are_these():
    assert set(clients.__all__) == {
        "AsyncTritonInferenceClient",
        "Connection",
        "Deployment",
        "ServedModel",
        "TritonInferenceClient",
    }


def _methods(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def test_both_clients_have_the_same_methods_with_the_same_signatures_and_docstrings():
    blocking, awaited = _methods(TritonInferenceClient), _methods(AsyncTritonInferenceClient)
    assert blocking.keys() == awaited.keys()
    for name, method in blocking.items():
        assert inspect.iscoroutinefunction(awaited[name])
        assert not inspect.iscoroutinefunction(method)
        assert inspect.signature(method) == inspect.signature(awaited[name]), name
        assert method.__doc__ == awaited[name].__doc__, name
        assert method.__doc__
    assert inspect.signature(TritonInferenceClient) == inspect.signature(AsyncTritonInferenceClient)


def test_one_picture_gives_a_list_of_floats(client, server: StandIn):
    vector = client.request_embedding(CAT)
    assert len(vector) == 512
    assert all(type(value) is float for value in vector)
    asked = server.asked[0]
    assert (asked.model, asked.version) == ("clip_image_encoder", "1")
    assert np.array_equal(asked.rows, to_pixels([CAT], CLIP_PREPROCESS))


def test_many_rows_are_split_by_the_servers_max_batch(client, server: StandIn):
    texts = [f"{'cat ' * (i % 4)}photo" for i in range(10)]
    assert client.embed_texts(texts).shape == (10, 512)
    assert sorted(len(asked.rows) for asked in server.asked) == [2, 4, 4]


def test_rows_come_back_in_order(client):
    texts = ["a cat", "a dog", "a photo", "a cat of a dog", "photo"]
    together = client.embed_texts(texts)
    assert all(
        np.array_equal(together[i], client.embed_texts([text])[0]) for i, text in enumerate(texts)
    )


def test_a_request_is_bounded_in_bytes_too(
    client, server: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("clip_deploy.client.served._MAX_REQUEST_BYTES", 2 * 3 * 224 * 224 * 4)
    client.embed_images([CAT] * 5)
    assert sorted(len(asked.rows) for asked in server.asked) == [1, 2, 2]


def test_a_model_without_batching_takes_all_rows_at_once(tmp_path: Path, connect):
    server = StandIn(tmp_path, max_batch=0)
    connect(server).embed_texts(["cat"] * 7)
    assert [len(asked.rows) for asked in server.asked] == [7]


@pytest.mark.parametrize(
    "inputs",
    [
        np.zeros((1, 3, 224, 224), np.float64),
        np.zeros((1, 3, 224, 224), np.uint8),
        np.zeros((3, 224, 224), np.float32),
        np.zeros((1, 224, 224, 3), np.float32),
    ],
)
def test_prepared_inputs_of_another_shape_or_type_are_refused_unsent(
    client, server: StandIn, inputs: np.ndarray
):
    with pytest.raises(InputError, match="reads FP32") as caught:
        client.embed(Tower.IMAGE, inputs)
    assert "prepare_images" in caught.value.remedy
    assert server.asked == []


def test_what_is_prepared_apart_gives_the_same_vectors(client):
    assert np.array_equal(
        client.embed(Tower.IMAGE, client.prepare_images([CAT])), client.embed_images([CAT])
    )
    assert np.array_equal(
        client.embed(Tower.TEXT, client.prepare_texts(["a cat"])), client.embed_texts(["a cat"])
    )


def test_a_deployment_is_what_both_towers_say(client):
    found = client.deployment()
    assert (found.model, found.pretrained) == ("ViT-B-32", "laion2b_s34b_b79k")
    assert (found.weights_sha256, found.embed_dim) == ("a" * 64, 512)
    assert found.towers == (Tower.IMAGE, Tower.TEXT)
    assert found.trained


def test_a_model_that_is_not_ready_is_no_deployment(client, server: StandIn):
    server.ready = False
    with pytest.raises(ServerUnavailable, match=r"clip_image_encoder version 1 .* is not ready"):
        client.deployment()


def test_the_request_id_travels_with_every_piece(client, server: StandIn):
    client.embed_texts(["cat"] * 6, request_id="7f3a")
    assert [asked.id for asked in server.asked] == ["7f3a", "7f3a"]
    client.request_embedding(CAT, request_id="8")
    assert server.asked[-1].id == "8"


def test_the_model_is_read_once(client, server: StandIn):
    for _ in range(3):
        client.embed_texts(["cat"])
    assert server.questions.count("ModelConfig") == 1


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(connect, server: StandIn, timeout_s: float):
    with pytest.raises(ConfigError, match="deadline"):
        connect(server, timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="deadline"):
        connect(server).embed_texts(["cat"], timeout_s=timeout_s)


def test_preparing_counts_towards_the_deadline(client):
    def slow():
        for _ in range(500):
            time.sleep(0.02)
            yield CAT

    began = time.monotonic()
    with pytest.raises(ServerTimeout, match=r"call's 0\.1 s were over"):
        client.embed_images(slow(), timeout_s=0.1)
    assert time.monotonic() - began < 5


# Which model answers


def test_a_newer_version_of_the_same_weights_is_taken_without_a_failure(client, server: StandIn):
    client.embed_texts(["cat"])
    server.version = "2"
    client.embed_texts(["cat"])
    assert [asked.version for asked in server.asked] == ["1", "2"]


def test_a_newer_version_of_other_weights_is_refused_for_good(
    client, server: StandIn, tmp_path: Path
):
    client.embed_texts(["cat"])
    configs = server.configs
    server.version, server.configs = "2", StandIn(tmp_path, weights="b" * 64).configs
    asked = len(server.asked)
    with pytest.raises(ModelChanged, match="now has the weights bbbbbbbbbbbb") as caught:
        client.embed_texts(["cat"])
    assert "new client" in caught.value.remedy
    server.version, server.configs = "1", configs
    for call in (lambda: client.request_embedding(CAT), client.deployment):
        with pytest.raises(ModelChanged):
            call()
    assert len(server.asked) == asked


def test_the_same_weights_prepared_differently_are_another_model(
    client, server: StandIn, tmp_path: Path
):
    client.embed_images([CAT])
    squashed = {"preprocess": replace(CLIP_PREPROCESS, resize_mode="squash")}
    server.version, server.configs = "2", StandIn(tmp_path / "2", image=squashed).configs
    with pytest.raises(ModelChanged, match="reads its inputs differently"):
        client.embed_images([CAT])


def test_a_model_replaced_in_place_is_found_by_asking_for_the_deployment(
    client, server: StandIn, tmp_path: Path
):
    client.embed_texts(["cat"])
    server.configs = StandIn(tmp_path, weights="b" * 64).configs
    with pytest.raises(ModelChanged):
        client.deployment()


def test_a_model_that_is_gone_is_not_asked_for_for_ever(client, server: StandIn):
    client.embed_texts(["cat"])
    del server.configs["clip_text_encoder"]
    with pytest.raises(ServerUnavailable, match=r"clip_text_encoder .* is not served now"):
        client.embed_texts(["cat"])


def test_a_full_queue_is_told_at_once_and_not_asked_again(client, server: StandIn):
    client.embed_texts(["cat"])

    def refuse(method: str) -> None:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "[request id: x] Exceeds maximum queue size")

    server.before = refuse
    with pytest.raises(ServerBusy):
        client.embed_texts(["cat"])
    assert server.questions.count("ModelInfer") == 2


def test_nothing_in_gives_nothing_out(client, server: StandIn):
    assert client.embed_texts([]).shape == (0, 512)
    assert client.embed_images([]).shape == (0, 512)
    assert server.asked == []


def test_a_bad_input_among_good_ones_sends_nothing(client, server: StandIn):
    with pytest.raises(InputError):
        client.embed_images([CAT, b"not a picture"])
    with pytest.raises(InputError):
        client.embed_texts(["cat", "x" * 10_000])
    assert server.asked == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows * 2,
        lambda rows: rows * np.float32("nan"),
        lambda rows: np.zeros_like(rows),
        lambda rows: rows[:0],
        lambda rows: rows[:, :256],
        lambda rows: rows.astype(np.float64),
    ],
    ids=["long", "nan", "zero", "no rows", "short", "double"],
)
def test_an_answer_that_cannot_be_an_embedding_is_refused(client, server: StandIn, spoil):
    server.spoil = spoil
    with pytest.raises(ServerError, match="clip_image_encoder gave") as caught:
        client.request_embedding(CAT)
    assert "smoke-test" in caught.value.remedy


def test_scores_of_clip_are_a_softmax_over_the_texts(client):
    scores = client.score([CAT], ["a cat", "a dog"])
    assert scores.shape == (1, 2)
    assert scores.sum() == pytest.approx(1)


def test_scores_of_siglip_are_probabilities_of_their_own(tmp_path: Path, connect):
    scoring = {"scoring": Scoring("sigmoid", 10.0, -2.0)}
    client = connect(StandIn(tmp_path, image=scoring, text=scoring))
    cosine = float(client.embed_images([CAT])[0] @ client.embed_texts(["a cat"])[0])
    assert client.score([CAT], ["a cat"])[0, 0] == pytest.approx(
        1 / (1 + np.exp(-(10 * cosine - 2))), rel=1e-5
    )


def test_encoders_of_different_weights_are_neither_scored_nor_a_deployment(tmp_path: Path, connect):
    client = connect(StandIn(tmp_path, text={"weights_sha256": "f" * 64}))
    with pytest.raises(ConfigError, match="different weights"):
        client.score([CAT], ["a cat"])
    with pytest.raises(ConfigError, match="different weights"):
        client.deployment()


def test_a_model_that_does_not_describe_itself_is_not_guessed_at():
    config = parse_config(
        'name: "m" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 }', "x"
    )
    with pytest.raises(ConfigError, match=r"no parameter clip_deploy\.contract"):
        ServedModel.from_config(config)


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_a_text_model_with_another_tokenizer_is_refused(server: StandIn, damage: str):
    config = server.config("clip_text_encoder")
    if damage == "missing":
        del config.parameters["clip_deploy.tokenizer"]
    else:
        config.parameters["clip_deploy.tokenizer_sha256"].string_value = "0" * 64
    with pytest.raises(ConfigError, match="tokenizer"):
        ServedModel.from_config(config)


@pytest.mark.parametrize("url", ["127.0.0.1", "http://127.0.0.1:8000", ""])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match="no gRPC address"):
        Connection(url)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", ServerTimeout),
        ("DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)", ServerTimeout),
        ("UNAVAILABLE", "failed to connect to all addresses", ServerUnavailable),
        ("UNAVAILABLE", "errors resolving nowhere.invalid:8001: []", ServerUnavailable),
        ("UNAVAILABLE", "[request id: abc] Exceeds maximum queue size", ServerBusy),
        ("UNAVAILABLE", "Request timeout expired", ServerBusy),
        ("UNAVAILABLE", "Stream removed (Socket closed)", ConnectionLost),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", ConnectionLost),
        ("UNAVAILABLE", "GOAWAY received", ConnectionLost),
        ("UNAVAILABLE", "Cancelling all calls", ConnectionLost),
        ("UNAVAILABLE", "something new", ServerUnavailable),
        ("NOT_FOUND", "Request for unknown model: 'm' version 3 is not found", NotServed),
        ("NOT_FOUND", "Request for unknown model: 'm' has no available versions", NotServed),
        ("INVALID_ARGUMENT", "unexpected shape", ServerError),
        ("None", None, ServerError),
    ],
)
def test_failures_of_the_channel_become_failures_with_a_remedy(status, message, kind):
    failure = translated("m", "127.0.0.1:1", 1.0, f"StatusCode.{status}", message)
    assert type(failure) is kind
    assert failure.remedy


@pytest.mark.processes
def test_the_client_imports_where_torch_cannot_be_imported():
    code = """
import sys
for name in ("torch", "torchvision", "open_clip", "onnxruntime"):
    sys.modules[name] = None
from clip_deploy.client import TritonInferenceClient
print(TritonInferenceClient.request_embedding.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "request_embedding"
