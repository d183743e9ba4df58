"""The figures of a run, from what both sides wrote down: every request on ours, the counters on the server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.bench.figures import Latency
from clip_deploy.client.counters import executions_between

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from clip_deploy.bench.load import Ledger, Window

# Arrivals outran the answers when less than this share was answered in the measured time, while the backlog grew.
KEPT_UP = 0.95
_MOMENTS = 200


@dataclass(frozen=True, slots=True)
class Requests:
    """Every request of a run ``[n]``: intended start, end (NaN where it never came), and how it ended."""

    starts_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]
    answered: NDArray[np.bool_]
    wrong: NDArray[np.bool_]

    @classmethod
    def of(cls, ledger: Ledger) -> Requests:
        starts_s, ends_s = np.array(ledger.starts_s, float), np.array(ledger.ends_s, float)
        answered, wrong = np.isfinite(ends_s), np.zeros(len(starts_s), bool)
        answered[list(ledger.failed)] = False
        wrong[ledger.judge.wrong] = True
        return cls(starts_s, ends_s, answered, wrong)

    def only(self, those: NDArray[np.bool_]) -> Requests:
        """Those of them that are marked ``[n]``."""
        return Requests(
            self.starts_s[those], self.ends_s[those], self.answered[those], self.wrong[those]
        )

    def started_in(self, window: Window) -> NDArray[np.bool_]:
        return (self.starts_s >= window.begin_s) & (self.starts_s < window.end_s)

    def answered_in(self, window: Window) -> NDArray[np.bool_]:
        """Answered in the measured time, whenever they started."""
        with np.errstate(invalid="ignore"):
            inside = (self.ends_s >= window.begin_s) & (self.ends_s < window.end_s)
        return inside & self.answered

    def latency(self, window: Window) -> Latency | None:
        """Of the answers to the measured requests; None where none came.

        A request that was given up counts with its age, so that what never came cannot make the rest look quick.
        """
        measured = self.started_in(window)
        if not (measured & self.answered).any():
            return None
        ends_s = np.where(np.isnan(self.ends_s), window.give_up_s, self.ends_s)
        counted = measured & (self.answered | np.isnan(self.ends_s))
        return Latency.of((ends_s - self.starts_s)[counted])

    def backlog(self, moments_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Requests that should have started and have not ended, at each moment ``[m]``."""
        ends_s = np.sort(self.ends_s[np.isfinite(self.ends_s)])
        started = np.searchsorted(np.sort(self.starts_s), moments_s, side="right")
        return np.asarray(started - np.searchsorted(ends_s, moments_s, side="right"))

    def outran(self, window: Window) -> bool:
        """Whether arrivals outran the answers: fewer than ``KEPT_UP`` came, and the backlog grew.

        It grew when its last quarter, on average, is above its second.
        """
        kept_up = self.answered_in(window).sum() >= KEPT_UP * self.started_in(window).sum()
        moments_s = np.linspace(window.begin_s, window.end_s, _MOMENTS)
        _, second, _, last = np.split(self.backlog(moments_s), 4)
        return bool(not kept_up and last.mean() > second.mean())


def each_second(window: Window) -> NDArray[np.float64]:
    """The moments at which a backlog is written down: every second of the measured time, and its end."""
    return np.append(np.arange(window.begin_s + 1, window.end_s), window.end_s)


@dataclass(frozen=True, slots=True)
class Served:
    """What the server counted between two moments: batch size → executions, and the mean seconds of a request."""

    histogram: Mapping[int, int]
    queue_s: float
    compute_s: float

    @classmethod
    def between(cls, before: Any, after: Any) -> Served:
        """From Triton's statistics of one model version at two moments."""
        old, new = before.inference_stats, after.inference_stats
        return cls(
            executions_between(before, after),
            _mean_s(old.queue, new.queue),
            sum(
                _mean_s(getattr(old, part), getattr(new, part))
                for part in ("compute_input", "compute_infer", "compute_output")
            ),
        )


def _mean_s(before: Any, after: Any) -> float:
    count = after.count - before.count
    return float(after.ns - before.ns) / 1e9 / count if count else 0.0
