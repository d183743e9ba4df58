"""``clip-deploy tune``: which settings serve a load fastest within a latency budget?"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import JsonFile, LogFile, Timeout
from clip_deploy.cli.output import Steps, escaped, say, show, write, write_json
from clip_deploy.cli.serving import servable, served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.servers import ServerHandle
    from clip_deploy.tune.report import TuneReport
    from clip_deploy.tune.trials import Study

_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
_USERS = 32
_WARMUP_S = 1.0


def tune(
    repository: Annotated[Path, typer.Argument(help="The model repository.")],
    p99_ms: Annotated[
        float, typer.Option(help="The latency budget: what the 99th percentile may be.", min=0.1)
    ],
    concurrency: Annotated[
        Optional[int],
        typer.Option(
            metavar="USERS", min=1, help=f"A closed loop of so many users; {_USERS} by default."
        ),
    ] = None,
    rate: Annotated[
        Optional[float],
        typer.Option(metavar="PER_SECOND", help="An open loop instead: so many requests a second."),
    ] = None,
    tower: Annotated[
        Optional[str],
        typer.Option(metavar="image|text", help="Which encoder; the image's where there is one."),
    ] = None,
    trials: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            help="Settings to search; by default so many that all measurements are a third of a full grid, 60 at most.",
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long each is measured.")
    ] = 3.0,
    study: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            help="Where trials are kept, to go on after an interruption; tune-MODEL.jsonl by default.",
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write what was found into config.pbtxt.")
    ] = False,
    url: Annotated[
        Optional[str],
        typer.Option(
            metavar="HOST:PORT",
            help="gRPC address of a server on this machine, in explicit control mode, that serves the repository; "
            "without it, one is started.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search, and of a rate's arrivals.")] = 0,
    timeout: Timeout = 300.0,
    log: LogFile = None,
    html: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="Also write a page with all trials."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Find the queue delay, instances, threads and max batch that serve a load fastest within a latency budget.

    Each trial reconfigures the running server, holds its answers against the reference, and measures. The best are then
    measured again in turn with the settings as they are. Exit code 7 when nothing keeps the budget.
    """
    from clip_deploy import repository as repositories
    from clip_deploy.bench.figures import Load
    from clip_deploy.bench.machine import describe
    from clip_deploy.report.tunes import line
    from clip_deploy.tune.optimiser import library
    from clip_deploy.tune.report import ConfigFile
    from clip_deploy.tune.search import planned_trials, search
    from clip_deploy.tune.serving import TunedModel
    from clip_deploy.tune.trials import Goal, Study

    library()  # a missing one is told before the work, not after it
    if html is not None:
        import clip_deploy.report.tune_page  # noqa: F401
    if concurrency is None and rate is None:
        concurrency = _USERS
    goal = Goal(Load(users=concurrency, rate=rate), p99_ms / 1e3)
    model = _narrowed(repositories.read(repository) if url else servable(repository)[0], tower)
    before = ConfigFile.read(model)
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(_server(model, timeout, log, url))
        live = stack.enter_context(_Live())
        tuned = TunedModel(
            started.grpc if started else str(url),
            model,
            before.config,
            started,
            duration_s=duration,
            warmup_s=min(duration, _WARMUP_S),
            seed=seed,
            progress=live,
        )
        space = tuned.space(goal)
        kept = Study.open(study or Path(f"tune-{before.model}.jsonl"), tuned.identity(goal, space))
        if kept.trials:
            say(f"going on with {kept.path}, which holds {len(kept.trials)} measurements")
        stack.enter_context(_resumable(kept))
        stack.enter_context(tuned.restored())
        outcome = search(
            space,
            goal,
            tuned,
            kept,
            trials=trials or planned_trials(space),
            seed=seed,
            watch=lambda trial, progress: live.line(line(trial, progress, goal)),
        )
    report = before.settled(outcome, describe(), apply=apply)
    _show(report, beside=json_file)
    write_json(report.to_json(), json_file)
    if html is not None:
        from clip_deploy.report.tune_page import page

        write(page(report), html)


def _narrowed(found: ModelRepository, tower: str | None) -> ModelRepository:
    """The repository with the one encoder that is tuned."""
    from clip_deploy.errors import ConfigError
    from clip_deploy.spec import Tower

    names = [each.value for each in Tower]
    if tower is not None and tower not in names:
        raise ConfigError(f"--tower {tower!r} is unknown", remedy=f"use {' or '.join(names)}")
    wanted = [Tower(tower).model_name] if tower else [each.model_name for each in Tower]
    models = sorted(
        (model for model in found.models if model.name in wanted),
        key=lambda model: wanted.index(model.name),
    )
    if not models:
        raise ConfigError(
            f"{found.path} holds no {' or '.join(wanted)}",
            remedy="render one with clip-deploy render-config, or choose another --tower",
        )
    return replace(found, models=tuple(models[:1]))


@contextlib.contextmanager
def _server(
    repository: ModelRepository, timeout_s: float, log: Path | None, url: str | None
) -> Iterator[ServerHandle | None]:
    """The embedded server with this model alone, which may be loaded again; None where ``url`` names another."""
    if url is not None:
        yield None
        return
    from clip_deploy.servers import ServerOptions
    from clip_deploy.tune.serving import server_arguments

    arguments = server_arguments(repository.models[0].name)
    options = ServerOptions(timeout_s=timeout_s, log=log, arguments=arguments)
    with contextlib.ExitStack() as stack:
        with Steps() as steps:
            handle = stack.enter_context(served("embedded", repository, options, steps))
        yield handle


@contextlib.contextmanager
def _resumable(study: Study) -> Iterator[None]:
    """Whatever ends a search early, what was measured is kept, and a person is told so."""
    try:
        yield
    except KeyboardInterrupt:
        say(
            f"interrupted; {len(study.trials)} measurements are in {study.path}: the same command goes on from there"
        )
        raise typer.Exit(_INTERRUPTED) from None


def _show(report: TuneReport, beside: Path | None) -> None:
    from clip_deploy.report.tunes import table

    show(table(report), beside=beside)
    show(escaped(report.verdict), beside=beside)
    if report.difference:
        show(escaped(report.difference), beside=beside)
        say(
            f"{report.path} is written"
            if report.applied
            else "to write it, add --apply; nothing is measured twice"
        )


class _Live:
    """One line per trial, and below them, on a terminal, what is going on; a context manager."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._status = self._console.status("")

    def __enter__(self) -> _Live:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, step: str) -> None:
        """What is going on now."""
        self._status.update(escaped(step))

    def line(self, text: str) -> None:
        """Something that is done."""
        self._console.print(escaped(text), soft_wrap=True, highlight=False)
