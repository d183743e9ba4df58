"""Requests written once and sent many times: what a load generator needs to take little of the machine it measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio
from tritonclient.grpc import service_pb2

from clip_deploy.client.protocol import CHANNEL_OPTIONS, SERVICE, infer_request, translated
from clip_deploy.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from clip_deploy.client.served import ServedModel


def prepare(model: ServedModel, version: str, inputs: NDArray[Any]) -> tuple[bytes, ...]:
    """A request of one row for each of the inputs ``[n, …]``, in the bytes that go over the wire."""
    tensor, output = model.contract.input.name, model.contract.output.name
    return tuple(
        infer_request(model.name, {tensor: inputs[i : i + 1]}, output, version=version)
        for i in range(len(inputs))
    )


class PreparedSender:
    """Sends prepared requests to a Triton server from one event loop; an asynchronous context manager.

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        requests: what ``prepare`` gave.
        timeout_s: the deadline of each call.
    """

    def __init__(self, url: str, requests: Sequence[bytes], *, timeout_s: float = 30.0) -> None:
        self._url, self._requests, self._timeout_s = url, requests, timeout_s

    async def __aenter__(self) -> PreparedSender:
        # One channel carries a hundred callers at the same cost per request as four do.
        self._channel = aio.insecure_channel(self._url, options=CHANNEL_OPTIONS)
        self._infer: Any = self._channel.unary_unary(
            SERVICE + "ModelInfer",  # bytes go out as they are
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def __call__(self, number: int) -> bytes:
        """The bytes of the embedding that answers one request.

        Raises:
            ServerError: there is no answer, in the words of ``Connection``.
        """
        try:
            answer = await self._infer(self._requests[number], timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise translated(
                "the model", self._url, self._timeout_s, str(error.code()), error.details()
            ) from error
        if len(answer.raw_output_contents) != 1:
            raise ServerError(
                f"the model at {self._url} gave {len(answer.raw_output_contents)} outputs, not 1",
                remedy="see the server's log",
            )
        return bytes(answer.raw_output_contents[0])
