"""A benchmark as a whole, as it is written to bench.json and read back: every repeat of every load, and on what."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from clip_deploy.bench.box import Box
from clip_deploy.bench.figures import Load, Run
from clip_deploy.bench.stored import SCHEMA, read_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over the repeats: the median, and how far apart the repeats lie."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(median(found), min(found), max(found))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load and its repeats, in the order in which they ran."""

    load: Load
    repeats: tuple[Run, ...]

    @property
    def throughput(self) -> Spread:
        """Right answers per second."""
        return Spread.of(run.throughput for run in self.repeats)

    def latency(self, name: str) -> Spread | None:
        """One of ``Latency``'s figures, as ``p99_s``; None where a repeat had no answers."""
        found = [run.latency for run in self.repeats if run.latency]
        if len(found) < len(self.repeats):
            return None
        return Spread.of(getattr(latency, name) for latency in found)

    def spread(self, name: str) -> Spread | None:
        """One of ``Run``'s own figures, as ``queue_s``; None where it is not known."""
        found = [getattr(run, name) for run in self.repeats]
        return None if None in found else Spread.of(found)

    def total(self, name: str) -> int:
        """One of ``Run``'s counts, as ``wrong``, over all repeats."""
        return sum(getattr(run, name) for run in self.repeats)

    @property
    def errors(self) -> dict[str, int]:
        """What failed over all repeats, message → count."""
        found: dict[str, int] = {}
        for run in self.repeats:
            for message, count in run.errors.items():
                found[message] = found.get(message, 0) + count
        return found

    @property
    def histogram(self) -> dict[int, int]:
        """Batch size → executions, over all repeats."""
        found: dict[int, int] = {}
        for run in self.repeats:
            for size, count in run.histogram.items():
                found[size] = found.get(size, 0) + count
        return dict(sorted(found.items()))

    @property
    def mean_batch(self) -> float:
        executions = sum(self.histogram.values())
        rows = sum(size * count for size, count in self.histogram.items())
        return rows / executions if executions else 0.0

    @property
    def overloaded(self) -> bool:
        """Whether arrivals outran the answers in most repeats."""
        return 2 * self.total("overloaded") > len(self.repeats)

    @property
    def held_back(self) -> bool:
        return any(run.held_back for run in self.repeats)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the loads were measured: with so many ``inputs`` in turn, which are the reference's or the user's own."""

    duration_s: float
    warmup_s: float
    repeats: int
    inputs: int
    inputs_are: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a served model did under each load.

    Args:
        created: when, as ISO 8601 in UTC.
        machine: facts about the machine, by name.
        subject: facts about the served model, by name.
        settings: how it was measured.
        loads: the results, in the order in which they were asked for.
        curve: what a plan of more servers needs, where that was measured: ``clip-deploy capacity --from`` reads it.
    """

    created: str
    machine: Mapping[str, str]
    subject: Mapping[str, str]
    settings: Settings
    loads: tuple[LoadResult, ...]
    curve: Box | None = None

    @property
    def wrong(self) -> int:
        return sum(result.total("wrong") for result in self.loads)

    @property
    def best(self) -> LoadResult:
        """The load with the highest throughput: among those that the server carried, where there is one."""
        carried = [result for result in self.loads if not result.overloaded]
        return max(carried or self.loads, key=lambda result: result.throughput.median)

    @property
    def overloaded(self) -> bool:
        """Whether every load was beyond the server."""
        return all(result.overloaded for result in self.loads)

    def to_json(self) -> dict[str, Any]:
        loads = [
            {"load": asdict(result.load), "repeats": [run.to_json() for run in result.repeats]}
            for result in self.loads
        ]
        return {
            "schema": SCHEMA,
            "kind": "bench",
            "created": self.created,
            "machine": dict(self.machine),
            "subject": dict(self.subject),
            "settings": asdict(self.settings),
            "loads": loads,
            "curve": self.curve.to_json() if self.curve else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchReport:
        loads = tuple(
            LoadResult(Load(**each["load"]), tuple(Run.from_json(run) for run in each["repeats"]))
            for each in data["loads"]
        )
        return cls(
            data["created"],
            data["machine"],
            data["subject"],
            Settings(**data["settings"]),
            loads,
            Box.from_json(data["curve"]) if data["curve"] else None,
        )

    @classmethod
    def read(cls, path: Path) -> BenchReport:
        """What ``clip-deploy bench --json`` wrote.

        Raises:
            ConfigError: the file is missing, damaged, of another kind, or of another version.
        """
        again = "run clip-deploy bench --json again"
        return read_stored(path, ("bench",), cls.from_json, remedy=again)


@dataclass(frozen=True, slots=True)
class Ratios:
    """One load on two models: B ÷ A, repeat by repeat; None where one of them had no answers."""

    load: Load
    throughput: Spread | None
    p50: Spread | None
    p99: Spread | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two served models under the same loads, measured in turn, so that what slows the machine slows both."""

    a: BenchReport
    b: BenchReport

    @property
    def ratios(self) -> tuple[Ratios, ...]:
        return tuple(_ratios(a, b) for a, b in zip(self.a.loads, self.b.loads))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "ratios": [asdict(each) for each in self.ratios],
        }


def _ratios(a: LoadResult, b: LoadResult) -> Ratios:
    def each(figure: Callable[[Run], float]) -> Spread | None:
        pairs = [(figure(one), figure(other)) for one, other in zip(a.repeats, b.repeats)]
        return Spread.of(y / x for x, y in pairs) if all(x and y for x, y in pairs) else None

    return Ratios(
        a.load,
        each(lambda run: run.throughput),
        each(lambda run: run.latency.p50_s if run.latency else 0.0),
        each(lambda run: run.latency.p99_s if run.latency else 0.0),
    )
