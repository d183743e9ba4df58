"""``clip-deploy smoke-test``: is what is served right?"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import (
    Images,
    JsonFile,
    JunitFile,
    Launcher,
    LogFile,
    Timeout,
    TritonRelease,
)
from clip_deploy.cli.output import Steps, show, write, write_json
from clip_deploy.cli.serving import require_either, servable, served

if TYPE_CHECKING:
    from clip_deploy.artifacts import ModelRepository


def smoke_test(
    repository: Annotated[
        Optional[Path],
        typer.Argument(
            help="The model repository; a server is started on it, unless --url names one."
        ),
    ] = None,
    url: Annotated[
        Optional[str],
        typer.Option(metavar="HOST:PORT", help="gRPC address of a running server to test."),
    ] = None,
    launcher: Launcher = "embedded",
    triton_release: TritonRelease = "26.05",
    metrics_url: Annotated[
        Optional[str],
        typer.Option(
            metavar="HOST:PORT", help="Metrics of the server that --url names, for its GPU."
        ),
    ] = None,
    images: Images = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests to send at once.", min=1, max=2000)
    ] = 100,
    min_cosine: Annotated[
        Optional[float],
        typer.Option(
            help="The least cosine to torch's answers, where the precision's own tolerance is not strict enough.",
            min=0,
            max=1,
        ),
    ] = None,
    timeout: Timeout = 300.0,
    log: LogFile = None,
    json_file: JsonFile = None,
    junit_file: JunitFile = None,
) -> None:
    """Hold a served model against torch's answers.

    Row by row, alone and in a crowd, with proof that batches form. Exit code 7 when any check fails; a skipped check
    never counts as passed.
    """
    from clip_deploy import repository as repositories
    from clip_deploy.client import TritonInferenceClient
    from clip_deploy.errors import CheckFailed
    from clip_deploy.report.findings import as_check
    from clip_deploy.report.junit import junit
    from clip_deploy.report.table import table
    from clip_deploy.servers import ServerOptions
    from clip_deploy.smoke import smoke_test as run
    from clip_deploy.smoke.bars import held_to

    require_either(repository, url, "test")
    found: ModelRepository | None
    judged = identity = None
    with Steps() as steps, contextlib.ExitStack() as stack:
        if url is None:
            found, judged = servable(repository, launcher, triton_release)
            options = ServerOptions(timeout_s=timeout, log=log, release=triton_release)
            handle = stack.enter_context(served(launcher, found, options, steps))
            identity, url, metrics_url = handle.identity, handle.grpc, handle.metrics
        else:
            found = repositories.read(repository) if repository else None
        client = stack.enter_context(TritonInferenceClient(url))
        report = run(
            client,
            repository=found,
            identity=identity,
            concurrency=concurrency,
            images=images,
            metrics=metrics_url,
            progress=steps,
        )
    report = held_to(report, min_cosine)
    if judged is not None:
        report = replace(report, checks=(as_check(judged), *report.checks))
    to_stdout = Path("-") in (json_file, junit_file)
    show(table(report), beside=Path("-") if to_stdout else None)
    write_json(report.to_json(), json_file)
    write(junit(report), junit_file)
    if not report.ok:
        raise CheckFailed(
            f"the smoke test failed: {report.summary()}",
            remedy="see the rows marked ✗ and what they say",
        )
