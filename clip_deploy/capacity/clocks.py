"""When work ends that begins at some moment: on a machine with an even pace, and on one that was measured."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from clip_deploy.bench.curve import Pace

_SECOND = 10**9


class EvenClock:
    """A nanosecond of work takes a nanosecond."""

    def end(self, now: int, work: int) -> int:
        return now + work


class PacedClock:
    """A machine that repeats a measured pace for ever, slow spells in their order and at their length.

    Args:
        pace: spells of seconds and speed.
        offset_s: how far into it the time 0 lies.
    """

    def __init__(self, pace: Pace, offset_s: float) -> None:
        self._speed = [speed for _, speed in pace]
        lasted = np.array([lasted_s for lasted_s, _ in pace]) * _SECOND
        self._begins: list[float] = [0.0, *np.cumsum(lasted).tolist()]  # ns since the pace began
        self._done: list[float] = [0.0, *np.cumsum(lasted * self._speed).tolist()]  # ns of work
        self._offset = offset_s * _SECOND

    def end(self, now: int, work: int) -> int:
        laps, moment = divmod(now + self._offset, self._begins[-1])
        spell = min(bisect_right(self._begins, moment), len(self._speed)) - 1
        done = self._done[spell] + (moment - self._begins[spell]) * self._speed[spell]
        more, done = divmod(done + work, self._done[-1])
        spell = min(bisect_right(self._done, done), len(self._speed)) - 1
        moment = self._begins[spell] + (done - self._done[spell]) / self._speed[spell]
        return max(now, round((laps + more) * self._begins[-1] + moment - self._offset))
