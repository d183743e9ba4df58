"""The ladder: which step proves which rung, why a rung cannot be climbed here, and what became of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.deploy import facts
from clip_deploy.deploy.nouns import RUNGS
from clip_deploy.deploy.results import Rung
from clip_deploy.deploy.steps import STEPS
from clip_deploy.report import Status
from clip_deploy.servers import LAUNCHERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clip_deploy.deploy.job import Job
    from clip_deploy.deploy.nouns import Deployment
    from clip_deploy.deploy.results import StepResult


def step_of(rung: str, d: Deployment) -> tuple[str, str]:
    """(the step that proves a rung, "") or ("", why none does for this deployment on this machine)."""
    starts = d.starts
    if rung == "embedded":
        return ("smoke-test" if starts == "embedded" else "rehearse"), ""
    if rung == "container":
        return ("smoke-test", "") if starts == "container" else ("", _no_container(d))
    if rung == "gpu":
        why = _no_gpu(d)
        return ("", why) if why else ("smoke-test", "")
    return rung, ""


def _no_container(d: Deployment) -> str:
    return f"backend {d.backend} is not for NVIDIA's image: {LAUNCHERS['container'].otherwise}"


def _no_gpu(d: Deployment) -> str:
    if not d.wants_gpu:
        return f"backend {d.backend}, instance kind {d.serving.kind}: no GPU is asked for"
    return "this machine has no NVIDIA GPU" if facts.gpu().get("gpu") == "none" else ""


def impossible(rung: str, job: Job, chosen: Mapping[str, str]) -> str | None:
    """Why a rung would be skipped, before anything runs; None where it can be climbed.

    Args:
        chosen: steps that the caller left out, and why.
    """
    name, why = step_of(rung, job.deployment)
    if not name:
        return why
    return chosen.get(name) or STEPS[name].skipped(job)


def rungs(job: Job, results: Mapping[str, StepResult]) -> list[Rung]:
    """What became of every rung, from what became of the steps."""
    return [_rung(name, job, results) for name in RUNGS]


def _rung(name: str, job: Job, results: Mapping[str, StepResult]) -> Rung:
    deployment, required = job.deployment.name, name in job.required
    step, why = step_of(name, job.deployment)
    if not step:
        return Rung(deployment, name, Status.SKIPPED, why, required)
    result = results[step]
    status, said = result.outcome.status, result.said
    if status is Status.SKIPPED:
        said = f"{result.outcome.value}: {said}" if result.outcome.value != "skipped" else said
    return Rung(deployment, name, status, said, required)
