"""The charts of a search: every trial against the budget, and how the best came to be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from clip_deploy.errors import extra
from clip_deploy.report.charts import BLUES, GREY, INK, WARNING, drawn, milliseconds_axis

with extra("bench"):
    from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clip_deploy.tune.report import TuneReport
    from clip_deploy.tune.search import Outcome
    from clip_deploy.tune.trials import Trial

_GOOD = "#1c7c4a"


def landscape(report: TuneReport) -> str:
    """All trials under the load, throughput against the 99th percentile, with the budget."""
    outcome = report.outcome

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for fits, colour, label in ((True, INK, "keeps the budget"), (False, GREY, "does not")):
            points = [point for trial in outcome.trials for point in _points(trial, outcome, fits)]
            if points:
                waits_s, throughputs = zip(*points)
                axes.scatter(waits_s, throughputs, s=22, color=colour, label=label, linewidths=0)
        axes.axvline(outcome.goal.p99_s, color=WARNING, linewidth=1.2, linestyle="--")
        axes.annotate(
            " budget", (outcome.goal.p99_s, 0.02), xycoords=("data", "axes fraction"), color=WARNING
        )
        _mark_ends(axes, outcome)
        axes.set_xscale("log")
        milliseconds_axis(axes.xaxis)
        axes.set_xlabel("p99, ms")
        axes.set_ylabel("answers per second")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=4)

    return drawn(4.2, "Throughput against the 99th percentile of every trial", draw)


def progress(report: TuneReport) -> str:
    """The best that was known after each trial of the search."""
    goal = report.outcome.goal
    by_throughput = goal.load.users is not None
    values = [_value(trial, report.outcome) for trial in report.outcome.searched]
    numbers = range(1, len(values) + 1)

    def best_of(number: int) -> float:
        known = [value for value in values[:number] if not math.isnan(value)]
        return (max if by_throughput else min)(known, default=math.nan)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.step(
            numbers, [best_of(n) for n in numbers], where="post", color=_GOOD, label="best so far"
        )
        axes.scatter(numbers, values, s=18, color=INK, linewidths=0, label="a trial that fits")
        axes.set_xlabel("trial")
        axes.set_ylabel("answers per second" if by_throughput else "p99, ms")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=2)

    return drawn(3.0, "The best settings known after each trial", draw)


def _points(trial: Trial, outcome: Outcome, fits: bool) -> list[tuple[float, float]]:
    """Where a trial stands; nowhere when it has no figures, another load, or the other verdict."""
    if trial.phase == "alone" or trial.run is None or not math.isfinite(trial.p99_s):
        return []
    return [(trial.p99_s, trial.run.throughput)] if trial.fits(outcome.goal) is fits else []


def _mark_ends(axes: Axes, outcome: Outcome) -> None:
    """The default and the winner, as their final rounds put them."""
    for contender, colour, label in (
        (outcome.default, BLUES[1], "as they are"),
        (outcome.winner, _GOOD, "best"),
    ):
        if contender is not None and contender.runs:
            axes.scatter(
                contender.p99_s,
                contender.throughput,
                s=110,
                facecolors="none",
                edgecolors=colour,
                linewidths=2.2,
                label=label,
            )


def _value(trial: Trial, outcome: Outcome) -> float:
    """What counts of a trial; NaN where it does not fit."""
    if trial.run is None or not trial.fits(outcome.goal):
        return math.nan
    return trial.run.throughput if outcome.goal.load.users else trial.p99_s * 1e3
