"""What became of one check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.report import Status

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check; see ``report.Check``."""

    status: Status
    figure: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def outcome(holds: bool, figure: str, remedy: str, **data: Any) -> Outcome:
    """Passed or failed; a remedy is for failures."""
    return Outcome(Status.PASSED if holds else Status.FAILED, figure, "" if holds else remedy, data)


def skipped(why: str) -> Outcome:
    """Not looked at, and never counted as passed."""
    return Outcome(Status.SKIPPED, why)
