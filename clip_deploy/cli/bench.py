"""``clip-deploy bench``: how fast is what is served, and is it still right under load?"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clip_deploy.cli.options import (
    Images,
    JsonFile,
    Launcher,
    LogFile,
    Timeout,
    TritonRelease,
    numbers,
)
from clip_deploy.cli.output import Steps, show, write, write_json
from clip_deploy.cli.serving import encoder_at, require_either, servable, served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.bench.figures import Load
    from clip_deploy.bench.reports import BenchReport
    from clip_deploy.bench.subject import BenchSubject
    from clip_deploy.progress import Progress
    from clip_deploy.smoke.subject import Target

# A folder of a million pictures is a benchmark of the disk.
_MOST_INPUTS = 256
_MOST_USERS = 2000
_USERS = "1,8,32,100"
# A curve of --duration alone would hold too few batches of each size.
_CURVE_DURATIONS = 4


def bench(
    repository: Annotated[
        Optional[Path],
        typer.Argument(
            help="The model repository; a server is started on it, unless --url names one."
        ),
    ] = None,
    url: Annotated[
        Optional[str],
        typer.Option(metavar="HOST:PORT", help="gRPC address of a running server to measure."),
    ] = None,
    concurrency: Annotated[
        Optional[str],
        typer.Option(
            metavar="N,N…",
            help=f"Closed loops: so many users, each of whom waits for an answer; {_USERS} where neither is given.",
        ),
    ] = None,
    rate: Annotated[
        Optional[str],
        typer.Option(
            metavar="R,R…",
            help="Open loops: so many requests per second at random moments, whether or not answers come.",
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long each load is measured.", min=0.1)
    ] = 10.0,
    warmup: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long it lasts before that.", min=0)
    ] = 2.0,
    repeats: Annotated[
        int, typer.Option(help="How often each load is measured, in turn.", min=1, max=100)
    ] = 3,
    images: Images = None,
    tower: Annotated[
        Optional[str],
        typer.Option(
            metavar="image|text", help="The encoder; the image encoder where there is one."
        ),
    ] = None,
    compare: Annotated[
        Optional[str],
        typer.Option(
            metavar="B",
            help="A second repository, or REV:PATH of one in git: both are measured in turn, with B ÷ A.",
        ),
    ] = None,
    launcher: Launcher = "embedded",
    triton_release: TritonRelease = "26.05",
    seed: Annotated[int, typer.Option(help="Of the random moments of --rate.", min=0)] = 0,
    timeout: Timeout = 300.0,
    log: LogFile = None,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve/--no-curve",
            help="With --json, also measure what batches of each size cost, for clip-deploy capacity --from; "
            "it takes four times --duration and a few seconds. Not with --compare.",
        ),
    ] = True,
    json_file: JsonFile = None,
    html_file: Annotated[
        Optional[Path],
        typer.Option(
            "--html",
            metavar="FILE",
            help="Also write one page with charts, readable without network.",
        ),
    ] = None,
) -> None:
    """Measure a served model under load.

    Every answer is held against the reference meanwhile; wrong ones fail the run, whatever its speed (exit code 7). A
    latency counts from the moment at which the request should have started.
    """
    from clip_deploy.bench.benchmark import benchmark
    from clip_deploy.bench.reports import Settings
    from clip_deploy.cli.live import LiveLoads
    from clip_deploy.cli.revisions import folder_of

    loads = _loads(concurrency, rate)
    _require_possible(repository, url, compare)
    if html_file:
        import clip_deploy.report.load_page  # noqa: F401  (a missing library is told before the work, not after it)
    with contextlib.ExitStack() as stack:
        with Steps() as steps:
            find = _Finder(stack, steps, launcher, triton_release, timeout, log, images, tower)
            subjects = [find.running(url, repository) if url else find.started(repository)]
            if compare is not None:
                find = replace(find, tower=subjects[0].target.tower.value)
                subjects.append(find.started(stack.enter_context(folder_of(compare))))
        inputs = "inputs of your own, in turn" if images else "real inputs, in turn"
        settings = Settings(duration, warmup, repeats, len(subjects[0].requests), inputs, seed)
        names = [str(url or repository), *([compare] if compare else [])]
        with LiveLoads(names, loads, settings) as live:
            reports = benchmark(subjects, loads, settings, show=live)
        try:
            if curve and json_file and len(reports) == 1 and not reports[0].wrong:
                reports = [_with_curve(reports[0], subjects[0])]
        finally:  # whatever becomes of the curve, the loads were measured
            _tell(reports, names, json_file, html_file)
    _judge(reports)


def _with_curve(report: BenchReport, subject: BenchSubject) -> BenchReport:
    """A report with what its model's batches cost."""
    from clip_deploy.bench.costs import measure_box

    seconds = _CURVE_DURATIONS * report.settings.duration_s
    with Steps() as steps:
        return replace(report, curve=measure_box(subject, seconds=seconds, progress=steps))


def _loads(concurrency: str | None, rate: str | None) -> list[Load]:
    """The loads that were asked for, each once: closed loops first."""
    from clip_deploy.bench.figures import Load
    from clip_deploy.errors import ConfigError

    if concurrency is None and rate is None:
        concurrency = _USERS
    users = numbers(concurrency, "--concurrency") if concurrency else ()
    if any(each != int(each) or each > _MOST_USERS for each in users):
        raise ConfigError(
            f"--concurrency {concurrency!r}", remedy=f"name whole numbers up to {_MOST_USERS}"
        )
    rates = numbers(rate, "--rate") if rate else ()
    loads = [Load(users=int(each)) for each in users] + [Load(rate=each) for each in rates]
    return list(dict.fromkeys(loads))


def _require_possible(repository: Path | None, url: str | None, compare: str | None) -> None:
    from clip_deploy.errors import ConfigError

    require_either(repository, url, "measure")
    if compare is not None and url is not None:
        raise ConfigError(
            "--compare with --url: one of the two would run where the other does not",
            remedy="name two repositories: clip-deploy bench A --compare B",
        )


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds what to measure: on servers that it starts for the time of ``stack``, or at an address."""

    stack: contextlib.ExitStack
    steps: Progress
    launcher: str
    release: str
    timeout_s: float
    log: Path | None
    images: Path | None
    tower: str | None

    def started(self, path: Path | None) -> BenchSubject:
        """On a server of its own, once the linter finds nothing wrong."""
        from clip_deploy.servers import ServerOptions

        repository, _ = servable(path, self.launcher, self.release)
        options = ServerOptions(timeout_s=self.timeout_s, log=self.log, release=self.release)
        handle = self.stack.enter_context(served(self.launcher, repository, options, self.steps))
        # The process of a container is Docker's client, which does none of the work.
        pid = handle.process.pid if self.launcher == "embedded" else None
        return self._encoder(handle.grpc, repository, pid)

    def running(self, url: str, path: Path | None) -> BenchSubject:
        """On a server that runs already."""
        from clip_deploy import repository as repositories

        return self._encoder(url, repositories.read(path) if path else None, None)

    def _encoder(
        self, url: str, repository: ModelRepository | None, pid: int | None
    ) -> BenchSubject:
        inputs = partial(_own_inputs, self.images) if self.images else None
        return encoder_at(url, repository, self.tower, self.steps, inputs=inputs, pid=pid)


def _own_inputs(folder: Path, target: Target) -> NDArray[Any]:
    """The user's pictures, or their captions, as the model reads them ``[n, …]``."""
    from clip_deploy.errors import ConfigError
    from clip_deploy.inputs.images import to_pixels
    from clip_deploy.inputs.photographs import photographs

    found = photographs(folder)
    preprocess, tokenizer = target.served.contract.preprocess, target.served.tokenizer
    if preprocess is not None:
        return to_pixels(found.paths[:_MOST_INPUTS], preprocess)
    captions = [caption for caption in found.captions if caption][:_MOST_INPUTS]
    if len(captions) < 2:
        raise ConfigError(
            f"{folder} holds {len(captions)} captions",
            remedy="write captions.json, or drop --images",
        )
    assert tokenizer is not None  # a text encoder's config has it
    return tokenizer(captions)


def _tell(
    reports: Sequence[BenchReport], names: Sequence[str], json_file: Path | None, html: Path | None
) -> None:
    """Show what was measured, and write it where that was asked for."""
    from clip_deploy.bench.reports import Comparison
    from clip_deploy.report.loads import comparison, table

    both = Comparison(*reports) if len(reports) == 2 else None
    beside = Path("-") if Path("-") in (json_file, html) else None
    show(comparison(both, names) if both else table(reports[0]), beside=beside)
    write_json((both or reports[0]).to_json(), json_file)
    if html is not None:
        from clip_deploy.report.load_page import comparison_page, page

        write(comparison_page(both, names) if both else page(reports[0]), html)


def _judge(reports: Sequence[BenchReport]) -> None:
    """Raise CheckFailed where answers were wrong, or every load was beyond the server."""
    from clip_deploy.errors import CheckFailed

    if wrong := sum(report.wrong for report in reports):
        raise CheckFailed(
            f"{wrong:,} answers under load were wrong; the speed above means nothing",
            remedy="run clip-deploy smoke-test, and do not serve this model",
        )
    if any(report.overloaded for report in reports):
        raise CheckFailed(
            "every load was beyond the server",
            remedy="lower --rate below the answers per second above, or serve more replicas",
        )
