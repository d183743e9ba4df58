"""How long a batch occupies an instance of a model, by its size: what a capacity plan is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    # Consecutive spells: how many seconds each lasted, and how much of a curve's work was done per second.
    Pace = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """What a served model costs.

    Args:
        times_s: batch size → seconds that such a batch occupied an instance with nothing else going on, ascending.
        overhead_s: a request's time outside the queue and the instance: client, wire and front end.
        stolen_s: what a request that arrives takes from the batches that run at that moment, since client and front
            end share the cores with the model; 0 where they do not.
        pace: consecutive spells of a machine under load: seconds, and how much of the work was then done per second,
            1 on average. Times of batches then vary with it, and not by themselves. Empty where it is not known.
    """

    times_s: Mapping[int, tuple[float, ...]]
    overhead_s: float
    stolen_s: float
    pace: Pace = ()

    def __post_init__(self) -> None:
        remedy = "measure it again: clip-deploy capacity REPOSITORY"
        if 1 not in self.times_s or not all(self.times_s.values()):
            raise ConfigError("a batch-latency curve without batches of one", remedy=remedy)
        costs, spells = (self.overhead_s, self.stolen_s), (n for spell in self.pace for n in spell)
        times = (*(min(t) for t in self.times_s.values()), *spells)
        if not np.isfinite((*costs, *times)).all() or min(costs) < 0 or min(times) <= 0:
            raise ConfigError("a batch-latency curve with times that cannot be", remedy=remedy)

    @property
    def greatest(self) -> int:
        """The largest batch that was measured."""
        return max(self.times_s)

    def seconds(self, size: int, levels: NDArray[np.float64]) -> NDArray[np.float64]:
        """A batch's time at quantile ``levels`` ``[n]`` (0 to 1); between two measured sizes, in proportion.

        Raises:
            ConfigError: the size is beyond what was measured.
        """
        if not 1 <= size <= self.greatest:
            raise ConfigError(
                f"batches of {size}, where 1 to {self.greatest} were measured",
                remedy="render the model with that max batch, and measure it",
            )
        below = max(n for n in self.times_s if n <= size)
        above = min(n for n in self.times_s if n >= size)
        low, high = (np.quantile(self.times_s[n], levels) for n in (below, above))
        share = (size - below) / (above - below) if above > below else 0.0
        return np.asarray(low + share * (high - low))

    def mean_s(self, size: int) -> float:
        """The mean time of a batch."""
        return float(self.seconds(size, np.linspace(0, 1, 101)).mean())

    def to_json(self) -> dict[str, Any]:
        times = {str(size): list(times) for size, times in self.times_s.items()}
        return {
            "times_s": times,
            "overhead_s": self.overhead_s,
            "stolen_s": self.stolen_s,
            "pace": [list(spell) for spell in self.pace],
        }

    def paced(self, pace: Pace, overhead_s: float) -> BatchCurve:
        """The same on a machine that kept this pace, with the overhead that it then had.

        What the pace is on average goes into the times, so that 1 is left of it.
        """
        lasted_s, speed = np.array(pace).T
        mean = float(lasted_s @ speed / lasted_s.sum())
        return BatchCurve(
            {size: tuple(t / mean for t in times) for size, times in self.times_s.items()},
            overhead_s,
            self.stolen_s / mean,
            tuple(zip(lasted_s.tolist(), (speed / mean).tolist())),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BatchCurve:
        times = {int(size): tuple(sorted(times)) for size, times in data["times_s"].items()}
        pace = tuple((float(lasted_s), float(speed)) for lasted_s, speed in data.get("pace", ()))
        return cls(times, float(data["overhead_s"]), float(data["stolen_s"]), pace)


def joined(curves: Sequence[BatchCurve]) -> BatchCurve:
    """One curve of several measurements of the same server."""
    sizes = sorted(set[int]().union(*(curve.times_s for curve in curves)))
    times = {n: sorted(t for curve in curves for t in curve.times_s.get(n, ())) for n in sizes}
    curve = BatchCurve(
        {size: tuple(seconds) for size, seconds in times.items()},
        fmean(curve.overhead_s for curve in curves),
        fmean(curve.stolen_s for curve in curves),
    )
    if not all(each.pace for each in curves):
        return curve
    speeds = [curve.mean_s(curve.greatest) / each.mean_s(each.greatest) for each in curves]
    pace = ((s, own * speed) for each, own in zip(curves, speeds) for s, speed in each.pace)
    return curve.paced(tuple(pace), curve.overhead_s)
