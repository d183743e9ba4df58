"""Many requests at the same moment, and what the server counted meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.client.counters import executions_between
from clip_deploy.compare import agreement
from clip_deploy.errors import ClipDeployError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.smoke.subject import Subject, Target

# Triton counts a request a moment after it has answered it.
_SETTLE_S = 0.2
_SETTLE_TRIES = 20


@dataclass(frozen=True, slots=True)
class Crowd:
    """What became of many single-row requests sent at once."""

    right: int
    errors: tuple[str, ...]
    seconds: tuple[float, ...]
    executions: int
    inferences: int
    histogram: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Answer:
    seconds: float
    right: bool
    error: str = ""


def alone(subject: Subject, target: Target) -> NDArray[np.float32]:
    """Every input in a request of its own, asked once for all checks."""

    def ask() -> NDArray[np.float32]:
        rows = range(len(target.inputs))
        return np.concatenate([subject.ask(target, target.inputs[i : i + 1]) for i in rows])

    return subject.once(("alone", target.tower), ask)


def send_crowd(subject: Subject, target: Target) -> Crowd:
    """Send all requests at the same moment, once for all checks; the server's counters are read before and after."""
    return subject.once(("crowd", target.tower), lambda: send(subject, target))


def send(subject: Subject, target: Target) -> Crowd:
    """Send all requests at the same moment, now."""
    expected = target.reference.outputs if target.reference else alone(subject, target)
    start = Barrier(subject.concurrency)

    def one(i: int) -> _Answer:
        row = slice(i % len(expected), i % len(expected) + 1)
        start.wait()
        began = time.monotonic()
        try:
            got = subject.ask(target, target.inputs[row])
        except ClipDeployError as error:
            return _Answer(time.monotonic() - began, right=False, error=str(error))
        seconds = time.monotonic() - began
        return _Answer(seconds, right=not agreement(got, expected[row]).faults(target.limits))

    before = _settled(subject, target)
    with ThreadPoolExecutor(subject.concurrency) as pool:
        answers = list(pool.map(one, range(subject.concurrency)))
    after = _settled(subject, target)
    return Crowd(
        right=sum(answer.right for answer in answers),
        errors=tuple(answer.error for answer in answers if answer.error),
        seconds=tuple(answer.seconds for answer in answers if not answer.error),
        executions=after.execution_count - before.execution_count,
        inferences=after.inference_count - before.inference_count,
        histogram=executions_between(before, after),
    )


def _settled(subject: Subject, target: Target) -> Any:
    """The server's counters, once they no longer move."""
    connection = subject.client.connection
    counters = connection.statistics(target.name, target.version)
    for _ in range(_SETTLE_TRIES):
        time.sleep(_SETTLE_S)
        again = connection.statistics(target.name, target.version)
        if again.inference_count == counters.inference_count:
            return again
        counters = again
    return counters
