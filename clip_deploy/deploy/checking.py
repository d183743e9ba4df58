"""The steps that prove something: the linter, TensorRT's parser, and smoke tests on real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy import repository as repositories
from clip_deploy.deploy.job import LINT_NOTES, LINT_SARIF
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import CheckFailed, ConfigError, EngineError
from clip_deploy.files import building
from clip_deploy.lint import Target
from clip_deploy.lint import target as make_target
from clip_deploy.report import Status
from clip_deploy.servers import LAUNCHERS
from clip_deploy.servers.install import TRITON_RELEASE
from clip_deploy.smoke.checks import RUNS_ON_GPU
from clip_deploy.spec import EngineSpec, ServingSpec

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.deploy.job import Job
    from clip_deploy.lint import LintReport
    from clip_deploy.report import Report


def server_target(launcher: str, release_name: str, kind: str = "auto") -> Target:
    """What a launcher's server has."""
    if launcher == "embedded":
        has = LAUNCHERS[launcher].backends
        return make_target("auto", TRITON_RELEASE, backends=has, agents=frozenset())
    return make_target(kind, release_name)


def lint(job: Job) -> str:
    """Judge the repository; what was found is written for code scanning and for annotations, whatever it is.

    Raises:
        CheckFailed: there is an error, or with ``strict`` a warning.
    """
    from clip_deploy.lint import lint as judge
    from clip_deploy.report.findings import sarif, workflow_commands

    d = job.deployment
    job.drop_reports("lint.json", LINT_SARIF, LINT_NOTES)
    kind = "gpu" if d.wants_gpu else "auto"
    report = judge(
        [d.repository],
        server_target(d.starts, d.server.release, kind),
        ignore=d.checks.ignore,
        run=d.checks.run,
    )
    job.write_report("lint.json", report.to_json())
    job.write_report(LINT_SARIF, sarif(report))
    job.write_report(LINT_NOTES, workflow_commands(report))
    if not report.ok(strict=d.checks.strict):
        raise CheckFailed(
            f"{d.repository} would not be served rightly: {_worst(report)}",
            remedy=f"clip-deploy lint {d.repository} shows all of it",
        )
    return report.summary()


def _worst(report: LintReport) -> str:
    first = min(report.findings, key=lambda f: ("error", "warning", "note").index(f.severity.value))
    return f"{report.summary()}, first {first.code}: {first.message}"


def parse(job: Job) -> str:
    """Let TensorRT's parser and builder read the graphs, without a GPU.

    Raises:
        EngineError: it refuses one.
    """
    from clip_deploy.engines.tensorrt.checking import check

    told = []
    for model in job.exports():
        job.progress(f"{model.name}: parsing and building")
        result = check(model, job.deployment.plan.profile)
        if result.complaints:
            raise EngineError(
                f"{result.model} does not build: {result.complaints[0]}",
                remedy="export it again, in fp32, or report the model's name and this line",
            )
        told.append(f"{result.model}: {result.layers} layers")
    job.write_report("tensorrt-check.json", told)
    return ", ".join(told)


def rehearse(job: Job) -> str:
    """The exports in the embedded server on this CPU, before the backend that will serve them is tried."""
    d = job.deployment
    with building(job.out / "rehearsal", ConfigError) as folder:
        for model in job.exports():
            job.progress(f"{model.name}: rendering it for the embedded server")
            build = BACKENDS["python"].build(model, EngineSpec(), job.progress)
            serving = ServingSpec(max_batch=d.serving.max_batch, warmup=False)
            repositories.assemble(build, serving, folder)
        return _smoke_tested(job, "embedded", folder, "rehearse.json").summary()


def smoke_test(job: Job) -> str:
    d = job.deployment
    report = _smoke_tested(job, d.starts, d.repository, "smoke-test.json")
    if d.wants_gpu:
        require_gpu(report)
    return report.summary()


def require_gpu(report: Report) -> None:
    """Raise CheckFailed unless every model was seen on a GPU: elsewhere it answers rightly, and far slower."""
    told = [check for check in report.checks if check.name == RUNS_ON_GPU]
    if not told or any(check.status is not Status.PASSED for check in told):
        where = ", ".join(check.model for check in told if check.status is not Status.PASSED)
        raise CheckFailed(
            f"not seen on a GPU: {where or 'any model'}",
            remedy="run it where a GPU is (clip-deploy doctor), or ask for no GPU",
        )


def _smoke_tested(job: Job, launcher: str, repository: Path, name: str) -> Report:
    """Serve a repository and hold it against its reference; the report is written whatever it says.

    Raises:
        CheckFailed: something answered wrongly.
        ServerError: the server did not start.
    """
    from clip_deploy.client import TritonInferenceClient
    from clip_deploy.smoke import smoke_test as run
    from clip_deploy.smoke.bars import held_to

    checks = job.deployment.checks
    job.drop_reports(name)
    found = repositories.read(repository)
    with (
        LAUNCHERS[launcher].serving(found, job.deployment.server, job.progress) as handle,
        TritonInferenceClient(handle.grpc) as client,
    ):
        report = run(
            client,
            repository=found,
            identity=handle.identity,
            concurrency=checks.concurrency,
            images=checks.images,
            metrics=handle.metrics,
            progress=job.progress,
        )
    report = held_to(report, checks.min_cosine)
    job.write_report(name, report.to_json())
    if not report.ok:
        raise CheckFailed(_first_failure(report), remedy=_first_remedy(report))
    return report


def _first_failure(report: Report) -> str:
    first = report.failed[0] if report.failed else None
    told = f"; {first.model}: {first.name}: {first.figure}" if first else ""
    return f"the smoke test failed: {report.summary()}{told}"


def _first_remedy(report: Report) -> str:
    return next((check.remedy for check in report.failed if check.remedy), "see the report")
