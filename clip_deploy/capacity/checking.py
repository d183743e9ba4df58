"""Holds predictions against the server that they are about: the same arrivals to both, and the errors in per cent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.bench.costs import at_pace_of
from clip_deploy.bench.curve import joined
from clip_deploy.bench.figures import Latency, Load
from clip_deploy.bench.load import poisson
from clip_deploy.bench.measuring import measure_each
from clip_deploy.bench.others import in_quiet
from clip_deploy.bench.pace import began_s
from clip_deploy.capacity.batcher import simulate
from clip_deploy.capacity.planning import LEVELS
from clip_deploy.errors import CheckFailed
from clip_deploy.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clip_deploy.bench.box import Box
    from clip_deploy.bench.counting import Requests
    from clip_deploy.bench.figures import Run
    from clip_deploy.bench.subject import BenchSubject

# How far a prediction may be off, as a share of what was measured.
THROUGHPUT_BAR, P99_BAR = 0.10, 0.20
_WARMUP_S = 5.0
# Arrivals go on after the measured time, so that its last requests meet a busy server, too.
_AFTER_S = 10.0
_SEEDS = 9


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and what was measured, at one share of a box's capacity.

    ``predicted_p99_s`` is the median of simulations that differ in the batches' times alone; ``chance_s`` are the
    least and the greatest of them. ``same_pace_p99_s`` is what the simulation gives for the machine's pace during the
    very run, moment by moment, which nobody knows beforehand: where it is right and the prediction is wrong, the
    machine has changed. ``others_cores`` is what others took of the machine during the measurement.
    """

    level: float
    measured: Run
    predicted_throughput: float
    predicted: Latency
    chance_s: tuple[float, float]
    same_pace_p99_s: float | None = None
    others_cores: float | None = None

    @property
    def throughput_error(self) -> float:
        """As a share of what was measured; above 0 the prediction promised too much."""
        return self.predicted_throughput / self.measured.throughput - 1

    @property
    def p99_error(self) -> float:
        """As a share of what was measured; below 0 the prediction promised too much."""
        assert self.measured.latency is not None  # check refuses a run without answers
        return self.predicted.p99_s / self.measured.latency.p99_s - 1

    @property
    def holds(self) -> bool:
        return abs(self.throughput_error) <= THROUGHPUT_BAR and abs(self.p99_error) <= P99_BAR

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "rate": self.measured.load.rate,
            "measured": self.measured.to_json(),
            "predicted_throughput": self.predicted_throughput,
            "predicted_p50_s": self.predicted.p50_s,
            "predicted_p90_s": self.predicted.p90_s,
            "predicted_p99_s": self.predicted.p99_s,
            "chance_s": list(self.chance_s),
            "same_pace_p99_s": self.same_pace_p99_s,
            "others_cores": self.others_cores,
            "throughput_error": self.throughput_error,
            "p99_error": self.p99_error,
            "holds": self.holds,
        }


def check(
    subject: BenchSubject,
    box: Box,
    measure_box: Callable[[], Box],
    *,
    levels: Sequence[float] = LEVELS,
    duration_s: float = 60.0,
    progress: Progress = silent,
) -> tuple[Comparison, ...]:
    """Measure a server at shares of a box's capacity, and compare with what is predicted.

    The curve is measured again after each load, and predictions are made from the curves on both sides of it: a
    machine that slows down in the meantime slows down for both. What others on the machine disturb is measured again.
    The arrivals of a load are the same for both, so that chance in them counts on neither side.

    Args:
        box: with the curve that was measured before; it sets the rates.
        measure_box: measures it again.

    Raises:
        CheckFailed: an answer was wrong, or none came.
    """
    comparisons, before = [], box.curve
    for level in levels:
        progress(f"measuring at {level:.0%} of {box.capacity:.4g} requests/s")
        (run, requests), others_cores = in_quiet(
            partial(_run, subject, level, box, duration_s), subject.pid, progress
        )
        again, _ = in_quiet(measure_box, subject.pid, progress)
        after = again.curve
        around = replace(box, curve=joined([before, after]))
        comparisons.append(
            replace(
                compare(level, run, around),
                same_pace_p99_s=_same_pace_p99_s(level, run, requests, around),
                others_cores=others_cores,
            )
        )
        before = after
    return tuple(comparisons)


def _run(subject: BenchSubject, level: float, box: Box, duration_s: float) -> tuple[Run, Requests]:
    run, requests = measure_each(
        subject,
        Load(rate=level * box.capacity),
        duration_s=duration_s,
        warmup_s=_WARMUP_S,
        seed=round(level * 100),
    )
    if run.wrong or run.latency is None:
        raise CheckFailed(
            f"{run.wrong} wrong answers of {run.answered} at {run.load}",
            remedy="its speed means nothing; run clip-deploy smoke-test",
        )
    return run, requests


def _same_pace_p99_s(level: float, run: Run, requests: Requests, box: Box) -> float | None:
    own = at_pace_of(box, run, requests)
    if own is box:
        return None
    offset_s = -began_s(own.curve.pace, requests)
    return compare(level, run, own, offset_s=offset_s).predicted.p99_s


def compare(level: float, run: Run, box: Box, *, offset_s: float | None = None) -> Comparison:
    """What is predicted for the very arrivals of a run, beside what was measured.

    Args:
        offset_s: how far into the curve's pace the run began, where it is the pace of that run.
    """
    assert run.load.rate is not None  # check measures open loops
    end_s = _WARMUP_S + run.seconds
    starts = poisson(run.load.rate, end_s + _AFTER_S, round(level * 100))
    within = (starts >= _WARMUP_S) & (starts < end_s)
    latencies, answered = [], []
    for seed in range(_SEEDS):
        latency = simulate(box.serving, box.curve, starts, seed=seed, offset_s=offset_s).latency_s
        ends = starts + latency
        latencies.append(Latency.of(latency[within & ~np.isnan(latency)]))
        answered.append(((ends >= _WARMUP_S) & (ends < end_s)).sum() / run.seconds)
    ordered = sorted(latencies, key=lambda each: each.p99_s)
    return Comparison(
        level,
        run,
        float(np.mean(answered)),
        ordered[_SEEDS // 2],
        (ordered[0].p99_s, ordered[-1].p99_s),
    )
