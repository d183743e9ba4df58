"""``clip-deploy smoke-test``: is what is served right?"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.lint import require_clean, server_target
from clip_deploy.cli.options import Images, JsonFile, JunitFile, LogFile, Timeout
from clip_deploy.cli.output import Steps, show, write, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.progress import Progress


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
    launcher: Annotated[
        str,
        typer.Option(metavar="embedded|container", help="What to start, unless --url names one."),
    ] = "embedded",
    triton_release: Annotated[
        str, typer.Option(metavar="YY.MM", help="The container's release.")
    ] = "26.05",
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
    from clip_deploy.errors import CheckFailed, ConfigError
    from clip_deploy.report.findings import as_check
    from clip_deploy.report.junit import junit
    from clip_deploy.report.table import table
    from clip_deploy.smoke import smoke_test as run

    if repository is None and url is None:
        raise ConfigError(
            "nothing to test",
            remedy="name a model repository, or a running server with --url HOST:PORT",
        )
    found = repositories.read(repository) if repository else None
    judged = None
    if repository is not None and url is None:
        _require_launcher(launcher)
        judged = require_clean(repository, server_target(launcher, triton_release))
    with Steps() as steps, contextlib.ExitStack() as stack:
        identity = None
        if url is None:
            assert found is not None  # one of the two was given
            start = _started(launcher, triton_release, found, timeout, log, steps)
            identity, url, metrics_url = stack.enter_context(start)
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


def _require_launcher(name: str) -> None:
    from clip_deploy.errors import ConfigError
    from clip_deploy.servers import LAUNCHERS

    if name not in LAUNCHERS:
        raise ConfigError(f"launcher {name!r} is unknown", remedy=f"use {' or '.join(LAUNCHERS)}")


@contextlib.contextmanager
def _started(
    launcher: str,
    release: str,
    repository: ModelRepository,
    timeout_s: float,
    log: Path | None,
    progress: Progress,
) -> Iterator[tuple[str, str, str]]:
    """The identity, the gRPC address and the metrics address of a server on free ports."""
    from clip_deploy.servers import LAUNCHERS, ServerOptions

    options = ServerOptions(timeout_s=timeout_s, log=log, release=release)
    with LAUNCHERS[launcher].start(repository, options, progress) as handle:
        yield handle.identity, handle.grpc, handle.metrics
