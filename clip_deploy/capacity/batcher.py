"""Triton's dynamic batcher, simulated request by request on a measured batch-latency curve.

Modelled, as releases around 24.10 behave (their scheduler, payloads, rate limiter and instance queue were read, and the
result is held against the embedded server):

- One batcher per model fills one *payload* at a time; instances take payloads from one queue, first come first served.
- A payload leaves when it is full, when it has a preferred size, or when its oldest request has waited the delay. It
  may still grow until an instance takes it, but with a delay the batcher mostly sleeps meanwhile: until enough came to
  fill the payload, an instance takes one, or half a second is over. So requests that arrive while a batch runs often
  wait for the *next but one*. Without a delay every arrival wakes it.
- At most two payloads per instance wait in the queue. With a queue limit or a timeout there are none: a payload is made
  when an instance is free.
- When a batch ends, two threads race. Where the batcher is first, the waiting payload still takes all requests that
  came meanwhile; with a queue limit or a timeout it finds no free instance, and sleeps until the next arrival, or for
  half a second where the queue is full and arrivals are refused. (So a queue limit costs far more than it says.)
- Waiting payloads whose oldest request is older than the delay are merged when they fit together.
- A full queue refuses; a request that waited longer than the timeout is refused when the batcher next looks.

Not modelled: requests of several rows, priorities, ensembles, sequences, the response cache, timeouts that delay, a
client that gives up; times of the batcher's own thread, some 0.1 ms.

Times are whole nanoseconds inside, as in Triton, so that nothing depends on rounding.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from clip_deploy.capacity.clocks import EvenClock, PacedClock
from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clip_deploy.bench.curve import BatchCurve
    from clip_deploy.spec import ServingSpec

_NEVER = 2**63
_SECOND = 10**9
# The batcher's thread looks at its queue at least so often.
_NAP = _SECOND // 2
# A curve becomes a table of so many equally likely times per size.
_LEVELS = (np.arange(256) + 0.5) / 256
# When a batch ends, the batcher's thread wakes while the instance's thread looks for its next batch. How often the
# batcher is first: measured with Triton's trace (docs/capacity.md); with a queue limit or a timeout it is only fitted
# to what a sleeping model refused.
_GROWS, _MISSES = 0.5, 0.7
# A user whom a full queue refuses does not ask again at once.
_REFUSED_PAUSE = _SECOND // 1000


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened: one entry per request ``[n]`` in order of arrival, one per batch ``[m]`` in order of start.

    ``latency_s`` runs from a request's start to its answer, NaN for a refused one. ``busy_s`` is how long a batch
    occupied its instance; ``backlog`` how many requests were in the server when a request arrived, itself included.
    """

    start_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    backlog: NDArray[np.int64]
    batch_start_s: NDArray[np.float64]
    batch_size: NDArray[np.int64]
    busy_s: NDArray[np.float64]


def simulate(
    serving: ServingSpec,
    curve: BatchCurve,
    starts_s: NDArray[np.float64],
    *,
    seed: int = 0,
    offset_s: float | None = None,
) -> Simulated:
    """An open loop: single-row requests that start at these times, ascending, whether or not answers come.

    Args:
        offset_s: how far into the curve's pace the time 0 lies; None for a random place.
    """
    starts = (np.asarray(starts_s) * _SECOND).astype(np.int64).tolist()
    return _Batcher(serving, curve, starts, len(starts), seed, offset_s).run()


def simulate_users(
    serving: ServingSpec, curve: BatchCurve, users: int, requests: int, *, seed: int = 0
) -> Simulated:
    """A closed loop: so many users, each of whom asks again as soon as an answer is there."""
    starts = list(range(min(users, requests)))
    return _Batcher(serving, curve, starts, requests, seed).run()


@dataclass(slots=True, eq=False)
class _Payload:
    """A batch in the making: numbers of requests; ``taken`` when an instance has it."""

    requests: list[int] = field(default_factory=list)
    queued: bool = False
    taken: bool = False
    started: int = 0
    stolen: int = 0


class _Batcher:
    """The server's state between two events: an arrival, the end of a batch, or the batcher's alarm."""

    def __init__(
        self,
        serving: ServingSpec,
        curve: BatchCurve,
        starts: list[int],
        requests: int,
        seed: int,
        offset_s: float | None = None,
    ) -> None:
        if serving.timeout_action == "delay":
            raise ConfigError(
                "a queue timeout that delays is not simulated", remedy="plan with action reject"
            )
        self._max = max(1, serving.max_batch or 1)
        self._preferred = sorted(serving.preferred_batch_sizes) or [self._max]
        self._delay = serving.queue_delay_us * 1000
        self._limit = serving.max_queue_size
        self._timeout = serving.queue_timeout_us * 1000
        self._prefetches = not (self._limit or self._timeout)
        self._first = (_GROWS if self._prefetches else _MISSES) * len(_LEVELS)
        self._instances = self._idle = serving.instances
        self._times = {size: _times(curve, size) for size in range(1, self._max + 1)}
        generator = np.random.default_rng(seed)
        self._draws = _draws(generator)
        self._clock = _clock(curve, generator, offset_s)
        self._overhead = int(curve.overhead_s * _SECOND)
        self._theft = int(curve.stolen_s * _SECOND)
        self._coming = starts  # a sorted list is a heap
        self._issued, self._requests = len(starts), requests
        self._starts: list[int] = []
        self._latencies: list[int] = []
        self._backlog: list[int] = []
        self._inside = 0
        self._batches: list[tuple[int, int, int]] = []
        self._waiting: deque[int] = deque()
        self._queue: deque[_Payload] = deque()
        self._running: list[tuple[int, int, _Payload]] = []
        self._payload = _Payload()
        self._full = False
        self._next_preferred = 0
        self._alarm = _NEVER

    def run(self) -> Simulated:
        coming, running = self._coming, self._running
        while coming or running or self._waiting:
            arrival = coming[0] if coming else _NEVER
            end = running[0][0] if running else _NEVER
            if end <= arrival and end <= self._alarm:
                self._end()
            elif arrival <= self._alarm:
                self._arrive(heapq.heappop(coming))
            else:
                self._work(self._alarm)
        return self._simulated()

    def _arrive(self, now: int) -> None:
        number = len(self._starts)
        self._starts.append(now)
        self._latencies.append(-1)
        self._inside += 1
        self._backlog.append(self._inside)
        for _, _, payload in self._running:
            payload.stolen += self._theft // len(self._running)
        if self._limit and len(self._waiting) >= self._limit:
            self._refuse(now)
            return
        self._waiting.append(number)
        if self._has_slot() and (
            self._full or self._payload.taken or len(self._waiting) >= self._next_preferred
        ):
            self._work(now)

    def _end(self) -> None:
        """A batch is done, unless arrivals took some of its time; its instance and the batcher look for more."""
        now, number, payload = heapq.heappop(self._running)
        if payload.stolen:
            end = self._clock.end(now, payload.stolen)
            heapq.heappush(self._running, (end, number, payload))
            payload.stolen = 0
            return
        self._batches[number] = (payload.started, len(payload.requests), now - payload.started)
        for request in payload.requests:
            self._latencies[request] = now - self._starts[request] + self._overhead
            self._ask_again(now + self._overhead)
        self._inside -= len(payload.requests)
        first = next(self._draws) < self._first
        if first:
            self._work(now)
        self._idle += 1
        if self._queue:
            self._take(now)
        if self._prefetches or not first:
            self._work(now)

    def _work(self, now: int) -> None:
        """What the batcher's thread does when it is woken, until it sleeps again."""
        while True:
            if self._full or self._payload.taken:
                self._payload, self._full, self._next_preferred = _Payload(), False, 0
            self._alarm = now + _NAP
            if self._timeout:
                self._drop_expired(now)
            if not self._waiting or not self._has_slot():
                return
            count, wait = self._collect(now)
            if wait:
                self._alarm = now + wait
                return
            payload = self._payload
            payload.requests += [self._waiting.popleft() for _ in range(count)]
            if payload.requests and not payload.queued:
                payload.queued = True
                self._queue.append(payload)
                if self._idle:
                    self._take(now)

    def _collect(self, now: int) -> tuple[int, int]:
        """How many waiting requests join the payload now, or how long the batcher waits for more company."""
        size, waiting, preferred = len(self._payload.requests), len(self._waiting), self._preferred
        room = min(waiting, self._max - size)
        best = max((p - size for p in preferred if size < p <= size + room), default=0)
        if size >= preferred[-1]:
            self._full = True
        age = now - self._starts[self._waiting[0]]
        late = 0 < self._delay <= age
        if best and not late:
            self._full |= self._delay == 0
            return best, 0
        if size + waiting > self._max or size + room >= preferred[-1]:
            self._full = True
            return room, 0
        if late or self._delay == 0:
            return room, 0
        self._next_preferred = next(p for p in preferred if p > size + room) - size
        if size and size not in preferred:
            return room, 0
        wait = self._delay - age
        if self._timeout:
            wait = min(wait, self._timeout - age + 1)
        return (0, wait) if wait >= 1000 else (room, 0)  # Triton's clock for waits counts µs

    def _has_slot(self) -> bool:
        """Whether the batcher may hand over a payload."""
        if self._prefetches:
            return len(self._queue) < 2 * self._instances
        return self._idle > len(self._queue)

    def _take(self, now: int) -> None:
        """An idle instance begins with the first payload, and with those that may be merged into it."""
        payload = self._queue.popleft()
        payload.taken = True
        while self._delay and self._queue:
            other = self._queue[0]
            if now - self._starts[other.requests[0]] <= self._delay:
                break
            other.taken = True  # Triton closes it even when it does not fit
            if len(payload.requests) + len(other.requests) > self._max:
                break
            payload.requests += self._queue.popleft().requests
        payload.started = now
        self._idle -= 1
        end = self._clock.end(now, self._times[len(payload.requests)][next(self._draws)])
        heapq.heappush(self._running, (end, len(self._batches), payload))
        self._batches.append((now, len(payload.requests), 0))

    def _drop_expired(self, now: int) -> None:
        while self._waiting and now > self._starts[self._waiting[0]] + self._timeout:
            self._waiting.popleft()
            self._refuse(now)

    def _refuse(self, now: int) -> None:
        self._inside -= 1
        self._ask_again(now + max(self._overhead, _REFUSED_PAUSE))

    def _ask_again(self, now: int) -> None:
        if self._issued < self._requests:
            self._issued += 1
            heapq.heappush(self._coming, now)

    def _simulated(self) -> Simulated:
        latency = np.array(self._latencies, float) / _SECOND
        latency[latency < 0] = np.nan
        batches = np.array(self._batches, np.int64).reshape(-1, 3)
        return Simulated(
            np.array(self._starts) / _SECOND,
            latency,
            np.array(self._backlog),
            batches[:, 0] / _SECOND,
            batches[:, 1],
            batches[:, 2] / _SECOND,
        )


def _clock(
    curve: BatchCurve, generator: np.random.Generator, offset_s: float | None
) -> EvenClock | PacedClock:
    if not curve.pace:
        return EvenClock()
    if offset_s is None:
        offset_s = generator.random() * sum(lasted_s for lasted_s, _ in curve.pace)
    return PacedClock(curve.pace, offset_s)


def _times(curve: BatchCurve, size: int) -> list[int]:
    """Equally likely times of a batch; with a known pace, which varies them, all are the mean."""
    if curve.pace:
        return [int(curve.mean_s(size) * _SECOND)] * len(_LEVELS)
    return [int(t) for t in curve.seconds(size, _LEVELS) * _SECOND]


def _draws(generator: np.random.Generator) -> Iterator[int]:
    """Random rows of a table of times, without end."""
    while True:
        yield from generator.integers(0, len(_LEVELS), 4096).tolist()
