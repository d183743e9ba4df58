"""How much at once: turns for requests, memory for their bodies; what does not fit is refused at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from clip_deploy.gateway.problems import Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from clip_deploy.gateway.settings import GatewaySettings

_T = TypeVar("_T")
_LATER = "ask again after the seconds of Retry-After"
# A Triton that is late answers fewer at once than were let in. Fewer are let in then, and one more for every round of
# answers that came in time: refusing at once is kinder than a deadline, and leaves Triton to those who still wait.
_LATE_FACTOR = 0.7
_LEAST_IN_FLIGHT = 4


class Gate:
    """Lets a bounded number of requests in; a bounded number of further ones wait, for a bounded time, unread."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._line: deque[asyncio.Future[None]] = deque()
        self.in_flight = 0
        self.held_bytes = 0
        self._room = float(settings.max_in_flight)
        self._narrowed_s = -math.inf

    @property
    def room(self) -> int:
        """How many may be in flight now: ``max_in_flight``, or fewer while Triton is late."""
        return int(self._room)

    def in_time(self) -> None:
        """A request was answered."""
        self._room = min(self._room + 1 / self._room, float(self._settings.max_in_flight))

    def late(self) -> None:
        """A request met Triton's deadline; those that were let in together are late together, and count once."""
        now = time.monotonic()
        if now - self._narrowed_s > self._settings.timeout_s:
            self._narrowed_s = now
            least = min(_LEAST_IN_FLIGHT, self._settings.max_in_flight)
            self._room = max(self._room * _LATE_FACTOR, least)

    @property
    def waiting(self) -> int:
        return len(self._line)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """A request's turn, and the memory that it takes.

        Raises:
            Problem: its turn does not come.
        """
        await self._enter()
        turn = Turn(self)
        try:
            yield turn
        finally:
            self.held_bytes -= turn.held_bytes
            self._leave()

    def hold(self, size: int) -> None:
        """Count bytes before they are in memory.

        Raises:
            Problem: too many are.
        """
        if self.held_bytes + size > self._settings.max_buffered_bytes:
            raise Problem("memory", f"{self.held_bytes:,} bytes are in flight", remedy=_LATER)
        self.held_bytes += size

    async def _enter(self) -> None:
        settings = self._settings
        if self.in_flight < self.room and not self._line:
            self.in_flight += 1
            return
        if len(self._line) >= settings.max_waiting:
            raise Problem(
                "busy",
                f"{self.in_flight} requests are worked on, and {len(self._line)} wait",
                remedy=_LATER,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await asyncio.wait((turn,), timeout=settings.max_wait_s)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        if not turn.done():
            self._give_up(turn)
            raise Problem(
                "waited", f"its turn did not come within {settings.max_wait_s:g} s", remedy=_LATER
            )

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self._leave()
        else:
            self._line.remove(turn)

    def _leave(self) -> None:
        """The turn goes to whoever has waited longest, and as many more as there is room for now."""
        self.in_flight -= 1
        while self._line and self.in_flight < self.room:
            self._line.popleft().set_result(None)
            self.in_flight += 1


class Turn:
    """One request inside the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.held_bytes = 0

    def hold(self, size: int) -> None:
        """Count bytes of this request before they are in memory; they are let go at its end."""
        self._gate.hold(size)
        self.held_bytes += size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count bytes for a part of the work."""
        self.hold(size)
        try:
            yield
        finally:
            self._gate.held_bytes -= size
            self.held_bytes -= size


async def within(work: Awaitable[_T], timeout_s: float) -> _T:
    """What the work gives. Before Python 3.12 ``asyncio.wait_for`` forgets a cancellation that comes as the work ends.

    Raises:
        asyncio.TimeoutError: it takes longer, and is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
