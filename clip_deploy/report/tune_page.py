"""A search as one page that needs no network: every trial against the budget, and what follows for config.pbtxt."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import jinja2

from clip_deploy.errors import extra
from clip_deploy.report.tunes import COLUMNS, cells, result, standing
from clip_deploy.resources import templates_dir

with extra("bench"):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from clip_deploy.tune.report import TuneReport
    from clip_deploy.tune.trials import Trial

_INK, _FAINT, _GOOD, _NOW, _LIMIT = "#1f2933", "#b8c2cc", "#0b7a53", "#2f6fde", "#c2410c"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: it can be searched, and is set in the page's own font
    "svg.hashsalt": "clip-deploy",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": "#eef1f4",
    "axes.axisbelow": True,
}


def page(report: TuneReport) -> str:
    """The page's HTML."""
    outcome = report.outcome
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir() / "report"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("tune.html.j2").render(
        report=report,
        outcome=outcome,
        columns=COLUMNS,
        finalists=[(standing(c, report), cells(c, report)) for c in outcome.finalists],
        trials=[_row(trial, report) for trial in outcome.trials],
        landscape=landscape(report),
        progress=progress(report),
    )


def landscape(report: TuneReport) -> str:
    """All trials, throughput against the 99th percentile, with the budget; SVG."""
    goal = report.outcome.goal
    measured = [trial for trial in report.outcome.trials if _is_under_load(trial)]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        axes = figure.subplots()
        for fits, colour, label in ((True, _INK, "keeps the budget"), (False, _FAINT, "does not")):
            points = [_point(trial) for trial in measured if trial.fits(goal) is fits]
            if points:
                waits, throughputs = zip(*points)
                axes.scatter(waits, throughputs, s=22, color=colour, label=label, linewidths=0)
        axes.axvline(goal.p99_s * 1e3, color=_LIMIT, linewidth=1.2, linestyle="--", label="budget")
        _mark(axes, report)
        if goal.p99_s * 1e3 < axes.get_xlim()[1] / 4 or _spread(measured) > 10:
            axes.set_xscale("log")
        axes.set(xlabel="p99, ms", ylabel="answers per second", ylim=(0, None))
        figure.legend(loc="outside right upper", frameon=False)
        return _svg(figure)


def progress(report: TuneReport) -> str:
    """The best that was known after each trial of the search; SVG."""
    goal = report.outcome.goal
    searched = [trial for trial in report.outcome.trials if trial.phase == "search"]
    by_throughput = goal.load.users is not None
    best: list[float] = []
    values: list[float] = []
    for trial in searched:
        value = float("nan")
        if trial.fits(goal) and trial.run:
            value = trial.run.throughput if by_throughput else trial.p99_s * 1e3
        values.append(value)
        known = [each for each in values if each == each]  # NaN is not equal to itself
        best.append((max if by_throughput else min)(known, default=float("nan")))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        axes = figure.subplots()
        numbers = range(1, len(searched) + 1)
        axes.step(numbers, best, where="post", color=_GOOD, label="best so far")
        axes.scatter(numbers, values, s=18, color=_INK, linewidths=0, label="a trial that fits")
        axes.set(xlabel="trial", ylabel="answers per second" if by_throughput else "p99, ms")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside right upper", frameon=False)
        return _svg(figure)


def _mark(axes: Any, report: TuneReport) -> None:
    """The default and the winner, as their final rounds put them."""
    outcome = report.outcome
    for contender, colour, label in (
        (outcome.default, _NOW, "as they are"),
        (outcome.winner, _GOOD, "best"),
    ):
        if contender is not None and contender.runs:
            axes.scatter(
                contender.p99_s * 1e3,
                contender.throughput,
                s=110,
                facecolors="none",
                edgecolors=colour,
                linewidths=2.2,
                label=label,
            )


def _is_under_load(trial: Trial) -> bool:
    return trial.phase != "alone" and not trial.failure and bool(trial.run and trial.run.latency)


def _point(trial: Trial) -> tuple[float, float]:
    assert trial.run is not None  # it was measured
    return trial.p99_s * 1e3, trial.run.throughput


def _spread(trials: list[Trial]) -> float:
    """The greatest p99 by the least."""
    waits = [trial.p99_s for trial in trials]
    return max(waits) / max(min(waits), 1e-9) if waits else 1.0


def _row(trial: Trial, report: TuneReport) -> dict[str, Any]:
    winner = report.outcome.winner
    return {
        "phase": trial.phase.value,
        "settings": trial.settings,
        "result": result(trial, report.outcome.goal),
        "fits": trial.fits(report.outcome.goal),
        "seconds": trial.seconds,
        "best": winner is not None and trial.settings == winner.settings,
    }


def _svg(figure: Figure) -> str:
    """The drawing alone, to stand inside a page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return file.getvalue().partition("<svg")[2].join(("<svg", ""))
