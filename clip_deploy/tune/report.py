"""What a search found, for a program and for a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError
from clip_deploy.report.tunes import gained
from clip_deploy.repository.assembly import CONFIG
from clip_deploy.repository.rendering import parse_config
from clip_deploy.tune.config import difference, edited, replace_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.triton_schema import ModelConfig
    from clip_deploy.tune.search import Contender, Outcome


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A model's config.pbtxt as it was before the search; what is written later must still meet it so."""

    path: Path
    text: str
    config: ModelConfig

    @classmethod
    def read(cls, repository: ModelRepository) -> ConfigFile:
        """That of a repository narrowed to one model.

        Raises:
            ConfigError: there is none, or Triton would not read it.
        """
        path = repository.path / repository.models[0].name / CONFIG
        try:
            text = path.read_bytes().decode("utf-8")  # line ends as they are
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", remedy="render the model"
            ) from error
        return cls(path, text, parse_config(text, path))

    @property
    def model(self) -> str:
        return self.path.parent.name

    def settled(self, outcome: Outcome, machine: Mapping[str, str], *, apply: bool) -> TuneReport:
        """The report on a search, and with ``apply`` the winner in the file."""
        if outcome.winner is None:
            return TuneReport(self.path, machine, outcome, "", applied=False)
        after = edited(self.text, outcome.winner.settings.written(self.config), self.path)
        if apply:
            replace_config(self.path, self.text, after)
        changes = difference(self.text, after, f"{self.model}/{CONFIG}")
        return TuneReport(self.path, machine, outcome, changes, applied=apply)


@dataclass(frozen=True, slots=True)
class TuneReport:
    """An outcome and what follows from it.

    Args:
        path: the model's config.pbtxt.
        machine: facts about what it was measured on.
        outcome: what the search found.
        difference: what changes in config.pbtxt, as a unified diff; empty where nothing does.
        applied: whether it was written there.
    """

    path: Path
    machine: Mapping[str, str]
    outcome: Outcome
    difference: str
    applied: bool

    @property
    def model(self) -> str:
        """The model's name."""
        return self.path.parent.name

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        outcome = self.outcome
        if outcome.winner is None:
            return f"nothing beats the settings as they are ({outcome.default.settings})"
        found = (
            f"{outcome.winner.settings}: {gained(outcome.winner, outcome.default, outcome.goal)}"
        )
        return (
            found if outcome.default.fits else f"{found}; the settings as they are break the budget"
        )

    def to_json(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "schema": 1,
            "kind": "tune",
            "model": self.model,
            "machine": dict(self.machine),
            "goal": {"p99_ms": outcome.goal.p99_s * 1e3, "load": str(outcome.goal.load)},
            "verdict": self.verdict,
            "default": _told(outcome.default),
            "winner": _told(outcome.winner) if outcome.winner else None,
            "contenders": [_told(contender) for contender in outcome.contenders],
            "space": outcome.size,
            "trials": [trial.to_json() for trial in outcome.trials],
            "difference": self.difference,
            "applied": self.applied,
        }


def _told(contender: Contender) -> dict[str, Any]:
    return {
        "settings": contender.settings.to_json(),
        "throughput": contender.throughput,
        "p99_ms": contender.p99_s * 1e3,
        "gain": contender.gain,
        "fits": contender.fits,
        "rounds": [run.to_json() for run in contender.runs],
    }
