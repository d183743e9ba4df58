"""Deployments taken through their steps, each left out where nothing that it reads has changed."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from clip_deploy.deploy.job import Job
from clip_deploy.deploy.ladder import impossible, rungs
from clip_deploy.deploy.results import DeployReport, Outcome, Rung, StepResult, detail
from clip_deploy.deploy.state import Record, State, alone
from clip_deploy.deploy.steps import STEPS, Step, stale
from clip_deploy.errors import CheckFailed, ClipDeployError, ConfigError
from clip_deploy.report import Report, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clip_deploy.deploy.nouns import Deployment

# Reports of smoke tests, by the step that writes them.
_DETAILS = {"rehearse": "rehearse.json", "smoke-test": "smoke-test.json"}


class Watcher(Protocol):
    """Who is told how it goes; itself the ``progress`` of what is going on inside a step."""

    def begins(self, deployment: str, step: str, why: str) -> None:
        """A step begins, and why it has to."""

    def __call__(self, what: str) -> None:
        """Something begins inside it."""

    def ended(self, result: StepResult) -> None:
        """A step has run, or is left out."""

    def warn(self, note: str) -> None:
        """Something that is no failure, and should be read."""


class Nobody:
    """A watcher that says nothing."""

    def begins(self, deployment: str, step: str, why: str) -> None:
        """Says nothing."""

    def __call__(self, what: str) -> None:
        """Says nothing."""

    def ended(self, result: StepResult) -> None:
        """Says nothing."""

    def warn(self, note: str) -> None:
        """Says nothing."""


def deploy(
    deployments: Sequence[Deployment],
    *,
    start: str | None = None,
    until: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    require: Iterable[str] = (),
    watch: Watcher | None = None,
) -> DeployReport:
    """Take deployments through their steps, one after the other, up to the first failure.

    What fails is part of the report and is not raised; an interrupt leaves what was done, and the next call goes on.

    Args:
        start: the first step; what lies before it is taken as it is.
        until: the last step.
        force: run every chosen step, although nothing has changed.
        dry_run: say what would run and why; nothing is written, and no server or model is loaded.
        require: rungs that must not be skipped, beside those that each deployment requires.

    Raises:
        ConfigError: there is no such step or rung, or the last one comes before the first.
    """
    left_out = _left_out(start, until)
    watch = watch or Nobody()
    steps: list[StepResult] = []
    ladder: list[Rung] = []
    details: list[Report] = []
    failure: ClipDeployError | None = None
    for each in deployments:
        required = frozenset({*each.checks.require, *require})
        run = _Run(each, required, left_out, watch, force=force, dry_run=dry_run)
        failure = run.all(failure)
        steps += run.results.values()
        ladder += run.rungs()
        details += run.details()
    return DeployReport(
        tuple(deployments), tuple(steps), tuple(ladder), dry_run, failure, tuple(details)
    )


def _left_out(start: str | None, until: str | None) -> dict[str, str]:
    """The steps that were not chosen, and why."""
    names = list(STEPS)
    for option, name in (("--from", start), ("--until", until)):
        if name is not None and name not in names:
            raise ConfigError(f"{option} {name}: no such step", remedy=f"use {', '.join(names)}")
    first, last = names.index(start or names[0]), names.index(until or names[-1])
    if first > last:
        raise ConfigError(
            f"--from {start} comes after --until {until}",
            remedy=f"the order is {', '.join(names)}",
        )
    before = dict.fromkeys(names[:first], f"--from {start}")
    return before | dict.fromkeys(names[last + 1 :], f"--until {until}")


class _Run:
    """One deployment on its way through the steps."""

    def __init__(
        self,
        deployment: Deployment,
        required: frozenset[str],
        left_out: Mapping[str, str],
        watch: Watcher,
        *,
        force: bool,
        dry_run: bool,
    ) -> None:
        self._job = Job(
            deployment, State.read(deployment.out), required, force, progress=watch, warn=watch.warn
        )
        self._left_out, self._watch, self._dry_run = left_out, watch, dry_run
        self.results: dict[str, StepResult] = {}
        self._refused: dict[str, str] = {}

    def all(self, failure: ClipDeployError | None) -> ClipDeployError | None:
        """Every step, or none where something has failed before; the failure, where there is one."""
        failure = failure or self._require_rungs()
        try:
            with nullcontext() if self._dry_run or failure else alone(self._job.out):
                for step in STEPS.values():
                    failure = self._step(step, failure)
        except ConfigError as error:  # the folder is somebody else's, or cannot be written to
            failure = error
            for name in STEPS:
                self.results.setdefault(name, self._row(name, Outcome.UNREACHED, str(error)))
        return failure

    def _require_rungs(self) -> CheckFailed | None:
        """Whether a rung that must not be skipped would be; said before an hour is spent on the others."""
        for rung in sorted(self._job.required):
            if (why := impossible(rung, self._job, self._left_out)) is not None:
                self._refused[rung] = why
        if not self._refused:
            return None
        rung, why = next(iter(self._refused.items()))
        return CheckFailed(
            f"{self._job.deployment.name}: rung {rung} is required, and would be skipped: {why}",
            remedy="make it possible here, or run where it is; require less only where less is enough",
        )

    def _step(self, step: Step, failure: ClipDeployError | None) -> ClipDeployError | None:
        """Run a step, or say why not; the failure that ends the run, where there is one."""
        if failure is not None:
            self._keep(step, Outcome.UNREACHED, "a step before it failed")
        elif (why := self._left_out.get(step.name)) is not None:
            self._keep(step, Outcome.UNREACHED, why)
        else:
            try:
                return self._chosen(step)
            except ClipDeployError as error:
                return self._failed(step, error, 0.0)
        return failure

    def _chosen(self, step: Step) -> ClipDeployError | None:
        if (why := step.skipped(self._job)) is not None:
            self._keep(step, Outcome.SKIPPED, why)
            return None
        began = time.monotonic()
        reason = "--force" if self._job.force else stale(step, self._job)
        if self._dry_run:
            self._keep(step, *self._would(step, reason))
        elif reason is None:
            said = self._job.state.records[step.name].said
            self._keep(step, Outcome.CURRENT, said, time.monotonic() - began)
        else:
            return self._ran(step, reason)
        return None

    def _would(self, step: Step, reason: str | None) -> tuple[Outcome, str]:
        """What a dry run says: a step after one that would run reads what is not made yet."""
        before = [
            name
            for name in step.follows
            if self.results[name].outcome in (Outcome.WOULD, Outcome.MAY)
        ]
        if reason is None and before:
            return Outcome.MAY, f"when {before[0]} makes something else than before"
        if reason is None:
            return Outcome.CURRENT, self._job.state.records[step.name].said
        is_new = step.name not in self._job.state.records
        return Outcome.WOULD, f"after {before[0]}" if before and not is_new else reason

    def _ran(self, step: Step, reason: str) -> ClipDeployError | None:
        job, began = self._job, time.monotonic()
        self._watch.begins(job.deployment.name, step.name, reason)
        try:
            reads = step.reads(job)  # before it runs: what changes meanwhile is new the next time
            if not step.is_whole_or_nothing:
                job.state.forget(step.name)
            said = step.run(job)
            made = job.state.made(step.makes(job), job.digests)
            seconds = time.monotonic() - began
            job.state.keep(step.name, Record(reads, made, said, seconds))
        except ClipDeployError as error:
            return self._failed(step, error, time.monotonic() - began)
        self._keep(step, Outcome.RAN, said, seconds, why=reason)
        return None

    def _failed(self, step: Step, error: ClipDeployError, seconds: float) -> ClipDeployError:
        self._keep(step, Outcome.FAILED, str(error), seconds, remedy=error.remedy)
        return error

    def _keep(
        self,
        step: Step,
        outcome: Outcome,
        said: str,
        seconds: float = 0.0,
        *,
        remedy: str = "",
        why: str = "",
    ) -> None:
        row = self._row(step.name, outcome, said, seconds, remedy, why)
        self.results[step.name] = row
        self._watch.ended(row)

    def _row(
        self,
        step: str,
        outcome: Outcome,
        said: str,
        seconds: float = 0.0,
        remedy: str = "",
        why: str = "",
    ) -> StepResult:
        return StepResult(self._job.deployment.name, step, outcome, said, seconds, remedy, why)

    def rungs(self) -> list[Rung]:
        """What became of the ladder; a required rung that is skipped has failed."""
        name = self._job.deployment.name
        return [
            Rung(name, rung.name, Status.FAILED, f"skipped: {self._refused[rung.name]}", True)
            if rung.name in self._refused
            else rung
            for rung in rungs(self._job, self.results)
        ]

    def details(self) -> list[Report]:
        """Reports of the smoke tests that stand."""
        found = []
        for step, file in _DETAILS.items():
            if self.results[step].outcome in (Outcome.RAN, Outcome.CURRENT, Outcome.FAILED):
                try:
                    data = json.loads(self._job.report(file).read_text("utf-8"))
                    found.append(detail(Report.from_json(data), self._job.deployment.name, step))
                except (OSError, ValueError, KeyError, TypeError):
                    continue  # it failed before there was a report
        return found
