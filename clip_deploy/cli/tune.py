"""``clip-deploy tune``: which settings serve a load fastest within a latency budget?"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clip_deploy.cli.lint import require_clean, server_target
from clip_deploy.cli.options import JsonFile, LogFile, Timeout
from clip_deploy.cli.output import Steps, grid, say, show, write, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.bench.figures import Load
    from clip_deploy.servers import ServerHandle
    from clip_deploy.tune.report import TuneReport
    from clip_deploy.tune.search import Outcome
    from clip_deploy.tune.serving import TunedModel
    from clip_deploy.tune.space import Space
    from clip_deploy.tune.trials import Goal

_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
_USERS = 32


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
        typer.Option(min=1, help="Settings to measure; a quarter of all, 60 at most."),
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
    from clip_deploy.bench.figures import Load
    from clip_deploy.tune.search import planned_trials, search
    from clip_deploy.tune.trials import Goal, Study

    if concurrency is None and rate is None:
        concurrency = _USERS
    goal = Goal(Load(users=concurrency, rate=rate), p99_ms / 1e3)
    model = _narrowed(repository, tower)
    if url is None:
        require_clean(repository, server_target("embedded", ""))
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(_server(model, timeout, log, url))
        steps = stack.enter_context(_Trials())
        served = _served(model, started, url, duration, seed, steps)
        space = _space(served, goal.load, goal)
        kept = Study.open(study or Path(f"tune-{served.name}.jsonl"), _identity(served, goal, space))
        planned = trials or planned_trials(space)
        if kept.trials:
            say(f"going on with {kept.path}: {len(kept.trials)} measurements are there")
        stack.enter_context(_resumable(kept.path))
        stack.enter_context(served.restored())
        outcome = search(
            space, goal, served, kept, trials=planned, seed=seed, watch=steps.watcher(goal)
        )
    report = _settled(model, outcome, apply=apply)
    show(_table(outcome), beside=json_file)
    show(report.verdict, beside=json_file)
    if report.difference:
        show(_plain(report.difference), beside=json_file)
    write_json(report.to_json(), json_file)
    if html is not None:
        from clip_deploy.tune.page import page

        write(page(report), html)
    if report.difference and not apply:
        say("to write it: the same command with --apply; nothing is measured twice")
