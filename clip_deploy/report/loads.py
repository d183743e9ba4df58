"""A benchmark as a table that a person enjoys reading, and the words that the page shares with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from clip_deploy.bench.figures import Run
    from clip_deploy.bench.reports import BenchReport, Comparison, LoadResult, Spread

UNKNOWN = "–"
_HOW_TO_READ = (
    "B ÷ A, repeat by repeat (least–greatest): answers/s above 1 and latencies below 1 speak for B."
)
# From here on the load generator may be what is measured.
_BUSY_CLIENT = 0.8


def milliseconds(seconds: float) -> str:
    """``7.3``, ``73``, ``7,300``: three figures that matter, in milliseconds."""
    value = 1000 * seconds
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def rate(value: float) -> str:
    """Answers per second, with three figures that matter."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def spread(figure: Spread | None, write: Callable[[float], str]) -> str:
    """The median, and least to greatest of the repeats where they differ: ``41.2 (40.8–41.9)``."""
    if figure is None:
        return UNKNOWN
    middle, least, greatest = map(write, (figure.median, figure.least, figure.greatest))
    return middle if least == greatest else f"{middle} ({least}–{greatest})"


def headline(report: BenchReport) -> str:
    """The one sentence that says how fast it is."""
    best, things = report.best, f"{report.subject['tower']}s"
    p50, p99 = best.latency("p50_s"), best.latency("p99_s")
    if p50 is None or p99 is None:
        return "There were no answers."
    most = f"{rate(best.throughput.median)} {things} per second at {best.load}"
    half, nearly_all = milliseconds(p50.median), milliseconds(p99.median)
    sooner = f"half of them within {half} ms, 99\N{NO-BREAK SPACE}% within {nearly_all} ms"
    prefix = "Every load was beyond this server; at most " if report.overloaded else ""
    return f"{prefix}{most}: {sooner}."


def verdict(found: Comparison) -> str:
    """The one sentence that says which of two is faster, at the load that A carries best."""
    load = found.a.best.load
    ratios = next(each for each in found.ratios if each.load == load)
    if ratios.throughput is None:
        return f"There is no comparison at {load}: one of the two had no answers."
    figure = f"at {load}: B ÷ A is {spread(ratios.throughput, ratio)}"
    if len(found.a.best.repeats) == 1:
        return f"One measurement of each tells no difference from noise (--repeats 3), {figure}."
    if ratios.throughput.least <= 1 <= ratios.throughput.greatest:
        return f"No difference in throughput that the repeats agree on, {figure}."
    return f"B is {'faster' if ratios.throughput.median > 1 else 'slower'} than A, {figure}."


def remarks(result: LoadResult) -> list[str]:
    """What must be known to read a row rightly; empty for a load that went well."""
    found = []
    if wrong := result.total("wrong"):
        found.append(f"{wrong:,} of {result.total('answered'):,} answers are wrong")
    if result.overloaded:
        queue = max(run.backlog[-1] for run in result.repeats if run.backlog)
        found.append(f"overload: arrivals outran the answers, up to {queue:,} requests waited")
    if result.held_back:
        found.append("not all of them were sent at once: the others waited at the client")
    found += [f"{count:,} × {message}" for message, count in result.errors.items()]
    missing = result.total("sent") - result.total("answered") - sum(result.errors.values())
    if missing:
        found.append(
            f"{missing:,} of {result.total('sent'):,} requests were given up; they count with their age"
        )
    if max(run.client_cores for run in result.repeats) > _BUSY_CLIENT:
        found.append("the load generator was busy itself: the server may be faster")
    return found


def table(report: BenchReport) -> RenderableType:
    """The whole report: facts, the headline, a row per load, remarks."""
    return Group(
        _facts(report), Text(f"\n{headline(report)}", "bold"), _rows(report), *_remarks(report)
    )


def comparison(found: Comparison, names: Sequence[str]) -> RenderableType:
    """Both reports, and how they compare."""
    parts: list[RenderableType] = []
    for letter, name, report in zip("AB", names, (found.a, found.b)):
        parts += [Text(f"\n{letter}  {name}", "bold cyan"), table(report)]
    return Group(
        *parts, Text(f"\n{verdict(found)}", "bold"), _ratios(found), Text(_HOW_TO_READ, "dim")
    )


def _ratios(found: Comparison) -> Table:
    rows = _head("load", "answers/s", "p50", "p99")
    for each in found.ratios:
        figures = (each.throughput, each.p50, each.p99)
        rows.add_row(str(each.load), *(spread(figure, ratio) for figure in figures))
    return rows


def _facts(report: BenchReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    subject, machine, settings = report.subject, report.machine, report.settings
    served = ("model", "tower", "weights", "precision", "backend")
    grid.add_row(Text("served", "dim"), Text(", ".join(subject[key] for key in served)))
    tuned = ("max batch", "queue delay", "instances", "parameters")
    grid.add_row(Text("batching", "dim"), Text(", ".join(f"{k} {subject[k]}" for k in tuned)))
    grid.add_row(
        Text("machine", "dim"),
        Text(f"{machine['CPU']}, {machine['cores']} cores, {machine['memory']}"),
    )
    grid.add_row(
        Text("measured", "dim"),
        Text(
            f"{settings.repeats} × {settings.duration_s:g} s after {settings.warmup_s:g} s of warm-up, "
            f"{settings.inputs} {settings.inputs_are}"
        ),
    )
    if (memory := most_memory(report)) is not None:
        grid.add_row(Text("memory", "dim"), Text(f"{memory:,.0f} MiB of the server, at most"))
    return grid


def most_memory(report: BenchReport) -> float | None:
    """MiB; None for a server that is not ours."""
    found = [run.server_memory_mb for result in report.loads for run in result.repeats]
    return max((each for each in found if each is not None), default=None)


def _head(*columns: str) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", padding=0)
    for i, column in enumerate(columns):
        rows.add_column(column, justify="right" if i else "left", no_wrap=i != 1)
    return rows


def _rows(report: BenchReport) -> Table:
    rows = _head(
        *("load", "answers/s", "p50 ms", "p90", "p99", "p99.9"),
        *("queue", "model", "batch", "cores"),
    )
    for result in report.loads:
        style = "red" if result.total("wrong") else "yellow" if remarks(result) else ""
        rows.add_row(*(Text(cell) for cell in cells(result)), style=style)
    return rows


def cells(result: LoadResult) -> list[str]:
    """The figures of one load, in the order of the table's columns."""
    latencies = [result.latency(name) for name in ("p50_s", "p90_s", "p99_s", "p999_s")]
    cores = result.spread("server_cores")
    return [
        str(result.load),
        spread(result.throughput, rate),
        *(milliseconds(each.median) if each else UNKNOWN for each in latencies),
        _median(result, "queue_s"),
        _median(result, "compute_s"),
        f"{result.mean_batch:.1f}",
        f"{cores.median:.2f}" if cores else UNKNOWN,
    ]


def _median(result: LoadResult, name: str) -> str:
    found = result.spread(name)
    return milliseconds(found.median) if found else UNKNOWN


def progress_line(run: Run) -> str:
    """One finished measurement: ``142.7/s, p50 7.0 ms, p99 7.8 ms``."""
    if run.latency is None:
        return "no answers"
    latency = run.latency
    sooner = f"p50 {milliseconds(latency.p50_s)} ms, p99 {milliseconds(latency.p99_s)} ms"
    marks = [f"{run.wrong} wrong"] * bool(run.wrong) + ["overload"] * run.overloaded
    return ", ".join([f"{rate(run.throughput)}/s", sooner, *marks])


def _remarks(report: BenchReport) -> list[Text]:
    return [
        Text(f"! {result.load}: {remark}", "red" if result.total("wrong") else "yellow")
        for result in report.loads
        for remark in remarks(result)
    ]
