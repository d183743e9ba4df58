"""A search as one page that reads without a network: every trial, and what follows for config.pbtxt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.report import tune_charts as charts
from clip_deploy.report.html import filled
from clip_deploy.report.tunes import COLUMNS, cells, result, standing

if TYPE_CHECKING:
    from clip_deploy.tune.report import TuneReport
    from clip_deploy.tune.trials import Trial


def page(report: TuneReport) -> str:
    """The page's HTML."""
    outcome = report.outcome
    return filled(
        "tune.html.j2",
        title=f"{report.model}: {outcome.goal}",
        report=report,
        outcome=outcome,
        columns=COLUMNS,
        finalists=[(standing(c, report), cells(c, report)) for c in outcome.finalists],
        trials=[_row(trial, report) for trial in outcome.trials],
        landscape_chart=charts.landscape(report),
        progress_chart=charts.progress(report),
    )


def _row(trial: Trial, report: TuneReport) -> dict[str, Any]:
    winner, goal = report.outcome.winner, report.outcome.goal
    return {
        "phase": trial.phase.value,
        "settings": trial.settings,
        "result": result(trial, goal),
        "fits": trial.fits(goal),
        "seconds": f"{trial.seconds:.1f}",
        "best": winner is not None and trial.settings == winner.settings,
    }
