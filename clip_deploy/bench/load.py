"""Loads as a server meets them: callers who wait for their answers, and arrivals that wait for nothing.

Two things keep a load from flattering. A latency counts from the moment at which the request *should* have started,
so that a server that stalls cannot hide the requests it held up; and the load goes on until every request of the
measured time has its answer, so that the last ones do not meet a server at rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.compare import agreement
from clip_deploy.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from numpy.typing import NDArray

    from clip_deploy.spec import Tolerance

    Send = Callable[[int], Awaitable[bytes]]

# Answers are judged together: one comparison of many rows costs as much as one of a single row.
_JUDGED_TOGETHER = 256
# A caller who met an error asks again after this long: a dead server must not be asked in a busy loop.
_PAUSE_S = 0.05
# How long requests outside the measured time may finish before they are given up.
_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run, in seconds from its beginning; at ``give_up_s`` it waits for answers no more."""

    begin_s: float
    end_s: float
    give_up_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def __contains__(self, moment_s: float) -> bool:
        return self.begin_s <= moment_s < self.end_s


class Judge:
    """Holds answers against what is expected, many at a time; ``wrong`` are the numbers of requests that failed."""

    def __init__(self, expected: NDArray[np.float32], limits: Tolerance) -> None:
        self.wrong: list[int] = []
        self._expected, self._limits = expected, limits
        self._waiting: list[tuple[int, int, bytes]] = []

    def add(self, number: int, row: int, answer: bytes) -> None:
        """Take the answer to request ``number``, which asked for ``row`` of the expected embeddings."""
        if len(answer) != self._expected[row].nbytes:
            self.wrong.append(number)
            return
        self._waiting.append((number, row, answer))
        if len(self._waiting) >= _JUDGED_TOGETHER:
            self.close()

    def close(self) -> None:
        """Judge what still waits."""
        if not self._waiting:
            return
        numbers, rows, answers = zip(*self._waiting)
        self._waiting.clear()
        got = np.frombuffer(b"".join(answers), np.float32).reshape(len(rows), -1)
        expected = self._expected[list(rows)]
        if agreement(got, expected).faults(self._limits):
            self.wrong += [
                number
                for i, number in enumerate(numbers)
                if agreement(got[i : i + 1], expected[i : i + 1]).faults(self._limits)
            ]


class Ledger:
    """Every request of a run: its intended start, and when and how it ended.

    Args:
        judge: judges the answers.
        window: the measured time.
        clock: seconds since the run began.
    """

    def __init__(self, judge: Judge, window: Window, clock: Callable[[], float]) -> None:
        self.judge, self.window, self.clock = judge, window, clock
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []  # NaN where nothing came
        self.failed: set[int] = set()
        self.errors: Counter[str] = Counter()
        self.last_error: ServerError | None = None
        self.last_answer_s = 0.0
        self.slowest_s = 0.0
        self._awaited = 0

    def open(self, start_s: float) -> int:
        """The number of a new request that should start at ``start_s``."""
        self._awaited += start_s in self.window
        self.starts_s.append(start_s)
        self.ends_s.append(float("nan"))
        return len(self.starts_s) - 1

    def answer(self, number: int, row: int, answer: bytes) -> None:
        self._end(number)
        self.last_answer_s, self.last_error = self.ends_s[number], None
        self.slowest_s = max(self.slowest_s, self.last_answer_s - self.starts_s[number])
        self.judge.add(number, row, answer)

    def fail(self, number: int, error: ServerError) -> None:
        self._end(number)
        self.failed.add(number)
        self.last_error = error
        if self.starts_s[number] in self.window:
            self.errors[str(error)] += 1

    def _end(self, number: int) -> None:
        self.ends_s[number] = self.clock()
        self._awaited -= self.starts_s[number] in self.window

    @property
    def over(self) -> bool:
        """The measured time is over, and each of its requests has ended, or is given up."""
        now = self.clock()
        return now >= self.window.end_s and (not self._awaited or now >= self.window.give_up_s)


@dataclass(frozen=True, slots=True)
class Caller:
    """Asks the server for one row after another, and writes down what becomes of it."""

    send: Send
    ledger: Ledger
    rows: int

    async def __call__(self, number: int) -> bool:
        """Send one request that is already in the ledger; whether it was answered."""
        row = number % self.rows
        try:
            answer = await self.send(row)
        except ServerError as error:
            self.ledger.fail(number, error)
            return False
        self.ledger.answer(number, row, answer)
        return True


async def closed_loop(call: Caller, users: int) -> None:
    """So many users at once; each waits for an answer before asking again."""
    ledger = call.ledger

    async def user() -> None:
        while not ledger.over:
            if not await call(ledger.open(ledger.clock())):
                await asyncio.sleep(_PAUSE_S)

    await together(*(user() for _ in range(users)))


async def open_loop(call: Caller, arrivals_s: NDArray[np.float64], most_in_flight: int) -> bool:
    """Each request at its time, whether or not answers come; whether ``most_in_flight`` held any back.

    A request that is held back is in the ledger from its intended start, and is sent when another has ended.
    """
    ledger, held = call.ledger, _Held(call)
    try:
        for start_s in arrivals_s.tolist():
            if (early_s := start_s - ledger.clock()) > 0:
                await asyncio.sleep(early_s)
            if ledger.over:
                break
            held.send(ledger.open(start_s), most_in_flight)
        while not ledger.over:
            await asyncio.sleep(_PAUSE_S)
        if held.sending:
            await asyncio.wait(held.sending, timeout=_LEAVE_S)
    finally:
        await cancelled(held.sending)
    return held.any


class _Held:
    """Requests in flight, and those that wait for one of them to end."""

    def __init__(self, call: Caller) -> None:
        self.any = False
        self.sending: set[asyncio.Task[None]] = set()
        self._call = call
        self._waiting: deque[int] = deque()

    def send(self, number: int, most: int) -> None:
        if len(self.sending) >= most:
            self.any = True
            self._waiting.append(number)
            return
        task = asyncio.ensure_future(self._send(number))
        self.sending.add(task)
        task.add_done_callback(self.sending.discard)

    async def _send(self, number: int) -> None:
        """This request, and then those that wait: one task each for thousands of them would cost more than they do."""
        await self._call(number)
        while self._waiting and not self._call.ledger.over:
            await self._call(self._waiting.popleft())


def poisson(rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Arrival times in ``[0, seconds)``, drawn beforehand, so many per second on average."""
    generator = np.random.default_rng(seed)
    times = np.cumsum(generator.exponential(1 / rate, size=int(rate * seconds * 1.2) + 100))
    return np.asarray(times[times < seconds])


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; the first failure ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End tasks that are still running, and wait until they have."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
