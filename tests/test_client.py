"""The client against a stand-in for the connection: what it sends, what it believes, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from clip_deploy import client as clients
from clip_deploy.client import Connection, ServedModel, TritonInferenceClient
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import (
    ConfigError,
    InputError,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)
from clip_deploy.inputs.images import to_pixels
from clip_deploy.repository import render
from clip_deploy.repository.rendering import parse_config
from clip_deploy.resources import photographs_dir
from clip_deploy.spec import Scoring, ServingSpec, Tower
from tests.factories import CLIP_PREPROCESS, exported, unit

CAT = photographs_dir() / "cat.jpg"


class _Server:
    """Answers with a vector made of each row, and remembers what it was asked."""

    url = "stand-in:8001"

    def __init__(self, folder: Path, max_batch: int = 4, **changes) -> None:
        self.asked: list[tuple[str, np.ndarray]] = []
        self.spoil = lambda rows: rows
        self.configs = {}
        for tower in Tower:
            build = BACKENDS["python"].build(
                exported(folder, tower, **changes.get(tower.value, {}))
            )
            text = render(build, ServingSpec(max_batch=max_batch))
            self.configs[tower.model_name] = parse_config(text, "rendered")

    def config(self, model: str, version: str = ""):
        return self.configs[model]

    def infer(self, model: str, inputs: dict, output: str, **options) -> np.ndarray:
        (rows,) = inputs.values()
        self.asked.append((model, rows))
        seeds = np.abs(rows.reshape(len(rows), -1).astype(np.float64)).sum(axis=1)
        made = np.stack(
            [np.random.default_rng(int(seed * 1000) % 2**32).standard_normal(512) for seed in seeds]
        )
        return self.spoil(unit(made))

    def close(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> _Server:
    return _Server(tmp_path)


@pytest.fixture
def client(server: _Server, monkeypatch: pytest.MonkeyPatch) -> TritonInferenceClient:
    monkeypatch.setattr("clip_deploy.client.inference.Connection", lambda url, timeout_s: server)
    return TritonInferenceClient("stand-in:8001")


def test_the_public_names_are_these():
    assert set(clients.__all__) == {"Connection", "ServedModel", "TritonInferenceClient"}


def test_one_picture_gives_a_list_of_floats(client: TritonInferenceClient, server: _Server):
    vector = client.request_embedding(CAT)
    assert len(vector) == 512
    assert all(type(value) is float for value in vector)
    model, sent = server.asked[0]
    assert model == "clip_image_encoder"
    assert np.array_equal(sent, to_pixels([CAT], CLIP_PREPROCESS))


def test_many_rows_are_split_by_the_servers_max_batch(
    client: TritonInferenceClient, server: _Server
):
    texts = [f"{'cat ' * (i % 4)}photo" for i in range(10)]
    assert client.embed_texts(texts).shape == (10, 512)
    assert [len(rows) for _, rows in server.asked] == [4, 4, 2]


def test_rows_come_back_in_order(client: TritonInferenceClient):
    texts = ["a cat", "a dog", "a photo", "a cat of a dog", "photo"]
    together = client.embed_texts(texts)
    assert all(
        np.array_equal(together[i], client.embed_texts([text])[0]) for i, text in enumerate(texts)
    )


def test_a_request_is_bounded_in_bytes_too(
    client: TritonInferenceClient, server: _Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("clip_deploy.client.served._MAX_REQUEST_BYTES", 2 * 3 * 224 * 224 * 4)
    client.embed_images([CAT] * 5)
    assert [len(rows) for _, rows in server.asked] == [2, 2, 1]


def test_a_model_without_batching_takes_all_rows_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = _Server(tmp_path, max_batch=0)
    monkeypatch.setattr("clip_deploy.client.inference.Connection", lambda url, timeout_s: server)
    TritonInferenceClient("x:1").embed_texts(["cat"] * 7)
    assert [len(rows) for _, rows in server.asked] == [7]


def test_nothing_in_gives_nothing_out(client: TritonInferenceClient, server: _Server):
    assert client.embed_texts([]).shape == (0, 512)
    assert client.embed_images([]).shape == (0, 512)
    assert server.asked == []


def test_a_bad_input_among_good_ones_sends_nothing(client: TritonInferenceClient, server: _Server):
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
def test_an_answer_that_cannot_be_an_embedding_is_refused(
    client: TritonInferenceClient, server: _Server, spoil
):
    server.spoil = spoil
    with pytest.raises(ServerError, match="clip_image_encoder gave") as caught:
        client.request_embedding(CAT)
    assert "smoke-test" in caught.value.remedy


def test_scores_of_clip_are_a_softmax_over_the_texts(client: TritonInferenceClient):
    scores = client.score([CAT], ["a cat", "a dog"])
    assert scores.shape == (1, 2)
    assert scores.sum() == pytest.approx(1)


def test_scores_of_siglip_are_probabilities_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scoring = {"scoring": Scoring("sigmoid", 10.0, -2.0)}
    server = _Server(tmp_path, image=scoring, text=scoring)
    monkeypatch.setattr("clip_deploy.client.inference.Connection", lambda url, timeout_s: server)
    client = TritonInferenceClient("x:1")
    cosine = float(client.embed_images([CAT])[0] @ client.embed_texts(["a cat"])[0])
    assert client.score([CAT], ["a cat"])[0, 0] == pytest.approx(
        1 / (1 + np.exp(-(10 * cosine - 2))), rel=1e-5
    )


def test_encoders_of_different_weights_are_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = _Server(tmp_path, text={"weights_sha256": "f" * 64})
    monkeypatch.setattr("clip_deploy.client.inference.Connection", lambda url, timeout_s: server)
    with pytest.raises(ConfigError, match="different weights"):
        TritonInferenceClient("x:1").score([CAT], ["a cat"])


def test_a_model_that_does_not_describe_itself_is_not_guessed_at():
    config = parse_config(
        'name: "m" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 }', "x"
    )
    with pytest.raises(ConfigError, match=r"no parameter clip_deploy\.contract"):
        ServedModel.from_config(config)


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_a_text_model_with_another_tokenizer_is_refused(server: _Server, damage: str):
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
        ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded", ServerTimeout),
        ("StatusCode.UNAVAILABLE", "failed to connect to all addresses", ServerUnavailable),
        ("StatusCode.UNAVAILABLE", "Exceeds maximum queue size", ServerUnavailable),
        ("StatusCode.INVALID_ARGUMENT", "unexpected shape", ServerError),
        (None, None, ServerError),
    ],
)
def test_failures_of_the_channel_become_failures_with_a_remedy(status, message, kind):
    connection = Connection("127.0.0.1:1")
    with pytest.raises(kind) as caught, connection._translated("m"):
        raise InferenceServerException(msg=message, status=status)
    assert type(caught.value) is kind
    assert caught.value.remedy
    connection.close()


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
