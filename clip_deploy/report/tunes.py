"""A search in words: its trials one by one while it runs, and the table of those that came into the final rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from clip_deploy.report.grid import grid

if TYPE_CHECKING:
    from rich.table import Table

    from clip_deploy.tune.report import TuneReport
    from clip_deploy.tune.search import Contender, Progress
    from clip_deploy.tune.trials import Goal, Trial

COLUMNS = ("settings", "answers/s", "p99, ms", "against now", "rounds, answers/s")


def line(trial: Trial, progress: Progress, goal: Goal) -> str:
    """One trial as it is shown while the search runs."""
    number = {"search": f"{progress.done}/{progress.planned}"}.get(trial.phase, trial.phase.value)
    best = progress.best
    so_far = f"  best {best.run.throughput:.1f}/s" if best and best.run else ""
    return f"{number:>7}  {trial.settings}: {result(trial, goal)}{so_far}"


def result(trial: Trial, goal: Goal) -> str:
    """What came of a trial: its figures, or why there are none."""
    run = trial.run
    if trial.failure or run is None or run.latency is None:
        return f"✗ {trial.failure}"
    figures = f"{run.throughput:.1f}/s, p99 {run.latency.p99_s * 1e3:.1f} ms"
    if run.overloaded:
        return f"✗ {figures}, overloaded"
    return f"✓ {figures}" if trial.p99_s <= goal.p99_s else f"✗ {figures}, over the budget"


def gained(contender: Contender, default: Contender, goal: Goal) -> str:
    """How it compares with the default, in the measure that counts."""
    if goal.load.users:
        return (
            f"{contender.throughput:.1f}/s against {default.throughput:.1f}/s ({contender.gain:.2f} times), "
            f"p99 {contender.p99_s * 1e3:.1f} ms against {default.p99_s * 1e3:.1f} ms"
        )
    return (
        f"p99 {contender.p99_s * 1e3:.1f} ms against {default.p99_s * 1e3:.1f} ms "
        f"({contender.gain:.2f} times sooner) at the same rate"
    )


def cells(contender: Contender, report: TuneReport) -> tuple[str, ...]:
    """A contender's row under ``COLUMNS``."""
    is_default = contender is report.outcome.default
    return (
        str(contender.settings),
        f"{contender.throughput:.1f}",
        f"{contender.p99_s * 1e3:.1f}",
        "" if is_default else f"{contender.gain:.2f} ×",
        ", ".join(f"{run.throughput:.1f}" for run in contender.runs),
    )


def standing(contender: Contender, report: TuneReport) -> str:
    """``now``, ``best``, or nothing."""
    outcome = report.outcome
    return {id(outcome.default): "now", id(outcome.winner): "best"}.get(id(contender), "")


def table(report: TuneReport) -> Table:
    """The final rounds, for a terminal."""
    rows = grid("", *COLUMNS)
    for contender in report.outcome.finalists:
        style = "green" if contender is report.outcome.winner else ""
        rows.add_row(
            standing(contender, report),
            *(Text(cell) for cell in cells(contender, report)),
            style=style,
        )
    return rows
