"""What became of each step and each rung, and of the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from clip_deploy.report import Check, Report, Status

if TYPE_CHECKING:
    from clip_deploy.deploy.nouns import Deployment
    from clip_deploy.errors import ClipDeployError


class Outcome(str, Enum):
    """What became of a step. The last two are what ``--dry-run`` says."""

    RAN = "ran"
    CURRENT = "up to date"
    SKIPPED = "skipped"
    FAILED = "failed"
    UNREACHED = "not reached"
    WOULD = "would run"
    MAY = "may run"

    @property
    def status(self) -> Status:
        """The same as a check: what was not done has not passed."""
        if self in (Outcome.RAN, Outcome.CURRENT):
            return Status.PASSED
        return Status.FAILED if self is Outcome.FAILED else Status.SKIPPED


@dataclass(frozen=True, slots=True)
class StepResult:
    """One row: ``said`` is what was made, or why the step ran, was skipped or failed."""

    deployment: str
    step: str
    outcome: Outcome
    said: str
    seconds: float = 0.0
    remedy: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "outcome": self.outcome.value,
            "said": self.said,
            "why": self.why,
            "seconds": round(self.seconds, 3),
            "remedy": self.remedy,
        }

    def as_check(self) -> Check:
        skipped = self.outcome.status is Status.SKIPPED and self.outcome is not Outcome.SKIPPED
        said = f"{self.outcome.value}: {self.said}" if skipped else self.said
        return Check(
            self.step,
            self.outcome.status,
            said,
            self.deployment,
            self.remedy,
            {"outcome": self.outcome.value},
            self.seconds,
        )


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of the ladder; a skipped one has not passed."""

    deployment: str
    name: str
    status: Status
    said: str
    required: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "rung": self.name,
            "status": self.status.value,
            "said": self.said,
            "required": self.required,
        }

    def as_check(self) -> Check:
        return Check(self.name, self.status, self.said, self.deployment)


@dataclass(frozen=True, slots=True)
class DeployReport:
    """What became of every step of every deployment.

    Args:
        failure: what ended it; None where nothing did.
        details: reports of smoke tests, whose checks belong to the steps of that name.
    """

    deployments: tuple[Deployment, ...]
    steps: tuple[StepResult, ...]
    rungs: tuple[Rung, ...]
    dry_run: bool = False
    failure: ClipDeployError | None = None
    details: tuple[Report, ...] = ()

    @property
    def ok(self) -> bool:
        return self.failure is None

    def steps_of(self, deployment: str) -> list[StepResult]:
        return [row for row in self.steps if row.deployment == deployment]

    def rungs_of(self, deployment: str) -> list[Rung]:
        return [row for row in self.rungs if row.deployment == deployment]

    def reached(self, deployment: str, step: str) -> bool:
        """Whether a step was made or found up to date, or failed, in this run."""
        done = (Outcome.RAN, Outcome.CURRENT, Outcome.FAILED)
        return any(row.step == step and row.outcome in done for row in self.steps_of(deployment))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "dry_run": self.dry_run,
            "exit_code": self.failure.exit_code if self.failure else 0,
            "failure": {"message": str(self.failure), "remedy": self.failure.remedy}
            if self.failure
            else None,
            "deployments": [
                {
                    "name": each.name,
                    "repository": str(each.repository),
                    "steps": [row.to_json() for row in self.steps_of(each.name)],
                    "ladder": [row.to_json() for row in self.rungs_of(each.name)],
                }
                for each in self.deployments
            ],
        }

    def reports(self) -> list[Report]:
        """The same as reports of checks: the steps, the ladder, and what the smoke tests checked."""
        title = "deploy (dry run)" if self.dry_run else "deploy"
        steps = Report(title, {}, tuple(row.as_check() for row in self.steps))
        ladder = Report("ladder", {}, tuple(row.as_check() for row in self.rungs))
        return [steps, ladder, *self.details]


def detail(report: Report, deployment: str, step: str) -> Report:
    """A smoke test's report under the name of its deployment."""
    return replace(report, title=f"{deployment} {step}")
