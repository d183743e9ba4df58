"""What others took of this machine while something was measured: a figure needs quiet."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clip_deploy.bench.process import ServerProcess
from clip_deploy.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable

_STAT = Path("/proc/stat")
# Of user, nice, system, idle, iowait, irq, softirq, steal: those in which a core was not free.
_BUSY = (0, 1, 2, 5, 6, 7)
# Others that take more than this make a measurement worth repeating, so many times at most.
QUIET_CORES = 0.05
_ATTEMPTS = 3
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Others:
    """Seconds so far: of the clock, of all cores at work, and of ours, the server's included."""

    clock_s: float
    busy_s: float
    ours_s: float

    @classmethod
    def now(cls, pid: int) -> Others:
        ticks = [int(word) for word in _STAT.read_text("ascii").split("\n", 1)[0].split()[1:]]
        busy_s = sum(ticks[i] for i in _BUSY) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), busy_s, ServerProcess(pid).cpu_s() + time.process_time())

    def cores_since(self, before: Others) -> float:
        """Cores that others took in between, on average."""
        taken_s = (self.busy_s - before.busy_s) - (self.ours_s - before.ours_s)
        return max(0.0, taken_s / (self.clock_s - before.clock_s))


def in_quiet(
    work: Callable[[], _Result], pid: int | None, progress: Progress = silent
) -> tuple[_Result, float | None]:
    """What a measurement gave, and the cores that others took meanwhile; the quietest of up to three.

    One in a quiet machine is enough. Where the server is not ours, nothing is known of others: None.
    """
    if pid is None or not _STAT.exists():
        return work(), None
    best: tuple[_Result, float] | None = None
    for left in reversed(range(_ATTEMPTS)):
        before = Others.now(pid)
        result = work()
        cores = Others.now(pid).cores_since(before)
        if best is None or cores < best[1]:
            best = result, cores
        if cores <= QUIET_CORES or not left:
            break
        progress(f"others took {cores:.2f} cores meanwhile: once more")
    assert best is not None  # there is at least one attempt
    return best
