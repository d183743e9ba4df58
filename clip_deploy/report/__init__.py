"""Reports of named checks: for a person at a terminal, for a program, for CI. The home of rich, with ``cli``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Status(str, Enum):
    """What became of a check. A skipped one never counts as passed."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One row of a report.

    Args:
        name: what was checked, as a statement that should hold.
        status: whether it did.
        figure: what was measured, or why it was skipped.
        model: the model it speaks of; empty for the server as a whole.
        remedy: what to do, for a failed check.
        data: the figures for programs.
        seconds: how long it took.
    """

    name: str
    status: Status
    figure: str
    model: str = ""
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Checks of one subject; ``facts`` say what it was, in the order in which a person wants to read them."""

    title: str
    facts: Mapping[str, str]
    checks: tuple[Check, ...]

    def with_status(self, status: Status) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is status)

    @property
    def failed(self) -> tuple[Check, ...]:
        return self.with_status(Status.FAILED)

    @property
    def ok(self) -> bool:
        """Nothing failed, and something passed."""
        return not self.failed and bool(self.with_status(Status.PASSED))

    def summary(self) -> str:
        """``17 passed, 1 failed, 2 skipped``; kinds with no check are left out, but for passed."""
        counts = {status: len(self.with_status(status)) for status in Status}
        return ", ".join(
            f"{n} {status.value}" for status, n in counts.items() if n or status is Status.PASSED
        )

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) | {"status": check.status.value} for check in self.checks]
        return {
            "title": self.title,
            "ok": self.ok,
            "summary": self.summary(),
            "facts": dict(self.facts),
            "checks": checks,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """What ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        rows = [Check(**(row | {"status": Status(row["status"])})) for row in data["checks"]]
        return cls(str(data["title"]), dict(data["facts"]), tuple(rows))
