"""A Triton made of Python: it answers as the real one does, in memory or over gRPC, and remembers what it was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as schema

from clip_deploy.client.protocol import SERVICE, Deadline, Question, translated
from clip_deploy.engines import BACKENDS
from clip_deploy.repository import render
from clip_deploy.repository.rendering import parse_config
from clip_deploy.spec import ServingSpec, Tower
from tests.factories import exported, unit

DTYPES = {"FP32": np.float32, "INT32": np.int32, "UINT8": np.uint8}


@dataclass(frozen=True)
class Asked:
    """One ModelInfer as it arrived."""

    model: str
    rows: np.ndarray
    version: str
    id: str


class Refusal(Exception):
    """What a server answers instead."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StandIn:
    """Both towers of a model, whose vectors are made of each row and of the weights.

    ``spoil`` changes the vectors, ``before`` is called with each question's method and may wait or raise ``Refusal``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_batch: int = 4,
        version: str = "1",
        weights: str = "a" * 64,
        **changes: dict[str, Any],
    ) -> None:
        self.asked: list[Asked] = []
        self.questions: list[str] = []
        self.context: Any = None  # of the latest call over gRPC
        self.spoil: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
        self.before: Callable[[str], None] = lambda method: None
        self.version, self.weights, self.ready = version, weights, True
        self.configs = {}
        for tower in Tower:
            contract = {"weights_sha256": weights} | changes.get(tower.value, {})
            build = BACKENDS["python"].build(exported(folder / weights[:4], tower, **contract))
            text = render(build, ServingSpec(max_batch=max_batch))
            self.configs[tower.model_name] = parse_config(text, "rendered")

    def config(self, model: str) -> Any:
        return self.configs[model]

    def answer(self, method: str, written: bytes) -> Any:
        self.questions.append(method)
        self.before(method)
        if method == "ServerLive":
            return schema.ServerLiveResponse(live=True)
        if method == "ServerMetadata":
            return schema.ServerMetadataResponse(name="stand-in", version="0")
        return {
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
            "ModelReady": self._ready,
            "ModelInfer": self._infer,
        }[method](written)

    def _metadata(self, written: bytes) -> Any:
        request = schema.ModelMetadataRequest.FromString(written)
        self._require(request.name, request.version)
        return schema.ModelMetadataResponse(name=request.name, versions=[self.version])

    def _config(self, written: bytes) -> Any:
        request = schema.ModelConfigRequest.FromString(written)
        self._require(request.name, request.version)
        return schema.ModelConfigResponse(config=self.configs[request.name])

    def _ready(self, written: bytes) -> Any:
        request = schema.ModelReadyRequest.FromString(written)
        known = request.name in self.configs and request.version in ("", self.version)
        return schema.ModelReadyResponse(ready=known and self.ready)

    def _require(self, model: str, version: str) -> None:
        if model not in self.configs:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{model}' is not found"
            )
        if version not in ("", self.version):
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"Request for unknown model: '{model}' version {version} is not found",
            )

    def _infer(self, written: bytes) -> Any:
        request = schema.ModelInferRequest.FromString(written)
        self._require(request.model_name, request.model_version)
        (tensor,), (content,), (wanted,) = (
            request.inputs,
            request.raw_input_contents,
            request.outputs,
        )
        rows = np.frombuffer(content, DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))
        self.asked.append(Asked(request.model_name, rows, request.model_version, request.id))
        vectors = self.spoil(unit(np.stack([self._vector(row) for row in rows])))
        dtype = {"float32": "FP32", "float64": "FP64"}[vectors.dtype.name]
        answer = schema.ModelInferResponse(
            model_name=request.model_name, model_version=self.version, id=request.id
        )
        answer.outputs.add(name=wanted.name, datatype=dtype, shape=vectors.shape)
        answer.raw_output_contents.append(vectors.tobytes())
        return answer

    def _vector(self, row: np.ndarray) -> np.ndarray:
        seed = int(np.abs(row.astype(np.float64)).sum() * 1000) % 2**32
        return np.random.default_rng([seed, int(self.weights[:4], 16)]).standard_normal(512)

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Over gRPC on the loopback, as long as the block lasts; then its connections end at once."""

        def handler(method: str) -> grpc.RpcMethodHandler:
            def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
                self.context = context
                try:
                    return self.answer(method, request).SerializeToString()
                except Refusal as refusal:
                    context.abort(refusal.code, str(refusal))
                    raise

            return grpc.unary_unary_rpc_method_handler(handle)

        methods = "ServerLive ServerMetadata ModelMetadata ModelConfig ModelReady ModelInfer"
        server = grpc.server(
            ThreadPoolExecutor(16),
            options=(("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)),
        )
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    SERVICE.strip("/"), {name: handler(name) for name in methods.split()}
                )
            ]
        )
        deadline = time.monotonic() + 10
        while True:
            try:
                bound = server.add_insecure_port(f"127.0.0.1:{port}")
                break
            except RuntimeError:  # the port of a server that has just ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        server.start()
        try:
            yield f"127.0.0.1:{bound}"
        finally:
            server.stop(0).wait()


class MemoryConnection:
    """In place of ``Connection``: no channel, the stand-in itself."""

    url = "stand-in:8001"
    losses = 0

    def __init__(self, server: StandIn) -> None:
        self._server = server

    def ask(self, question: Question[Any], deadline: Deadline) -> Any:
        try:
            answer = self._server.answer(question.method, question.request)
        except Refusal as error:
            raise translated(
                question.about, self.url, deadline.timeout_s, str(error.code), str(error)
            ) from None
        return question.read(answer)

    def close(self) -> None:
        pass
