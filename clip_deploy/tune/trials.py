"""What was asked of each setting and what came back: goals, trials, and the file that keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from clip_deploy.bench.figures import Load, Run
from clip_deploy.errors import ConfigError
from clip_deploy.files import storage
from clip_deploy.tune.space import Settings, settings_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = 1
KIND = "tune-study"
_OVERLOADED = -1e6


@dataclass(frozen=True, slots=True)
class Goal:
    """The most of a load within a latency budget.

    With users, throughput counts. With a rate, all settings that keep up answer equally many requests, and the least
    99th percentile counts.
    """

    load: Load
    p99_s: float

    def fits(self, run: Run) -> bool:
        """Whether a run kept the budget."""
        return run.latency is not None and run.latency.p99_s <= self.p99_s and not run.overloaded

    def score(self, run: Run) -> float:
        """More is better; whatever fits is above 0, whatever does not is below."""
        if run.latency is None or run.overloaded:
            return _OVERLOADED
        if not self.fits(run):
            return -run.latency.p99_s / self.p99_s
        return self.worth(run)

    def worth(self, run: Run | None) -> float:
        """What is compared between runs that fit: right answers per second, or how often the p99 fits the budget."""
        assert run is not None
        assert run.latency is not None  # something was answered
        return run.throughput if self.load.users else self.p99_s / run.latency.p99_s

    def __str__(self) -> str:
        return f"p99 ≤ {self.p99_s * 1e3:g} ms at {self.load}"


class Phase(str, Enum):
    """Why settings were measured: to find some, to see what is possible at all, or to choose among the best."""

    SEARCH = "search"
    ALONE = "alone"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings as they were measured once; ``failure`` says why there is no run, or why it does not count."""

    phase: Phase
    settings: Settings
    run: Run | None
    failure: str = ""
    seconds: float = 0.0

    @property
    def p99_s(self) -> float:
        """The 99th percentile; infinite where nothing right was measured."""
        if self.failure or self.run is None or self.run.latency is None:
            return float("inf")
        return self.run.latency.p99_s

    def score(self, goal: Goal) -> float | None:
        return None if self.failure or self.run is None else goal.score(self.run)

    def fits(self, goal: Goal) -> bool:
        return not self.failure and self.run is not None and goal.fits(self.run)

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase.value,
            "settings": self.settings.to_json(),
            "run": self.run.to_json() if self.run else None,
            "failure": self.failure,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        run = data["run"]
        return cls(
            Phase(data["phase"]),
            settings_from_json(data["settings"]),
            Run.from_json(run) if run else None,
            data["failure"],
            data["seconds"],
        )


def fault(run: Run) -> str:
    """Why a run does not count; empty where it does. A fast wrong answer is worth nothing."""
    if run.wrong:
        return f"{run.wrong} of {run.answered} answers were wrong"
    if run.errors:
        message, count = max(run.errors.items(), key=lambda item: item[1])
        return f"{sum(run.errors.values())} requests failed; {count} times: {message}"
    if run.latency is None:
        return "nothing was answered in the measured time"
    return ""


@dataclass(slots=True)
class Study:
    """The trials of one search, each written down as soon as it is measured, so that the search can go on later.

    Args:
        path: a file of JSON lines: first ``identity``, then one trial each. None keeps them in memory.
        identity: what must be the same for two trials to be compared.
    """

    path: Path | None
    identity: Mapping[str, Any]
    trials: list[Trial] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Study:
        """Go on with a study, or begin one.

        Raises:
            ConfigError: the file is the study of something else, or none at all, or cannot be written.
        """
        head = {"schema": SCHEMA, "kind": KIND, **identity}
        study = cls(path, identity)
        lines = _lines(path)
        if not lines:
            with storage(path, ConfigError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(head, ensure_ascii=False) + "\n", "utf-8")
            return study
        _require_same(path, lines[0], head)
        try:
            study.trials += [Trial.from_json(line) for line in lines[1:]]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, repr(error)) from error
        return study

    def add(self, trial: Trial) -> None:
        """Keep a trial."""
        if self.path is not None:
            with storage(self.path, ConfigError), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(trial.to_json(), ensure_ascii=False) + "\n")
        self.trials.append(trial)

    def of(self, phase: Phase) -> list[Trial]:
        """The trials of one phase, in the order in which they were measured."""
        return [trial for trial in self.trials if trial.phase is phase]


def _lines(path: Path) -> list[Any]:
    """What a file of JSON lines holds; a last line that a crash cut short is cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", remedy="name another file with --study"
        ) from error
    whole = data[: data.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if data and not lines:
        raise _damaged(path, "its first line has no end")
    if len(whole) < len(data):
        with storage(path, ConfigError), path.open("r+b") as file:
            file.truncate(len(whole))
    return lines


def _require_same(path: Path, found: Any, head: Mapping[str, Any]) -> None:
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _damaged(path, "it does not begin as a study does")
    for name, wanted in head.items():
        if found.get(name) != wanted:
            raise ConfigError(
                f"{path} is a study of another {name.replace('_', ' ')}: {found.get(name)}, not {wanted}",
                remedy="name another file with --study, or delete this one",
            )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no study of clip-deploy tune: {why}",
        remedy="name another file with --study",
    )
