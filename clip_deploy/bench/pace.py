"""How fast the machine worked from batch to batch under load: read from the answers of an open loop.

A machine in a data centre, and one that shares its cores with a load generator, does not work evenly: it stalls for
some 50 ms, and is slower for seconds. Batches that are sent alone hardly show that, and times that are drawn one by one
lose the slow seconds, in which the queues grow that make a p99. So the pace is kept in the order in which it came.

The requests of a batch are answered together, and the server's statistics say how many batches there were: the widest
gaps between answers divide them. A batch began when it was due or when the one before it ended, whichever was later. A
stall that stops client and server alike delays arrivals and answers by as much; it counts as slow work, which it was.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from clip_deploy.bench.box import Box
    from clip_deploy.bench.counting import Requests
    from clip_deploy.bench.curve import BatchCurve, Pace
    from clip_deploy.spec import ServingSpec

# Batches that were told apart wrongly, as a share of all, beyond which nothing is read from them.
_MISTAKEN = 0.2
# Fewer batches say nothing of a machine.
_LEAST = 20


def pace_of(
    requests: Requests, histogram: Mapping[int, int], box: Box, *, overhead_s: float
) -> Pace:
    """Consecutive spells: how many seconds each lasted, and how much work of the curve's was done per second.

    Args:
        requests: those that were answered in the measured time.
        histogram: batch size → executions in that time, by the server's statistics; one instance ran them.
        box: what batches of each size should take, and when they leave the queue.
        overhead_s: a request's mean time outside the queue and the instance, under this load.

    Returns:
        Nothing where batches cannot be told apart, since they take no longer than the way of an answer.
    """
    order = np.argsort(requests.ends_s, kind="stable")
    starts_s, ends_s = requests.starts_s[order], requests.ends_s[order]
    batches = divided(ends_s, sum(histogram.values()))
    if len(batches) < _LEAST or _mistaken(batches, histogram) > _MISTAKEN:
        return ()
    end_s = np.array([ends_s[batch].max() for batch in batches])
    due_s = np.array([_due_s(starts_s[batch], box.serving) for batch in batches])
    begin_s = np.maximum(end_s[:-1], due_s[1:] + overhead_s)
    took_s = end_s[1:] - begin_s
    arrivals_s = np.sort(starts_s)
    arrived = np.searchsorted(arrivals_s, end_s[1:]) - np.searchsorted(arrivals_s, begin_s)
    alone_s = np.array([_alone_s(len(batch), box.curve) for batch in batches[1:]])
    work_s = alone_s + box.curve.stolen_s * arrived
    known = took_s > 0
    begin_s, speed = begin_s[known], work_s[known] / took_s[known]
    lasted_s = np.diff(begin_s, append=end_s[-1])  # at rest, a machine is as it was before
    kept = lasted_s > 0
    return tuple(zip(lasted_s[kept].tolist(), speed[kept].tolist()))


def began_s(pace: Pace, requests: Requests) -> float:
    """When a pace that was read from these requests began, on their clock: it lasts until the last answer."""
    return float(requests.ends_s.max()) - sum(lasted_s for lasted_s, _ in pace)


def divided(ends_s: NDArray[np.float64], batches: int) -> list[NDArray[np.int64]]:
    """Which answers, in ascending order, belong to one batch, when there were so many: the widest gaps divide them."""
    batches = min(batches, len(ends_s))
    if batches < 1:
        return []
    widest = np.sort(np.argsort(np.diff(ends_s))[::-1][: batches - 1])
    return np.split(np.arange(len(ends_s)), widest + 1)


def _mistaken(batches: list[NDArray[np.int64]], histogram: Mapping[int, int]) -> float:
    """The share of the batches whose size the server does not confirm."""
    found = Counter(len(batch) for batch in batches)
    sizes = set(found) | set(histogram)
    wrong = sum(abs(found[size] - histogram.get(size, 0)) for size in sizes)
    return wrong / 2 / len(batches)


def _alone_s(size: int, curve: BatchCurve) -> float:
    """What so many answers cost; more than a batch holds came together when a stall held back those of two."""
    return curve.mean_s(min(size, curve.greatest)) * max(1.0, size / curve.greatest)


def _due_s(starts_s: NDArray[np.float64], serving: ServingSpec) -> float:
    """When a batch of such requests leaves an idle server: after the delay of its oldest, or when its size is right."""
    late_s = float(starts_s.min()) + serving.queue_delay_us / 1e6
    right = serving.preferred_batch_sizes or (serving.max_batch or 1,)
    return min(late_s, float(starts_s.max())) if len(starts_s) in right else late_s
