"""One gRPC channel to a Triton server: a deadline on every call, and every failure in words."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
)
from tritonclient.utils import InferenceServerException

from clip_deploy.errors import ConfigError, ServerError, ServerTimeout, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from clip_deploy.triton_schema import ModelConfig

# numpy's name of a dtype → Triton's.
TRITON_DTYPES = {
    "float32": "FP32",
    "int32": "INT32",
    "uint8": "UINT8",
    "float16": "FP16",
    "int64": "INT64",
    "float64": "FP64",
}


class Connection:
    """A Triton server, asked over one gRPC channel.

    Safe to share between threads. Close it, or use it as a context manager.

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: the deadline of each call.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        if "://" in url or ":" not in url:
            raise ConfigError(
                f"{url!r} is no gRPC address", remedy="write host:port, as 127.0.0.1:8001"
            )
        self.url = url
        self.timeout_s = timeout_s
        self._client = InferenceServerClient(url)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._client.close()

    def server(self) -> Any:
        """The server's metadata: name (its ``--id``), version, extensions."""
        with self._translated("the server"):
            return self._client.get_server_metadata(client_timeout=self.timeout_s)

    def index(self) -> dict[str, str]:
        """Every model version that the server knows, ``name:version`` → state (``READY``, or why not)."""
        with self._translated("the repository index"):
            models = self._client.get_model_repository_index(client_timeout=self.timeout_s).models
        return {f"{m.name}:{m.version or '-'}": m.state or m.reason or "UNKNOWN" for m in models}

    def versions(self, model: str) -> dict[int, tuple[str, str]]:
        """Versions of a model that the server knows → (state, reason); the reason is empty where all is well."""
        with self._translated("the repository index"):
            models = self._client.get_model_repository_index(client_timeout=self.timeout_s).models
        return {
            int(m.version): (m.state, m.reason) for m in models if m.name == model and m.version
        }

    def config(self, model: str, version: str = "") -> ModelConfig:
        """A model's configuration as the server completed it."""
        with self._translated(model):
            return self._client.get_model_config(
                model, version, client_timeout=self.timeout_s
            ).config

    def metadata(self, model: str, version: str = "") -> Any:
        """A model's tensors as the server tells clients."""
        with self._translated(model):
            return self._client.get_model_metadata(model, version, client_timeout=self.timeout_s)

    def statistics(self, model: str, version: str = "") -> Any:
        """A model version's counters since it was loaded."""
        with self._translated(model):
            stats = self._client.get_inference_statistics(
                model, version, client_timeout=self.timeout_s
            )
        return stats.model_stats[0]

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether this *model version* answers requests; the server's own readiness says nothing about it."""
        with self._translated(model):
            return bool(self._client.is_model_ready(model, version, client_timeout=self.timeout_s))

    def is_live(self) -> bool:
        """Whether the server answers at all."""
        with self._translated("the server"):
            return bool(self._client.is_server_live(client_timeout=self.timeout_s))

    def load(self, model: str, config: str | None = None, *, timeout_s: float = 300.0) -> None:
        """Load a model, or load it again, and wait for it; needs a server in explicit control mode.

        Args:
            model: its name.
            config: JSON that takes the place of its config.pbtxt; None takes the file, if it changed since it was read.
            timeout_s: how long loading may take.

        Raises:
            ServerError: the server refuses it; what was loaded before stays.
        """
        with self._translated(f"loading {model}", timeout_s):
            self._client.load_model(model, config=config, client_timeout=timeout_s)

    def unload(self, model: str, *, timeout_s: float = 300.0) -> None:
        """Have a server in explicit control mode forget a model, once its requests have been answered."""
        with self._translated(f"unloading {model}", timeout_s):
            self._client.unload_model(model, client_timeout=timeout_s)

    def infer(
        self,
        model: str,
        inputs: dict[str, NDArray[Any]],
        output: str,
        *,
        version: str = "",
        request_id: str = "",
    ) -> NDArray[Any]:
        """One request: arrays as they are → one output."""
        tensors = [_tensor(name, array) for name, array in inputs.items()]
        with self._translated(model):
            result = self._client.infer(
                model,
                tensors,
                model_version=version,
                outputs=[InferRequestedOutput(output)],
                request_id=request_id,
                client_timeout=self.timeout_s,
            )
        try:
            array = result.as_numpy(output)
        except ValueError as error:  # fewer bytes than the shape needs
            raise ServerError(
                f"{model} gave a broken {output}: {error}", remedy="see the server's log"
            ) from error
        if array is None:
            raise ServerError(
                f"{model} gave no {output}", remedy="check the model's outputs in its config.pbtxt"
            )
        return np.asarray(array)

    @contextmanager
    def _translated(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise translated(
                what,
                self.url,
                timeout_s or self.timeout_s,
                str(error.status() or ""),
                error.message(),
            ) from error


def translated(
    what: str, url: str, timeout_s: float, status: str, message: str | None
) -> ServerError:
    """The failure in words of a call about ``what`` (a model, the server) that ended with a gRPC status."""
    message = message or "no reason given"
    if "DEADLINE_EXCEEDED" in status:
        return ServerTimeout(
            f"no answer from {url} about {what} within {timeout_s:g} s",
            remedy="give it longer, or see whether the server is overloaded",
        )
    if "UNAVAILABLE" in status and "failed to connect" in message.lower():
        return ServerUnavailable(
            f"no server answers at {url}", remedy="start one: clip-deploy serve REPOSITORY"
        )
    if "UNAVAILABLE" in status:
        return ServerUnavailable(
            f"{what} at {url} cannot answer now: {message}",
            remedy="try again later; see the server's log",
        )
    return ServerError(
        f"{what} at {url}: {message}", remedy="check the request, and the server's log"
    )


def _tensor(name: str, array: NDArray[Any]) -> InferInput:
    tensor = InferInput(name, list(array.shape), TRITON_DTYPES[array.dtype.name])
    tensor.set_data_from_numpy(array)
    return tensor
