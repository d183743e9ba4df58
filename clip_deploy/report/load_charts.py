"""The charts of a benchmark: latency against throughput, where the time goes, batches, and queues that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.errors import extra
from clip_deploy.report.charts import (
    BLUES,
    GREY,
    INK,
    MUTED,
    SAND,
    WARNING,
    drawn,
    milliseconds_axis,
)
from clip_deploy.report.loads import milliseconds, rate

with extra("bench"):
    from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clip_deploy.bench.reports import BenchReport, LoadResult

# The further out a percentile lies, the darker its line.
_PERCENTILES = {
    "p50_s": ("p50", BLUES[0]),
    "p90_s": ("p90", BLUES[1]),
    "p99_s": ("p99", BLUES[2]),
}
_SIDES = (BLUES[2], WARNING)
_ROW_INCHES = 0.34
_PANELS_IN_A_ROW = 4


def latency_against_throughput(report: BenchReport) -> str:
    """Percentiles over answers per second: closed loops drawn through, open loops dashed, overloads left out."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for name, (label, colour) in _PERCENTILES.items():
            _curves(left, report, name, colour, label)
        _name_points(left, [report])
        _axes(left, report)
        _legend(left, 3)
        _throughputs(right, report)

    return drawn(3.9, "latency against throughput", draw)


def both_against_throughput(reports: Sequence[BenchReport]) -> str:
    """p50 and p99 of two models in one picture."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for side, report, colour in zip("AB", reports, _SIDES):
            _curves(axes, report, "p99_s", colour, f"{side}: p99")
            _curves(axes, report, "p50_s", colour, f"{side}: p50", alpha=0.45)
        _name_points(axes, reports)
        _axes(axes, reports[0])
        _legend(axes, 2)

    return drawn(3.9, "latency of both against throughput", draw)


def _curves(
    axes: Axes, report: BenchReport, name: str, colour: str, label: str, *, alpha: float = 1.0
) -> None:
    """One percentile of the closed loops and of the open ones; the legend names it once."""
    for closed in (True, False):
        if results := _kind(report.loads, closed=closed):
            _curve(axes, results, name, colour, label, closed=closed, alpha=alpha)
            label = ""


def _kind(loads: Sequence[LoadResult], *, closed: bool) -> list[LoadResult]:
    """The closed or the open loops that have answers and are no overload, by throughput."""
    found = [
        result
        for result in loads
        if (result.load.users is not None) is closed
        and not result.overloaded
        and result.latency("p50_s") is not None
    ]
    return sorted(found, key=lambda result: result.throughput.median)


def _curve(
    axes: Axes,
    results: Sequence[LoadResult],
    name: str,
    colour: str,
    label: str,
    *,
    closed: bool,
    alpha: float,
) -> None:
    spreads = [spread for result in results if (spread := result.latency(name)) is not None]
    x = [result.throughput.median for result in results]
    y = [spread.median for spread in spreads]
    style = (
        {"linestyle": "-", "markerfacecolor": colour}
        if closed
        else {"linestyle": (0, (4, 2)), "markerfacecolor": "white"}
    )
    axes.plot(x, y, color=colour, marker="o", label=label or None, alpha=alpha, **style)
    for at, spread in zip(x, spreads):
        axes.plot(
            [at, at], [spread.least, spread.greatest], color=colour, linewidth=1, alpha=0.6 * alpha
        )


def _name_points(axes: Axes, reports: Sequence[BenchReport]) -> None:
    """Each load's name above its p99; once, where two sides gave much the same."""
    results = [
        r for each in reports for closed in (True, False) for r in _kind(each.loads, closed=closed)
    ]
    near = 0.06 * max((result.throughput.median for result in results), default=0)
    points = [
        (p99.greatest, result.throughput.median, str(result.load))
        for result in results
        if (p99 := result.latency("p99_s")) is not None
    ]
    named: list[tuple[str, float]] = []
    for height, at, name in sorted(points, reverse=True):
        if any(name == who and abs(at - where) < near for who, where in named):
            continue
        named.append((name, at))
        axes.annotate(
            name,
            (at, height),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=MUTED,
        )


def _legend(axes: Axes, columns: int) -> None:
    if axes.lines:  # an overload has no curve
        axes.legend(loc="upper left", ncols=columns)


def _axes(axes: Axes, report: BenchReport) -> None:
    axes.set_yscale("log")
    milliseconds_axis(axes.yaxis)
    axes.set_xlim(left=0)
    axes.margins(x=0.12, y=0.22)
    axes.set_title("Latency against throughput")
    axes.set_xlabel(f"{report.subject['tower']}s per second")
    axes.set_ylabel("milliseconds, logarithmic")


def _throughputs(axes: Axes, report: BenchReport) -> None:
    """A bar per load with the range of its repeats."""
    results = list(report.loads)
    spreads = [result.throughput for result in results]
    colours = [WARNING if result.overloaded else BLUES[1] for result in results]
    bars = _bars(axes, results)
    axes.barh(bars, [spread.median for spread in spreads], 0.62, color=colours)
    most = max(spread.greatest for spread in spreads) or 1.0
    for bar, spread in zip(bars, spreads):
        axes.plot([spread.least, spread.greatest], [bar, bar], color=INK, linewidth=1)
        axes.annotate(
            rate(spread.median),
            (spread.greatest, bar),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_xlim(0, most * 1.2)
    axes.set_title(f"{report.subject['tower'].capitalize()}s per second")


def where_time_goes(report: BenchReport) -> str:
    """The mean latency of each load in three parts: the server's queue, the model, the rest of the way."""
    results = [
        result for result in report.loads if result.latency("mean_s") and not result.overloaded
    ]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bars = _bars(axes, results)
        starts = [0.0] * len(results)
        for part, colour in (
            ("queue", SAND),
            ("model", BLUES[1]),
            ("the way there and back", GREY),
        ):
            widths = [_parts(result)[part] for result in results]
            axes.barh(bars, widths, 0.62, left=starts, color=colour, label=part)
            starts = [start + width for start, width in zip(starts, widths)]
        for bar, end in zip(bars, starts):
            axes.annotate(
                f"{milliseconds(end)} ms",
                (end, bar),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        axes.set_xlim(0, max(starts, default=1.0) * 1.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{1000 * value:,.6g}")
        axes.set_xlabel("milliseconds, mean of all requests")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)

    return drawn(1.1 + _ROW_INCHES * len(results), "where the time goes", draw) if results else ""


def _parts(result: LoadResult) -> dict[str, float]:
    """Mean seconds of a request; what neither queue nor model explains is the way: client, network, gRPC, Python."""
    mean, queue, model = (
        result.latency("mean_s"),
        result.spread("queue_s"),
        result.spread("compute_s"),
    )
    known = [figure.median if figure else 0.0 for figure in (mean, queue, model)]
    way_s = max(0.0, known[0] - known[1] - known[2])
    return {"queue": known[1], "model": known[2], "the way there and back": way_s}


def batches(report: BenchReport) -> str:
    """For each load, how its requests were spread over batch sizes."""
    results = [result for result in report.loads if result.histogram]

    def draw(figure: Figure) -> None:
        for panel, result in _panels(figure, results, sharey=True):
            total = sum(size * count for size, count in result.histogram.items())
            shares = [100 * size * count / total for size, count in result.histogram.items()]
            panel.bar(list(result.histogram), shares, 0.8, color=BLUES[1])
            _caption(panel, f"{result.load}  ·  mean {result.mean_batch:.1f}")
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        figure.supxlabel("batch size", fontsize=9, color=MUTED)

    return drawn(_height(results), "share of requests by batch size", draw) if results else ""


def backlogs(report: BenchReport) -> str:
    """Requests without an answer, second by second, of each open loop; overloads in the colour of a warning."""
    results = [result for result in report.loads if any(run.backlog for run in result.repeats)]

    def draw(figure: Figure) -> None:
        for panel, result in _panels(figure, results, sharey=False):
            for run in result.repeats:
                seconds = range(1, len(run.backlog) + 1)
                colour = WARNING if run.overloaded else BLUES[1]
                panel.plot(seconds, run.backlog, color=colour, linewidth=1.4, marker=".")
            panel.set_ylim(0, max(1, *panel.get_ylim()))
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            _caption(panel, f"{result.load}{'  ·  overload' if result.overloaded else ''}")
        figure.supxlabel("seconds", fontsize=9, color=MUTED)

    return drawn(_height(results), "requests waiting for an answer", draw) if results else ""


def _height(results: Sequence[LoadResult]) -> float:
    """Inches of small panels, so many in a row."""
    return 0.5 + 1.6 * -(-len(results) // _PANELS_IN_A_ROW)


def _panels(
    figure: Figure, results: Sequence[LoadResult], *, sharey: bool
) -> Iterator[tuple[Axes, LoadResult]]:
    """A small panel for each result; places that are left over stay empty."""
    rows = -(-len(results) // _PANELS_IN_A_ROW)
    grid = figure.subplots(rows, _PANELS_IN_A_ROW, squeeze=False, sharex=True, sharey=sharey)
    panels = list(grid.flat)
    for panel in panels[len(results) :]:
        panel.set_axis_off()
    return zip(panels, results)


def _caption(panel: Axes, text: str) -> None:
    panel.set_title(text, fontsize=9, fontweight="normal")
    panel.tick_params(labelbottom=True)  # also above a place that is left empty


def _bars(axes: Axes, results: Sequence[LoadResult]) -> list[int]:
    """Places for a bar per load, the first on top, named on the axis."""
    places = list(range(len(results)))
    axes.set_yticks(places, [str(result.load) for result in results], color=INK)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.spines["bottom"].set_visible(False)
    return places
