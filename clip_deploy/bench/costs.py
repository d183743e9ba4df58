"""Measures a batch-latency curve on a running server, so that it predicts what the server does under load.

What one batch takes is read from the server's own statistics, for requests of 1, 2, 3, … rows that are sent alone, all
sizes in turn. Under load it takes longer: the front end and the load generator share the cores with the model, and
many small requests are more work than one large one. That share is measured, too: users enough for full batches
saturate the server, and what its throughput lacks against the times alone is what each request takes away. A load of
80 % of that shows at last at which pace the machine does this work: see ``bench.pace``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.bench.box import Box, serving_of
from clip_deploy.bench.curve import BatchCurve
from clip_deploy.bench.figures import Load
from clip_deploy.bench.measuring import measure, measure_each
from clip_deploy.bench.pace import pace_of
from clip_deploy.client import Connection
from clip_deploy.errors import CheckFailed, ServerError
from clip_deploy.progress import Progress, silent

if TYPE_CHECKING:
    from clip_deploy.bench.counting import Requests
    from clip_deploy.bench.figures import Run
    from clip_deploy.bench.subject import BenchSubject

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_LEAST_ROUNDS = 4
# So many users per place in a batch keep a full batch waiting while another runs.
_USERS_PER_PLACE = 4
_WARMUP_S = 3.0
# Statistics are written a moment after the answer has gone out.
_STATISTICS_S = 5.0
# A server is saturated when so much of its work was done in full batches.
_SATURATED = 0.9
# The load under which the pace is measured: queues hardly ever empty, and do not grow.
_PACED = 0.8


def measure_box(
    subject: BenchSubject, *, seconds: float = 40.0, progress: Progress = silent
) -> Box:
    """An encoder's settings and its curve, in about so many seconds: what a benchmark keeps for later plans.

    Raises:
        CheckFailed: an answer under load was wrong.
        ServerError: there was none.
    """
    with Connection(subject.url) as connection:
        config = connection.config(subject.target.name, subject.target.version)
    serving = serving_of(config)
    curve = measure_curve(
        subject,
        max_batch=max(1, serving.max_batch or 1),
        instances=serving.instances,
        seconds=seconds / 2,
        progress=progress,
    )
    return _paced(subject, Box(subject.target.name, serving, curve), seconds / 2, progress)


def _paced(subject: BenchSubject, box: Box, seconds: float, progress: Progress) -> Box:
    """The same box, with the machine's pace."""
    if box.serving.instances > 1:  # would not be read
        return box
    progress(f"watching the machine's pace at {_PACED:.0%} of {box.capacity:.4g} requests/s")
    load = Load(rate=_PACED * box.capacity)
    run, requests = measure_each(subject, load, duration_s=seconds, warmup_s=_WARMUP_S)
    _require_right(run)
    return at_pace_of(box, run, requests)


def at_pace_of(box: Box, run: Run, requests: Requests) -> Box:
    """A box on a machine with the pace of this run; as it was where batches cannot be told apart, or run at once.

    Args:
        run: of an open loop.
        requests: those that were answered in its measured time.
    """
    if box.serving.instances > 1:
        return box
    whole_s = float((requests.ends_s - requests.starts_s).mean())
    overhead_s = max(0.0, whole_s - run.queue_s - run.compute_s)
    pace = pace_of(requests, run.histogram, box, overhead_s=overhead_s)
    return replace(box, curve=box.curve.paced(pace, overhead_s)) if pace else box


def measure_curve(
    subject: BenchSubject,
    *,
    max_batch: int,
    instances: int = 1,
    seconds: float = 40.0,
    progress: Progress = silent,
) -> BatchCurve:
    """The curve of an encoder, in about so many seconds.

    Args:
        max_batch: the largest batch that the server makes; 1 where it makes none.
        instances: how many batches may run at once.

    Raises:
        CheckFailed: an answer under load was wrong.
        ServerError: there was none.
    """
    with Connection(subject.url, timeout_s=120.0) as connection:
        progress(f"timing batches of 1 to {max_batch}")
        times_s, overhead_s = _alone(connection, subject, max_batch, seconds * 0.6)
    alone = BatchCurve(times_s, overhead_s, 0.0)
    progress("saturating the server")
    users = _USERS_PER_PLACE * max_batch * instances
    run = measure(subject, Load(users=users), duration_s=seconds * 0.4, warmup_s=_WARMUP_S)
    _require_right(run)
    stolen_s = _stolen_s(alone, run, max_batch, instances)
    if stolen_s >= 0:
        return replace(alone, stolen_s=stolen_s)
    # A server that rests between batches was slower at each; the busy one is what a plan is about.
    faster = 1 + stolen_s * max_batch / instances / alone.mean_s(max_batch)
    return replace(
        alone, times_s={n: tuple(faster * t for t in ts) for n, ts in alone.times_s.items()}
    )


def _require_right(run: Run) -> None:
    if run.wrong or not run.answered:
        raise CheckFailed(
            f"{run.wrong} wrong answers of {run.answered} under load",
            remedy="its speed means nothing; run clip-deploy smoke-test",
        )


def _alone(
    connection: Connection, subject: BenchSubject, max_batch: int, seconds: float
) -> tuple[dict[int, tuple[float, ...]], float]:
    """Seconds of every size's batches, and of a lone request's way there and back."""
    sizes = [size for size in (*_SIZES, max_batch) if size <= max_batch]
    sizes = sorted(set(sizes))
    rows = np.resize(subject.target.inputs, (max_batch, *subject.target.inputs.shape[1:]))
    for size in sizes:
        _batch(connection, subject, rows[:size])  # the first of its size allocates
    times_s: dict[int, list[float]] = defaultdict(list)
    ways_s = []
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end or rounds < _LEAST_ROUNDS:
        for size in sizes if rounds % 2 else sizes[::-1]:
            took_s, way_s = _batch(connection, subject, rows[:size])
            times_s[size].append(took_s)
            if size == 1:
                ways_s.append(way_s)
        rounds += 1
    return {size: tuple(sorted(times_s[size])) for size in sizes}, median(ways_s)


def _batch(connection: Connection, subject: BenchSubject, rows: Any) -> tuple[float, float]:
    """Seconds in the instance of one batch that comes as one request, and seconds outside queue and instance."""
    target = subject.target
    contract = target.served.contract
    before = _counters(connection, subject)
    begin = time.perf_counter()
    connection.infer(
        target.name, {contract.input.name: rows}, contract.output.name, version=target.version
    )
    whole_s = time.perf_counter() - begin
    deadline = time.monotonic() + _STATISTICS_S
    while (after := _counters(connection, subject))[0] == before[0]:
        if time.monotonic() > deadline:
            raise ServerError(
                f"{target.name} answers, but its statistics count nothing",
                remedy="start the server with statistics (tritonserver --allow-metrics is not enough)",
            )
        time.sleep(0.001)
    took_s, queued_s = ((now - then) / 1e9 for now, then in zip(after[1:], before[1:]))
    return took_s, max(0.0, whole_s - took_s - queued_s)


def _counters(connection: Connection, subject: BenchSubject) -> tuple[int, int, int]:
    """Requests so far, and their nanoseconds in the instance and in the queue."""
    stats = connection.statistics(subject.target.name, subject.target.version).inference_stats
    computed = stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
    return stats.success.count, computed, stats.queue.ns


def _stolen_s(alone: BatchCurve, run: Run, max_batch: int, instances: int) -> float:
    """What each request that arrives takes from the batches that run, at saturation.

    Where batches were full, an instance did nothing but work, and the throughput says what a batch took in all.
    Where the load generator could not fill them, the statistics say what a request's batch took on average.
    """
    rows = {size: size * count for size, count in run.histogram.items()}
    total = sum(rows.values())
    if rows.get(max_batch, 0) >= _SATURATED * total:
        mean_size = total / sum(run.histogram.values())
        took_s = instances * mean_size / run.throughput
        stolen_s = (took_s - alone.mean_s(max_batch) * mean_size / max_batch) / mean_size
    else:
        expected_s = sum(n * alone.mean_s(size) for size, n in rows.items()) / total
        mean_size = sum(n * size for size, n in rows.items()) / total
        stolen_s = (run.compute_s - expected_s) / mean_size
    return stolen_s * instances
