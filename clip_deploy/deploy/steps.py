"""The steps of a deployment, one row each: what each reads, makes and does, and when there is nothing for it to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy.deploy import checking, facts, making
from clip_deploy.deploy.job import LINT_NOTES, LINT_SARIF
from clip_deploy.errors import CheckFailed, ClipDeployError, MissingDependency
from clip_deploy.servers import install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from clip_deploy.deploy.job import Job

_EXPORTS = ("export",)


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Args:
        name: what the command line calls it: the command that does the same, where there is one.
        what: what it does, in a line.
        follows: the steps whose work it reads.
        reads: everything that decides what it makes, by name: values, digests, versions.
        makes: the files that it leaves, which are held against their digests before it is left out.
        run: does it, and says in a line what was made.
        skipped: why there is nothing to do for this deployment, or nothing that can be done on this machine; None
            where there is.
        gone: why what it made elsewhere is no longer there; None where it is.
        is_whole_or_nothing: whether a failure leaves what it made before, so that it need not be forgotten.
    """

    name: str
    what: str
    follows: tuple[str, ...]
    reads: Callable[[Job], dict[str, str]]
    makes: Callable[[Job], Iterable[Path]]
    run: Callable[[Job], str]
    skipped: Callable[[Job], str | None] = lambda job: None
    gone: Callable[[Job], str | None] = lambda job: None
    is_whole_or_nothing: bool = False


def _export_reads(job: Job) -> dict[str, str]:
    d = job.deployment
    found = job.words("encoder") | facts.versions(*facts.EXPORTING)
    found.pop("encoder.out")
    for path in d.source:
        found |= job.place(path.name, path)
    found |= job.place("encoder.images", d.encoder.images)
    return found | job.place("encoder.calibration_images", d.encoder.calibration_images)


def _convert_reads(job: Job) -> dict[str, str]:
    calibration = job.place("engine.calibration_images", job.deployment.engine.calibration_images)
    return (
        job.manifests()
        | job.words("engine")
        | calibration
        | facts.cpu()
        | facts.versions("openvino", "nncf")
    )


def _parse_reads(job: Job) -> dict[str, str]:
    return job.manifests() | job.words("plan.batch") | facts.versions("tensorrt-rtx-cu12")


def _plan_reads(job: Job) -> dict[str, str]:
    words = job.words("plan", "server.triton_release")
    return job.manifests() | words | facts.gpu() | facts.versions("tensorrt", "polygraphy")


def _smoke_reads(job: Job) -> dict[str, str]:
    words = job.words("checks.concurrency", "checks.min_cosine", "server.launcher")
    words |= job.words("server.triton_release") if job.deployment.starts != "embedded" else {}
    images = job.place("checks.images", job.deployment.checks.images)
    machine = facts.cpu() | facts.gpu() | {"embedded server": install.TRITON_VERSION}
    return words | images | machine | facts.versions(*facts.SERVING)


def _render_reads(job: Job) -> dict[str, str]:
    d = job.deployment
    words = job.words("engine", "serving")
    made = {
        f"{model.name}/{folder}": digest
        for model in job.exports()
        for folder in ("openvino", "tensorrt")
        if (digest := job.digests.tree(model.directory / folder)) is not None
    }
    return (
        job.manifests() | made | words | job.place("serving.templates", d.templates) | facts.code()
    )


def _lint_reads(job: Job) -> dict[str, str]:
    words = job.words("checks.strict", "checks.ignore", "checks.run")
    words |= job.words("server.launcher", "server.triton_release")
    machine = facts.gpu() | facts.here()
    return job.repository() | words | machine | facts.versions("onnx", "onnxruntime")


def _publish_reads(job: Job) -> dict[str, str]:
    return job.repository() | job.words("publish") | facts.code()


def _no_network(job: Job) -> str | None:
    engine = job.deployment.engine_name
    return None if engine == "openvino" else f"engine {engine} makes no files of its own"


def _no_rehearsal(job: Job) -> str | None:
    if job.deployment.starts == "embedded":
        return "the smoke test runs in the embedded server itself"
    try:
        install.installed()
    except MissingDependency as error:
        return f"{error}: {error.remedy}"
    if not facts.has("onnxruntime"):
        return "onnxruntime is not installed: pip install 'clip-deploy[server]'"
    return None


def _no_parsing(job: Job) -> str | None:
    d = job.deployment
    if d.backend != "tensorrt" and "tensorrt-check" not in job.required:
        return f"backend {d.backend} needs no TensorRT; --require tensorrt-check asks all the same"
    if not facts.has("tensorrt_rtx"):
        return "TensorRT for RTX is not installed: pip install 'clip-deploy[trt-check]'"
    return None


def _no_plan(job: Job) -> str | None:
    backend = job.deployment.backend
    return None if backend == "tensorrt" else f"backend {backend} runs no plan"


def _no_destination(job: Job) -> str | None:
    if job.deployment.publish is None:
        return f"there is no [{job.deployment.name}.publish]"
    return None if job.force else making.rolled_back(job, _publish_reads)


def _publish(job: Job) -> str:
    """Publish what was linted and smoke-tested just as it lies there, and nothing else."""
    for name in ("lint", "smoke-test"):
        if (why := stale(STEPS[name], job)) is not None:
            raise CheckFailed(
                f"{job.deployment.repository} has not passed {name} as it is: {why}",
                remedy=f"run clip-deploy deploy {job.deployment.name} from an earlier step on",
            )
    return making.publish(job)


def _reports(*names: str) -> Callable[[Job], Iterable[Path]]:
    return lambda job: [job.report(name) for name in names]


STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        Step(
            name="export",
            what="the model as checked graphs",
            follows=(),
            reads=_export_reads,
            makes=making.exported_files,
            run=making.export,
            is_whole_or_nothing=True,
        ),
        Step(
            name="convert",
            what="OpenVINO's networks of the graphs",
            follows=_EXPORTS,
            reads=_convert_reads,
            makes=making.networks,
            run=making.convert,
            skipped=_no_network,
        ),
        Step(
            name="rehearse",
            what="the graphs in the embedded Triton, on this CPU",
            follows=_EXPORTS,
            reads=lambda job: job.manifests() | job.words("serving.max_batch") | _smoke_reads(job),
            makes=_reports("rehearse.json"),
            run=checking.rehearse,
            skipped=_no_rehearsal,
        ),
        Step(
            name="tensorrt-check",
            what="the graphs through TensorRT's parser, without a GPU",
            follows=_EXPORTS,
            reads=_parse_reads,
            makes=_reports("tensorrt-check.json"),
            run=checking.parse,
            skipped=_no_parsing,
        ),
        Step(
            name="build-trt",
            what="TensorRT plans",
            follows=_EXPORTS,
            reads=_plan_reads,
            makes=making.plans,
            run=making.build_plans,
            skipped=_no_plan,
        ),
        Step(
            name="render-config",
            what="the model repository",
            follows=("export", "convert", "build-trt"),
            reads=_render_reads,
            makes=lambda job: job.served_files(),
            run=making.render,
        ),
        Step(
            name="lint",
            what="the repository judged without a server",
            follows=("render-config",),
            reads=_lint_reads,
            makes=_reports("lint.json", LINT_SARIF, LINT_NOTES),
            run=checking.lint,
        ),
        Step(
            name="smoke-test",
            what="the repository served, and every answer held against torch's",
            follows=("render-config",),
            reads=lambda job: job.repository() | _smoke_reads(job),
            makes=_reports("smoke-test.json"),
            run=checking.smoke_test,
        ),
        Step(
            name="publish",
            what="the repository where servers read it",
            follows=("render-config",),
            reads=_publish_reads,
            makes=_reports(making.PUBLICATION),
            run=_publish,
            skipped=_no_destination,
            gone=making.unpublished,
        ),
    )
}


def stale(step: Step, job: Job) -> str | None:
    """Why a step has to run; None where all that it reads is unchanged and what it made is whole."""
    if step.name not in job.state.records:
        return "what was remembered is damaged" if job.state.is_damaged else "it has not run yet"
    try:
        reads = step.reads(job)
    except ClipDeployError as error:
        return str(error)
    changed = job.state.changed(step.name, reads)
    return changed or job.state.whole(step.name, job.digests) or step.gone(job)
