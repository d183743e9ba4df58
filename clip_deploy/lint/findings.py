"""What the linter says, and what a rule is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target
    from clip_deploy.lint.text import Place

    Check = Callable[[Model, Target], Iterator["Hit"]]


class Severity(str, Enum):
    """How bad it is.

    Error: Triton refuses the model, or answers a request that the config allows wrongly or not at all. Warning: it
    loads and hurts. Note: worth knowing, and often right as it is.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Hit:
    """One place that breaks a rule.

    Args:
        message: what is wrong there, with its names and numbers.
        place: where in the file; None for files and folders.
        fix: the corrected line, to stand in place of the one at ``place``.
        remedy: what to do where no line of this file is to be changed.
        file: the file; config.pbtxt by default.
    """

    message: str
    place: Place | None = None
    fix: str | None = None
    remedy: str | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A hit with its rule and its model, as it is reported. Line and column count from 1.

    ``source`` is the line as it stands, where ``fix`` is the line as it should be.
    """

    code: str
    name: str
    severity: Severity
    model: str
    path: str
    message: str
    line: int | None = None
    column: int | None = None
    fix: str | None = None
    remedy: str | None = None
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "name": self.name,
            "severity": self.severity.value,
            "model": self.model,
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "message": self.message,
            "fix": self.remedy if self.fix is None else self.fix,
        }


@dataclass(frozen=True, slots=True)
class Example:
    """A change to a small, correct model, which breaks a rule or keeps it.

    Args:
        config: fields that take the place of those of the same name in the model's config.pbtxt, or join them.
        files: what lies elsewhere, by path inside the model's folder: a word of what it is, or its text.
        models: other models of the same repository, by name: their config.
        gpu: judged for a machine with a GPU.
    """

    config: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a stable code, a name to remember it by, and why it exists, in one sentence.

    ``runs`` marks rules that run the graph; they are asked only where that was wished for.
    """

    code: str
    name: str
    severity: Severity
    why: str
    bad: Example
    good: Example
    check: Check
    runs: bool = False


RULES: dict[str, Rule] = {}


def rule(
    code: str,
    name: str,
    severity: Severity,
    why: str,
    *,
    bad: str | Example,
    good: str | Example,
    runs: bool = False,
) -> Callable[[Check], Check]:
    """Put a function into the table of rules."""

    def register(check: Check) -> Check:
        assert code not in RULES, f"{code} is taken"
        RULES[code] = Rule(code, name, severity, why, _example(bad), _example(good), check, runs)
        return check

    return register


def _example(given: str | Example) -> Example:
    return Example(given) if isinstance(given, str) else given
