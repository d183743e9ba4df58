"""One gRPC channel to a Triton server: a deadline on every call, and every failure in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np

from clip_deploy.client import protocol
from clip_deploy.client.link import linked
from clip_deploy.client.protocol import CHANNEL_OPTIONS, SERVICE, ConnectionLost, Deadline
from clip_deploy.errors import ServerUnavailable

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from clip_deploy.client.protocol import Question
    from clip_deploy.triton_schema import ModelConfig

_Answer = TypeVar("_Answer")


class Connection:
    """A Triton server, asked over one gRPC channel.

    Safe to share between threads. Close it, or use it as a context manager.

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: the deadline of each call.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url = protocol.address(url)
        self.timeout_s = timeout_s
        self._calls: dict[str, Any] = {}
        self._channel, self._link = linked(
            lambda: grpc.insecure_channel(self.url, options=CHANNEL_OPTIONS), _is_ready
        )

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
        self._channel.close()

    def ask(self, question: Question[_Answer], deadline: Deadline | None = None) -> _Answer:
        """The answer to one question of ``protocol``.

        Raises:
            ServerError: there is none; its kind says why.
        """
        deadline = deadline or Deadline(self.timeout_s)
        losses = self.losses
        try:
            answer = self._call(question)(question.request, timeout=deadline.left_s(question.about))
        except grpc.RpcError as error:
            failure = protocol.translated(
                question.about, self.url, deadline.timeout_s, str(error.code()), error.details()
            )
            if isinstance(failure, ConnectionLost):
                self._link.lose(losses)
            raise failure from error
        except ValueError as error:  # gRPC's word for a closed channel
            raise ServerUnavailable(
                f"the client of {self.url} is closed", remedy="make a new one"
            ) from error
        self._link.answered()
        return question.read(answer)

    def _call(self, question: Question[Any]) -> Any:
        if question.method not in self._calls:
            self._calls[question.method] = self._channel.unary_unary(
                SERVICE + question.method,  # requests go out as the bytes that they are
                response_deserializer=question.response.FromString,
            )
        return self._calls[question.method]

    @property
    def losses(self) -> int:
        """How often the connection is known to have been lost: whoever answers afterwards may be another server."""
        return self._link.losses

    def server(self) -> Any:
        """The server's metadata: name (its ``--id``), version, extensions."""
        return self.ask(protocol.server())

    def index(self) -> dict[str, str]:
        """Every model version that the server knows, ``name:version`` → state (``READY``, or why not)."""
        return self.ask(protocol.index())

    def versions(self, model: str) -> dict[int, tuple[str, str]]:
        """Versions of a model that the server knows → (state, reason); the reason is empty where all is well."""
        return self.ask(protocol.versions(model))

    def config(self, model: str, version: str = "") -> ModelConfig:
        """A model's configuration as the server completed it."""
        return self.ask(protocol.config(model, version))

    def metadata(self, model: str, version: str = "") -> Any:
        """A model's tensors as the server tells clients."""
        return self.ask(protocol.metadata(model, version))

    def statistics(self, model: str, version: str = "") -> Any:
        """A model version's counters since it was loaded."""
        return self.ask(protocol.statistics(model, version))

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether this *model version* answers requests; the server's own readiness says nothing about it."""
        return self.ask(protocol.ready(model, version))

    def is_live(self) -> bool:
        """Whether the server answers at all."""
        return self.ask(protocol.live())

    def load(self, model: str, config: str | None = None, *, timeout_s: float = 300.0) -> None:
        """Load a model, or load it again, and wait for it; needs a server in explicit control mode.

        Args:
            model: its name.
            config: JSON that takes the place of its config.pbtxt; None takes the file, if it changed since it was read.
            timeout_s: how long loading may take.

        Raises:
            ServerError: the server refuses it; what was loaded before stays.
        """
        self.ask(protocol.load(model, config), Deadline(timeout_s))

    def unload(self, model: str, *, timeout_s: float = 300.0) -> None:
        """Have a server in explicit control mode forget a model, once its requests have been answered."""
        self.ask(protocol.unload(model), Deadline(timeout_s))

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
        return np.asarray(
            self.ask(protocol.infer(model, inputs, output, version=version, request_id=request_id))
        )


def _is_ready(channel: Any) -> bool:
    # gRPC offers this as a subscription only, which is told later, and delays closing.
    try:
        state: int = channel._channel.check_connectivity_state(False)
    except ValueError:  # closed
        return True
    return state == grpc.ChannelConnectivity.READY.value[0]
