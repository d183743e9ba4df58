"""Triton's gRPC protocol without any I/O: questions as bytes, answers as values, failures in words."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from tritonclient.grpc import service_pb2 as schema

from clip_deploy.client.link import LINK_OPTIONS
from clip_deploy.errors import (
    ConfigError,
    InputError,
    ServerBusy,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from clip_deploy.triton_schema import ModelConfig

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")

SERVICE = "/inference.GRPCInferenceService/"
# numpy's name of a dtype → Triton's.
TRITON_DTYPES = {
    "float32": "FP32",
    "int32": "INT32",
    "uint8": "UINT8",
    "float16": "FP16",
    "int64": "INT64",
    "float64": "FP64",
}
_NUMPY_DTYPES = {triton: numpy for numpy, triton in TRITON_DTYPES.items()}

# One channel for a client's life. Messages are bounded by what is sent, not by gRPC's 4 MB. A server that comes back
# is found within two seconds, where gRPC's own patience grows to two minutes. gRPC's own retries are off: they could
# reach another server than the one that was asked, unseen. Triton hangs up on whoever pings more often than every five
# minutes, three times in a row without data between; every two minutes never reaches that within a call's deadline.
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 120_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    *LINK_OPTIONS,
)


class ConnectionLost(ServerUnavailable):
    """The connection broke under a call, which may be sent again: an embedding changes nothing on the server."""


class NotServed(ServerUnavailable):
    """The server is there, and has no such model or version (any more, or not yet)."""


class Deadline:
    """The moment at which a whole call is over: preparing, every piece of it, retries included."""

    __slots__ = ("_end", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        if not 0 < timeout_s < math.inf:
            raise ConfigError(
                f"a deadline of {timeout_s!r} seconds", remedy="give a number above 0"
            )
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self, about: str) -> float:
        """Seconds that are left, more than 0.

        Raises:
            ServerTimeout: none are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.over(about)
        return left

    def over(self, about: str) -> ServerTimeout:
        return ServerTimeout(
            f"the call's {self.timeout_s:g} s were over before {about} was done",
            remedy="give it longer, ask for less at once, or see whether this machine or the server is overloaded",
        )

    def end(self) -> None:
        """Nobody waits for this call any more."""
        self._end = -math.inf

    def within(self, items: Iterable[_Item], about: str) -> Iterator[_Item]:
        """The items, as long as there is time for them."""
        for item in items:
            self.left_s(about)
            yield item


@dataclass(frozen=True, slots=True)
class Question(Generic[_Answer]):
    """One call of Triton's service: ``request`` as it goes over the wire, ``read`` makes sense of the answer.

    ``about`` is what it concerns (a model, the server), for the words of a failure.
    """

    method: str
    about: str
    request: bytes
    response: Any
    read: Callable[[Any], _Answer]


def address(url: str) -> str:
    """``host:port``, checked.

    Raises:
        ConfigError: it is something else.
    """
    if "://" in url or ":" not in url:
        raise ConfigError(
            f"{url!r} is no gRPC address", remedy="write host:port, as 127.0.0.1:8001"
        )
    return url


def server() -> Question[Any]:
    request = schema.ServerMetadataRequest()
    return _question("ServerMetadata", "the server", request, schema.ServerMetadataResponse)


def live() -> Question[bool]:
    request = schema.ServerLiveRequest()
    return _question(
        "ServerLive", "the server", request, schema.ServerLiveResponse, lambda a: a.live
    )


def index() -> Question[dict[str, str]]:
    def states(answer: Any) -> dict[str, str]:
        return {
            f"{m.name}:{m.version or '-'}": m.state or m.reason or "UNKNOWN" for m in answer.models
        }

    request = schema.RepositoryIndexRequest()
    response = schema.RepositoryIndexResponse
    return _question("RepositoryIndex", "the repository index", request, response, states)


def versions(model: str) -> Question[dict[int, tuple[str, str]]]:
    """Versions of a model that the server knows → (state, reason)."""

    def states(answer: Any) -> dict[int, tuple[str, str]]:
        return {
            int(m.version): (m.state, m.reason)
            for m in answer.models
            if m.name == model and m.version
        }

    request = schema.RepositoryIndexRequest()
    response = schema.RepositoryIndexResponse
    return _question("RepositoryIndex", "the repository index", request, response, states)


def unload(model: str) -> Question[None]:
    request = schema.RepositoryModelUnloadRequest(model_name=model)
    response = schema.RepositoryModelUnloadResponse
    return _question(
        "RepositoryModelUnload", f"unloading {model}", request, response, lambda answer: None
    )


def load(model: str, config: str | None) -> Question[None]:
    request = schema.RepositoryModelLoadRequest(model_name=model)
    if config is not None:
        request.parameters["config"].string_param = config
    response = schema.RepositoryModelLoadResponse
    return _question(
        "RepositoryModelLoad", f"loading {model}", request, response, lambda answer: None
    )


def config(model: str, version: str = "") -> Question[ModelConfig]:
    request = schema.ModelConfigRequest(name=model, version=version)
    return _question("ModelConfig", model, request, schema.ModelConfigResponse, lambda a: a.config)


def metadata(model: str, version: str = "") -> Question[Any]:
    request = schema.ModelMetadataRequest(name=model, version=version)
    return _question("ModelMetadata", model, request, schema.ModelMetadataResponse)


def newest_version(model: str) -> Question[str]:
    """The version that Triton takes where a request names none: the highest that is ready."""
    request = schema.ModelMetadataRequest(name=model)
    return _question(
        "ModelMetadata",
        model,
        request,
        schema.ModelMetadataResponse,
        lambda answer: max(answer.versions, key=int, default=""),
    )


def ready(model: str, version: str = "") -> Question[bool]:
    request = schema.ModelReadyRequest(name=model, version=version)
    return _question(
        "ModelReady", model, request, schema.ModelReadyResponse, lambda answer: answer.ready
    )


def statistics(model: str, version: str = "") -> Question[Any]:
    request = schema.ModelStatisticsRequest(name=model, version=version)
    return _question(
        "ModelStatistics",
        model,
        request,
        schema.ModelStatisticsResponse,
        lambda answer: answer.model_stats[0],
    )


def infer(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    output: str,
    *,
    version: str = "",
    request_id: str = "",
) -> Question[NDArray[Any]]:
    """Arrays as they are → one output."""
    return Question(
        "ModelInfer",
        model,
        infer_request(model, inputs, output, version=version, request_id=request_id),
        schema.ModelInferResponse,
        lambda answer: _array(answer, model, output),
    )


def infer_request(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    output: str,
    *,
    version: str = "",
    request_id: str = "",
) -> bytes:
    """The bytes of a ModelInferRequest; arrays are copied once, from their own memory to the message."""
    request = schema.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    request.outputs.add(name=output)
    parts: list[Any] = [b""]
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=_triton_dtype(array), shape=array.shape)
        parts += [_RAW_CONTENT, _varint(array.nbytes), _memory(array)]
    parts[0] = request.SerializeToString()
    return b"".join(parts)


# Field 7 of ModelInferRequest, raw_input_contents, of wire type 2. Protobuf's own objects would copy the pixels twice
# more; written behind the other fields, they are what every reader of the message expects.
_RAW_CONTENT = bytes([schema.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2])


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


def _memory(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _triton_dtype(array: NDArray[Any]) -> str:
    try:
        return TRITON_DTYPES[array.dtype.name]
    except KeyError:
        raise InputError(
            f"an array of {array.dtype} cannot be sent",
            remedy=f"use {', '.join(TRITON_DTYPES)}",
        ) from None


def _array(answer: Any, model: str, output: str) -> NDArray[Any]:
    names = [tensor.name for tensor in answer.outputs]
    if output not in names or len(answer.raw_output_contents) != len(names):
        raise ServerError(
            f"{model} gave no {output}", remedy="check the model's outputs in its config.pbtxt"
        )
    tensor = answer.outputs[names.index(output)]
    content = answer.raw_output_contents[names.index(output)]
    try:
        return np.frombuffer(content, _NUMPY_DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))
    except (KeyError, ValueError) as error:  # fewer bytes than the shape needs
        raise ServerError(
            f"{model} gave a broken {output}: {error}", remedy="see the server's log"
        ) from error


def _question(
    method: str,
    about: str,
    request: Any,
    response: Any,
    read: Callable[[Any], Any] = lambda answer: answer,
) -> Question[Any]:
    return Question(method, about, request.SerializeToString(), response, read)


# What Triton says of a request that it refused for want of room or time; seen on 2.51.
_REJECTED = ("exceeds maximum queue size", "request timeout expired")
# What gRPC says of a connection that broke under a call.
_LOST = (
    "stream removed",
    "socket closed",
    "connection reset",
    "broken pipe",
    "goaway",
    "cancelling all calls",
    "transport closed",
    "connection closed",
    "endpoint closing",
    "keepalive watchdog",
    "recvmsg",
    "sendmsg",
    "refused_stream",
)
_UNREACHABLE = ("failed to connect", "errors resolving", "dns resolution failed")


def translated(
    what: str, url: str, timeout_s: float, status: str, message: str | None
) -> ServerError:
    """The failure in words of a call about ``what`` (a model, the server) that ended with a gRPC status."""
    message = message or "no reason given"
    said = message.lower()
    if "DEADLINE_EXCEEDED" in status:
        return ServerTimeout(
            f"no answer from {url} about {what} within {timeout_s:g} s",
            remedy="give it longer, or see whether the server is overloaded",
        )
    if "NOT_FOUND" in status:
        return NotServed(
            f"{what} at {url} is not served now: {message}", remedy="load it; see the server's log"
        )
    if "UNAVAILABLE" in status:
        return _unavailable(what, url, message, said)
    return ServerError(
        f"{what} at {url}: {message}", remedy="check the request, and the server's log"
    )


def _unavailable(what: str, url: str, message: str, said: str) -> ServerUnavailable:
    if any(words in said for words in _REJECTED):
        return ServerBusy(
            f"{what} at {url} has more requests than it can serve: {message}",
            remedy="try again later, or serve it by more instances",
        )
    if any(words in said for words in _UNREACHABLE):
        return ServerUnavailable(
            f"no server answers at {url}", remedy="start one: clip-deploy serve REPOSITORY"
        )
    kind = ConnectionLost if any(words in said for words in _LOST) else ServerUnavailable
    return kind(
        f"{what} at {url} cannot answer now: {message}",
        remedy="try again later; see the server's log",
    )
