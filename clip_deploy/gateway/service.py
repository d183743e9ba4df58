"""What all routes share: one client, one index, and whether the two and Triton belong together right now."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy.errors import ClipDeployError, ConfigError, ModelChanged, ServerTimeout
from clip_deploy.gateway import bodies
from clip_deploy.gateway.pressure import within
from clip_deploy.gateway.problems import Problem, log_bug
from clip_deploy.indexes.port import IndexIdentity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from typing import Any

    from starlette.requests import Request
    from starlette.responses import Response

    from clip_deploy.client import AsyncTritonInferenceClient, Deployment
    from clip_deploy.gateway.pressure import Gate, Turn
    from clip_deploy.gateway.settings import GatewaySettings
    from clip_deploy.indexes import Index

_FRESH_S = 1.0
_PATIENCE_S = 2.0
_WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be answered, and if not, why; ``deployment`` is what Triton serves, where it said so."""

    deployment: Deployment | None
    problem: ClipDeployError | None

    @property
    def ready(self) -> bool:
        return self.problem is None


class Service:
    """A gateway's means, for the time that it runs.

    Args:
        settings: the gateway's.
        client: asks Triton.
        index: is searched; None where there is none.
        gate: lets requests in.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        client: AsyncTritonInferenceClient,
        index: Index | None,
        gate: Gate,
    ) -> None:
        self.settings, self.client, self._index, self._gate = settings, client, index, gate
        self._deployment: Deployment | None = None
        self._readiness: Readiness | None = None
        self._looked_s = 0.0
        self._looking = asyncio.Lock()

    @property
    def was_ready(self) -> bool:
        """Whether the last look found it ready."""
        return self._readiness is not None and self._readiness.ready

    @property
    def has_index(self) -> bool:
        return self._index is not None

    def index(self) -> Index:
        """The index.

        Raises:
            Problem: there is none.
        """
        if self._index is None:
            raise Problem(
                "no-index",
                "this gateway was started without an index, and gives embeddings only",
                remedy="start it with --index PLACE; clip-deploy index add makes one",
            )
        return self._index

    async def answer(
        self,
        request: Request,
        work: Callable[[bytes, Turn], Coroutine[Any, Any, Response]],
        *,
        most_bytes: int | None = None,
    ) -> Response:
        """What the work makes of a request's body, once it is the request's turn.

        Raises:
            Problem: it does not get a turn, or its body is too large or too slow.
            ClientDisconnect: its sender has gone.
        """
        settings = self.settings
        most = settings.max_upload_bytes if most_bytes is None else most_bytes
        bodies.declared_bytes(request, most)
        async with self._gate.turn() as turn:
            body = await bodies.read(request, turn, most=most, timeout_s=settings.upload_timeout_s)
            try:
                answer = await bodies.unless_gone(request, work(body, turn))
            except ServerTimeout:
                self._gate.late()
                raise
            self._gate.in_time()
            return answer

    async def deployment(self) -> Deployment:
        """The model that every vector comes from; looked at until it was found once, and held to by the client then.

        Raises:
            ClipDeployError: Triton does not serve both towers of one export, or not the index's.
        """
        if self._deployment is None:
            readiness = await self.readiness()
            if readiness.problem is not None:
                raise readiness.problem
        assert self._deployment is not None  # readiness found it
        return self._deployment

    async def readiness(self) -> Readiness:
        """Asks Triton, at most once a second however many ask here."""
        async with self._looking:
            if self._readiness is None or time.monotonic() - self._looked_s > _FRESH_S:
                self._readiness = await self._look()
                self._looked_s = time.monotonic()
            return self._readiness

    async def watch(self) -> None:
        """Keeps looking: a model that was replaced under its version number is seen here, and by nobody else."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                await self.readiness()
            except Exception as error:  # a watch that ended would never see a replaced model
                log_bug("looking at Triton", error)
                self._readiness = None

    async def _look(self) -> Readiness:
        try:
            found = await within(self.client.deployment(), _PATIENCE_S)
        except asyncio.TimeoutError:
            late = ServerTimeout(
                f"Triton did not describe its models within {_PATIENCE_S:g} s",
                remedy="see whether it is overloaded",
            )
            return Readiness(None, late)
        except ClipDeployError as error:
            return Readiness(None, error)
        problem = self._against(found)
        if problem is None:
            self._deployment = found
        return Readiness(found, problem)

    def _against(self, found: Deployment) -> ClipDeployError | None:
        """What speaks against answering with a deployment."""
        first, index = self._deployment, self._index
        if first is not None and first.weights_sha256 != found.weights_sha256:
            return ModelChanged(
                f"Triton began with weights {first.weights_sha256[:12]} and now serves {found.weights_sha256[:12]}",
                remedy="restart the gateway, on an index of the new model",
            )
        if index is not None:
            try:
                index.identity.require(IndexIdentity.of(found), self.settings.index or "given")
            except ConfigError as error:
                return error
        return None


@asynccontextmanager
async def opened(
    settings: GatewaySettings,
    gate: Gate,
    client: AsyncTritonInferenceClient | None = None,
    index: Index | None = None,
) -> AsyncIterator[Service]:
    """The service for the time that a gateway runs; what it opened itself is closed at the end.

    Raises:
        ConfigError: the index does not open, or holds vectors of another model than Triton serves.
    """
    async with AsyncExitStack() as stack:
        if client is None:
            from clip_deploy.client import AsyncTritonInferenceClient

            client = AsyncTritonInferenceClient(
                settings.triton, timeout_s=settings.timeout_s, decode=settings.decode
            )
            stack.push_async_callback(client.close)
        if index is None and settings.index is not None:
            from clip_deploy.indexes import open_index

            index = await open_index(settings.index)
            stack.push_async_callback(index.close)
        service = Service(settings, client, index, gate)
        found = await service.readiness()
        if found.deployment is not None and found.problem is not None:
            raise found.problem
        watching = asyncio.ensure_future(service.watch())
        stack.push_async_callback(_ended, watching)
        yield service


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
