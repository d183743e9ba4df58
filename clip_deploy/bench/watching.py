"""A load while it runs: a server that is gone ends it at once, and somebody may look on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from clip_deploy.errors import ServerError, ServerUnavailable

if TYPE_CHECKING:
    from clip_deploy.bench.load import Ledger
    from clip_deploy.bench.process import ServerProcess
    from clip_deploy.progress import Progress

_LOOK_S = 0.1
_SHOW_S = 0.5
# Silence after which a server counts as gone: one that refuses connections, and one that only keeps us waiting. A slow
# model is given as many times its slowest answer so far.
_GONE_S, _SILENT_S, _TIMES_SLOWEST = 2.0, 10.0, 5.0
# A queue that is full says "unavailable" too, from a server that is well alive.
_FULL = "queue"


async def watch(ledger: Ledger, process: ServerProcess | None, url: str, first_s: float) -> None:
    """Return when the run is over.

    Args:
        first_s: how long a first request took, alone.

    Raises:
        ServerError: the server has ended, or gives no answers.
    """
    while not ledger.over:
        await asyncio.sleep(_LOOK_S)
        if process is not None and not process.is_alive():
            raise ServerError(
                f"the server ended under load, {ledger.clock():.1f} s into the run",
                remedy="read its log; it may be out of memory",
            )
        silence_s = ledger.clock() - ledger.last_answer_s
        if silence_s > _patience_s(ledger, first_s):
            why = f": {ledger.last_error}" if ledger.last_error else ""
            raise ServerError(
                f"the server at {url} gave no answer for {silence_s:.1f} s under load{why}",
                remedy="see whether it still runs, and its log",
            )


def _patience_s(ledger: Ledger, first_s: float) -> float:
    error = ledger.last_error
    if isinstance(error, ServerUnavailable) and _FULL not in str(error):
        return _GONE_S
    return max(_SILENT_S, _TIMES_SLOWEST * max(first_s, ledger.slowest_s))


async def show_progress(ledger: Ledger, progress: Progress) -> None:
    """Tell twice a second how many answers came in the measured time so far, and how soon."""
    window = ledger.window
    while not ledger.over:
        progress(_so_far(ledger))
        await asyncio.sleep(min(_SHOW_S, max(window.end_s - ledger.clock(), _LOOK_S)))


def _so_far(ledger: Ledger) -> str:
    window, now_s = ledger.window, ledger.clock()
    if now_s < window.begin_s:
        return "warming up"
    starts_s, ends_s = np.array(ledger.starts_s, float), np.array(ledger.ends_s, float)
    measured = (ends_s >= window.begin_s) & (ends_s < window.end_s)
    if not measured.any() or now_s <= window.begin_s:
        return "no answer yet"
    rate = measured.sum() / (min(now_s, window.end_s) - window.begin_s)
    p99_s = np.percentile((ends_s - starts_s)[measured], 99)
    seconds = f"{min(now_s, window.end_s) - window.begin_s:.0f} of {window.seconds:.0f} s"
    return f"{rate:.1f}/s, p99 {1000 * p99_s:.0f} ms, {seconds}"
