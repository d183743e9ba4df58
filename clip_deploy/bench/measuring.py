"""One load on one server, measured: sent, answered and judged on this side, counted by the server on its own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.bench.counting import Requests, Served, each_second
from clip_deploy.bench.figures import Run
from clip_deploy.bench.load import (
    Caller,
    Judge,
    Ledger,
    Window,
    closed_loop,
    open_loop,
    poisson,
    together,
)
from clip_deploy.bench.watching import show_progress, watch
from clip_deploy.client import Connection
from clip_deploy.client.prepared import PreparedSender
from clip_deploy.errors import ConfigError
from clip_deploy.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clip_deploy.bench.figures import Load
    from clip_deploy.bench.process import ServerProcess
    from clip_deploy.bench.subject import BenchSubject

# The deadline of a call, and how long a closed loop waits for the last answers of its measured time.
TIMEOUT_S = 30.0
# How long an open loop does: what has no answer by then counts with its age.
_OPEN_PATIENCE_S = 10.0
# More than this is not sent at once: the queue of an overloaded server must not fill the machine's memory.
_MOST_IN_FLIGHT, _MOST_BYTES_IN_FLIGHT = 1000, 512 * 2**20
_MOST_ARRIVALS = 500_000


def measure(
    subject: BenchSubject,
    load: Load,
    *,
    duration_s: float,
    warmup_s: float,
    seed: int = 0,
    progress: Progress = silent,
) -> Run:
    """Put one load on a server and measure it, once.

    Wrong answers are counted, not raised: a caller judges ``Run.wrong``.

    Args:
        duration_s: how long to measure.
        warmup_s: how long the load lasts before that.
        seed: of an open loop's arrivals.
        progress: is told twice a second how the run goes.

    Raises:
        ConfigError: the measured time is empty, or has more arrivals than can be kept.
        ServerError: the server died, or gives no answers.
    """
    run, _ = measure_each(
        subject, load, duration_s=duration_s, warmup_s=warmup_s, seed=seed, progress=progress
    )
    return run


def measure_each(
    subject: BenchSubject,
    load: Load,
    *,
    duration_s: float,
    warmup_s: float,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Run, Requests]:
    """What ``measure`` gives, and the requests that were answered in the measured time.

    Raises:
        ConfigError: the measured time is empty, or has more arrivals than can be kept.
        ServerError: the server died, or gives no answers.
    """
    if not (duration_s > 0 and warmup_s >= 0):
        raise ConfigError(
            f"a run of {duration_s:g} s after a warm-up of {warmup_s:g} s",
            remedy="measure for longer than 0 seconds",
        )
    arrivals = (load.rate or 0) * (duration_s + warmup_s + _OPEN_PATIENCE_S)
    if arrivals > _MOST_ARRIVALS:
        raise ConfigError(
            f"a rate of {load} is {arrivals:,.0f} requests", remedy="lower --rate or --duration"
        )
    return asyncio.run(_Measurement(subject, load, progress).run(duration_s, warmup_s, seed))


@dataclass(frozen=True, slots=True)
class _Counters:
    """Everything that is counted from outside a run, at one moment."""

    statistics: Any
    client_s: float
    server_s: float | None


class _Measurement:
    def __init__(self, subject: BenchSubject, load: Load, progress: Progress) -> None:
        self._subject, self._load, self._progress = subject, load, progress
        self._process = _process(subject.pid)

    async def run(self, duration_s: float, warmup_s: float, seed: int) -> tuple[Run, Requests]:
        subject = self._subject
        patience_s = TIMEOUT_S if self._load.rate is None else _OPEN_PATIENCE_S
        end_s = warmup_s + duration_s
        window = Window(warmup_s, end_s, end_s + patience_s)
        async with PreparedSender(subject.url, subject.requests, timeout_s=TIMEOUT_S) as send:
            began = time.monotonic()
            await send(0)  # waits behind whatever an earlier load has left
            first_s = time.monotonic() - began
            clock = _clock()
            ledger = Ledger(Judge(subject.expected, subject.target.limits), window, clock)
            call = Caller(send, ledger, len(subject.requests))
            held_back, counters, *_ = await together(
                self._put(call, window, seed),
                self._count(ledger),
                watch(ledger, self._process, subject.url, first_s),
                show_progress(ledger, self._progress),
            )
        ledger.judge.close()
        memory_mb = self._process.memory_mb() if self._process else None
        requests = Requests.of(ledger)
        run = _run(self._load, window, requests, ledger.errors, counters, memory_mb, held_back)
        return run, requests.only(requests.answered_in(window))

    async def _put(self, call: Caller, window: Window, seed: int) -> bool:
        """Put the load on the server until the run is over; whether an open loop had to hold requests back."""
        if self._load.users is not None:
            await closed_loop(call, self._load.users)
            return False
        assert self._load.rate is not None  # a load has one of the two
        size = max(len(request) for request in self._subject.requests)
        most = max(1, min(_MOST_IN_FLIGHT, _MOST_BYTES_IN_FLIGHT // size))
        return await open_loop(call, poisson(self._load.rate, window.give_up_s, seed), most)

    async def _count(self, ledger: Ledger) -> tuple[_Counters, _Counters]:
        """The counters when the measured time begins and when it ends."""
        with Connection(self._subject.url, timeout_s=TIMEOUT_S) as connection:
            counted = []
            for moment_s in (ledger.window.begin_s, ledger.window.end_s):
                await asyncio.sleep(moment_s - ledger.clock())
                target = self._subject.target
                statistics = asyncio.to_thread(connection.statistics, target.name, target.version)
                server_s = self._process.cpu_s() if self._process else None
                counted.append(_Counters(await statistics, time.process_time(), server_s))
        before, after = counted
        return before, after


def _process(pid: int | None) -> ServerProcess | None:
    if pid is None:
        return None
    from clip_deploy.bench.process import ServerProcess

    return ServerProcess(pid)


def _clock() -> Any:
    """Seconds since now."""
    zero = time.monotonic()
    return lambda: time.monotonic() - zero


def _run(
    load: Load,
    window: Window,
    requests: Requests,
    errors: Mapping[str, int],
    counters: tuple[_Counters, _Counters],
    memory_mb: float | None,
    held_back: bool,
) -> Run:
    """The figures of a run, once it is over."""
    before, after = counters
    measured, open_loop = requests.started_in(window), load.rate is not None
    served = Served.between(before.statistics, after.statistics)
    return Run(
        load=load,
        seconds=window.seconds,
        sent=int(measured.sum()),
        answered=int((measured & requests.answered).sum()),
        wrong=int((measured & requests.wrong).sum()),
        errors=dict(errors),
        throughput=float((requests.answered_in(window) & ~requests.wrong).sum() / window.seconds),
        latency=requests.latency(window),
        histogram=served.histogram,
        queue_s=served.queue_s,
        compute_s=served.compute_s,
        server_cores=_cores(before.server_s, after.server_s, window),
        server_memory_mb=memory_mb,
        client_cores=(after.client_s - before.client_s) / window.seconds,
        backlog=tuple(requests.backlog(each_second(window)).tolist()) if open_loop else (),
        overloaded=open_loop and requests.outran(window),
        held_back=held_back,
    )


def _cores(before_s: float | None, after_s: float | None, window: Window) -> float | None:
    return None if before_s is None or after_s is None else (after_s - before_s) / window.seconds
