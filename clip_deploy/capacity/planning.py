"""From a box to answers: what it gives at a rate, how much it carries within a latency, how many a load needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.bench.figures import Latency, Load
from clip_deploy.capacity.batcher import Simulated, simulate, simulate_users
from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from clip_deploy.bench.box import Box

# The table of a plan: shares of what one box can do at most.
LEVELS = (0.5, 0.8, 0.95)
_SEEDS = 5
_REQUESTS = 10_000
# The beginning of a simulation, in which queues are still filling.
_WARMUP = 0.2
_BISECTIONS = 10
# A search looks at less than an answer does.
_SEARCH_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one box gives under a load, over several simulations that differ by chance alone.

    Args:
        load: what one box is asked.
        throughput: answers per second.
        latency: of the answers of all simulations together.
        p99_least_s, p99_greatest_s: the p99 of the best and of the worst single simulation.
        histogram: batch size → share of the batches.
        utilisation: share of the time that instances work.
        refused: share of the requests that a full queue or a timeout turns away.
        growth: requests per second by which the queue grows; 0 where the box keeps up.
    """

    load: Load
    throughput: float
    latency: Latency
    p99_least_s: float
    p99_greatest_s: float
    histogram: Mapping[int, float]
    utilisation: float
    refused: float
    growth: float

    @property
    def mean_batch(self) -> float:
        return sum(size * share for size, share in self.histogram.items())

    @property
    def overloaded(self) -> bool:
        return self.growth > 0

    def keeps(self, p99_s: float) -> bool:
        """Whether the box answers everything, 99 of 100 within this time."""
        return not self.overloaded and not self.refused and self.latency.p99_s <= p99_s

    def to_json(self) -> dict[str, Any]:
        sizes = {str(size): share for size, share in self.histogram.items()}
        return asdict(self) | {"histogram": sizes, "mean_batch": self.mean_batch}


@dataclass(frozen=True, slots=True)
class Plan:
    """How many boxes carry a rate within a latency.

    Args:
        rate: requests per second for all boxes together.
        p99_s: the latency that 99 of 100 requests may take.
        replicas: how many boxes.
        fixed: whether that number was given.
        each: what each box then gives.
        greatest_rate: the most that one box carries within the latency.
        capacity: the most that one box answers at all.
        levels: one box at 50, 80 and 95 % of its capacity.
    """

    rate: float
    p99_s: float
    replicas: int
    fixed: bool
    each: Forecast
    greatest_rate: float
    capacity: float
    levels: tuple[Forecast, ...]

    @property
    def holds(self) -> bool:
        return self.each.keeps(self.p99_s)

    @property
    def headroom(self) -> float:
        """By how much the rate may grow within the latency, as a share of it."""
        return self.replicas * self.greatest_rate / self.rate - 1

    def sentence(self) -> str:
        """The answer."""
        count = f"{self.replicas} box{'es' if self.replicas > 1 else ''}"
        asked = f"{self.rate:g} requests/s with p99 ≤ {self.p99_s * 1e3:g} ms"
        verb = "carry" if self.replicas > 1 else "carries"
        if self.each.overloaded:
            return (
                f"{count} cannot carry {self.rate:g} requests/s: each gets {self.rate / self.replicas:.4g} and answers "
                f"{self.each.throughput:.4g}, and its queue grows by {self.each.growth:.3g} requests every second."
            )
        if self.each.refused:
            return f"{count} cannot carry {asked}: {self.each.refused:.1%} of the requests are refused."
        if not self.holds:
            return f"{count} cannot carry {asked}: p99 would be {self.each.latency.p99_s * 1e3:.0f} ms."
        return (
            f"{count} {verb} {asked}; each then works {self.each.utilisation:.0%} of the time, in batches of "
            f"{self.each.mean_batch:.2g} on average, and p99 is {self.each.latency.p99_s * 1e3:.0f} ms."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **{
                name: getattr(self, name)
                for name in ("rate", "p99_s", "replicas", "fixed", "holds")
            },
            "sentence": self.sentence(),
            "greatest_rate": self.greatest_rate,
            "capacity": self.capacity,
            "headroom": self.headroom,
            "each": self.each.to_json(),
            "levels": [level.to_json() for level in self.levels],
        }


def plan(
    box: Box, rate: float, p99_s: float, *, replicas: int | None = None, even: bool = False
) -> Plan:
    """The fewest boxes that carry a rate within a latency; or what a given number of them gives.

    Args:
        rate: Poisson arrivals per second, for all boxes together.
        p99_s: the latency that 99 of 100 requests may take.
        replicas: so many boxes, whether or not they suffice.
        even: a balancer that gives each box its turn; otherwise each request goes to a box by chance.

    Raises:
        ConfigError: a rate that is none, or a latency below what one request alone takes.
    """
    Load(rate=rate)  # refuses what is no rate
    _require_possible(box, p99_s)
    turns = replicas if even and replicas else 1
    greatest = greatest_rate(box, p99_s, turns=turns)
    count = replicas or _fewest(box, rate, p99_s, ceil(rate / greatest), even)
    each = forecast(box, rate / count, turns=count if even else 1)
    levels = tuple(forecast(box, share * box.capacity) for share in LEVELS)
    return Plan(rate, p99_s, count, replicas is not None, each, greatest, box.capacity, levels)


def _require_possible(box: Box, p99_s: float) -> None:
    if p99_s >= box.alone_s:
        return
    delay_ms = box.serving.queue_delay_us / 1e3
    raise ConfigError(
        f"no number of boxes answers within {p99_s * 1e3:g} ms: one request alone takes {box.alone_s * 1e3:.3g} ms, "
        f"of which up to {delay_ms:g} are the queue delay",
        remedy=f"allow at least {ceil(box.alone_s * 1e3)} ms, or shorten the delay or the model's own time",
    )


def _fewest(box: Box, rate: float, p99_s: float, enough: int, even: bool) -> int:
    """The fewest boxes from ``enough`` on; with turns, from fewer on, since arrivals are then more regular."""
    if not even:
        return enough
    low, high = ceil(rate / box.capacity) - 1, enough  # too few, and enough
    while high - low > 1:
        middle = (low + high) // 2
        fits = (
            forecast(box, rate / middle, turns=middle, seeds=_SEARCH_SEEDS).keeps(p99_s)
            if middle
            else False
        )
        low, high = (low, middle) if fits else (middle, high)
    return high


def greatest_rate(box: Box, p99_s: float, *, turns: int = 1) -> float:
    """The most requests per second that one box answers within a latency.

    Raises:
        ConfigError: one request alone takes longer.
    """
    _require_possible(box, p99_s)

    def fits(rate: float) -> bool:
        return forecast(box, rate, turns=turns, seeds=_SEARCH_SEEDS).keeps(p99_s)

    return bisect(fits, 0.0, box.capacity)


def bisect(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The greatest number that fits, where a smaller one fits too; ``low`` is taken to fit."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def forecast(
    box: Box, rate: float, *, turns: int = 1, seeds: int = _SEEDS, requests: int = _REQUESTS
) -> Forecast:
    """What one box gives at a rate of its own.

    Args:
        rate: arrivals per second at this box.
        turns: among how many boxes a balancer deals requests in turn; 1 leaves the arrivals Poisson.
        seeds: how many simulations, of so many ``requests`` each.
    """
    runs = [
        simulate(box.serving, box.curve, arrivals(rate, requests, seed, turns), seed=seed)
        for seed in range(seeds)
    ]
    return _summary(Load(rate=rate), box, [_settled(run) for run in runs])


def forecast_users(
    box: Box, users: int, *, seeds: int = _SEEDS, requests: int = _REQUESTS
) -> Forecast:
    """What one box gives to so many users, each of whom asks again as soon as an answer is there."""
    runs = [
        simulate_users(box.serving, box.curve, users, requests, seed=seed) for seed in range(seeds)
    ]
    return _summary(Load(users=users), box, [_settled(run) for run in runs])


def arrivals(rate: float, requests: int, seed: int, turns: int = 1) -> NDArray[np.float64]:
    """Start times ``[requests]`` at one of ``turns`` boxes that take Poisson arrivals in turn."""
    gaps = np.random.default_rng(seed).gamma(turns, 1 / (rate * turns), requests)
    return np.cumsum(gaps)


def _settled(run: Simulated) -> Simulated:
    """A run without its beginning."""
    begin = len(run.start_s) - int(len(run.start_s) * (1 - _WARMUP))
    batches = run.batch_start_s >= run.start_s[begin]
    return Simulated(
        run.start_s[begin:],
        run.latency_s[begin:],
        run.backlog[begin:],
        run.batch_start_s[batches],
        run.batch_size[batches],
        run.busy_s[batches],
    )


def _summary(load: Load, box: Box, runs: list[Simulated]) -> Forecast:
    answered = [run.latency_s[~np.isnan(run.latency_s)] for run in runs]
    p99s = [float(np.percentile(latency, 99)) for latency in answered]
    sizes, counts = np.unique(np.concatenate([run.batch_size for run in runs]), return_counts=True)
    asked = sum(len(run.start_s) for run in runs)
    at_work_s = sum(float(run.busy_s.sum()) for run in runs)
    # An overloaded box answers the last requests long after they came.
    seconds = sum(
        max(run.start_s[-1], run.batch_start_s[-1] + run.busy_s[-1]) - run.start_s[0]
        for run in runs
    )
    return Forecast(
        load=load,
        throughput=float(sizes @ counts / seconds),
        latency=Latency.of(np.concatenate(answered)),
        p99_least_s=min(p99s),
        p99_greatest_s=max(p99s),
        histogram={int(n): float(share) for n, share in zip(sizes, counts / counts.sum())},
        utilisation=float(at_work_s / seconds / box.serving.instances),
        refused=1 - sum(map(len, answered)) / asked,
        growth=_growth(runs) if load.rate is not None and load.rate >= box.capacity else 0.0,
    )


def _growth(runs: list[Simulated]) -> float:
    """Requests per second by which the backlog grew."""
    grown = sum(int(run.backlog[-1] - run.backlog[0]) for run in runs)
    return max(0.0, grown / sum(float(run.start_s[-1] - run.start_s[0]) for run in runs))
