"""What a benchmark measured: frozen values that go into bench.json and come back, with no server at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server: a number of users or a rate, never both.

    Args:
        users: a closed loop: so many callers, each of whom waits for an answer before asking again.
        rate: an open loop: Poisson arrivals, so many requests per second, whether or not answers come.
    """

    users: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.users is None) is (self.rate is None):
            raise ConfigError(
                "a load of both users and a rate, or of neither", remedy="choose one of the two"
            )
        if (self.users is not None and self.users < 1) or (
            self.rate is not None and not 0 < self.rate < float("inf")
        ):
            raise ConfigError(f"a load of {self}", remedy="use one user or more, or a rate above 0")

    def __str__(self) -> str:
        if self.users is not None:
            return f"{self.users} user{'s' if self.users != 1 else ''}"
        return f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the intended start of a request to its answer, over all requests of a run.

    A request that was given up without an answer counts with its age, so in an overload these are lower bounds.
    """

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    greatest_s: float

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Latency:
        """From every request's latency, ``[n]`` with n ≥ 1; nothing is binned."""
        p50, p90, p99, p999 = (float(q) for q in np.percentile(seconds, (50, 90, 99, 99.9)))
        return cls(float(seconds.mean()), p50, p90, p99, p999, float(seconds.max()))


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of one load, warm-up excluded.

    Args:
        load: what was asked.
        seconds: how long it was measured.
        sent: requests whose intended start lies in the measured time.
        answered: those that were answered, rightly or not.
        wrong: answers that are not the reference's.
        errors: what the others met, message → count.
        throughput: right answers per second.
        latency: of the answers; None where none came.
        histogram: batch size → executions, from the server's statistics.
        queue_s: mean time that a request waited in the server's queue.
        compute_s: mean time in the model, input and output included.
        server_cores: CPU cores that the server used, its children included; None for a server that is not ours.
        server_memory_mb: its resident memory at the end; None likewise.
        client_cores: CPU cores that the load generator used.
        backlog: requests without an answer, one number per second: a queue that grows is an overload.
        overloaded: whether arrivals outran the answers.
        held_back: whether an open loop had so many requests in flight that it kept others waiting on its own side.
    """

    load: Load
    seconds: float
    sent: int
    answered: int
    wrong: int
    errors: Mapping[str, int]
    throughput: float
    latency: Latency | None
    histogram: Mapping[int, int]
    queue_s: float
    compute_s: float
    server_cores: float | None
    server_memory_mb: float | None
    client_cores: float
    backlog: tuple[int, ...] = field(default=())
    overloaded: bool = False
    held_back: bool = False

    def to_json(self) -> dict[str, Any]:
        sizes = {str(size): count for size, count in self.histogram.items()}
        return asdict(self) | {"histogram": sizes, "backlog": list(self.backlog)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        latency = data["latency"]
        return cls(
            **{
                **data,
                "load": Load(**data["load"]),
                "latency": Latency(**latency) if latency else None,
                "histogram": {int(size): count for size, count in data["histogram"].items()},
                "backlog": tuple(data["backlog"]),
            }
        )
