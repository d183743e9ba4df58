"""A benchmark as one page that reads without a server, a network or a font of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.report import load_charts as charts
from clip_deploy.report.html import filled
from clip_deploy.report.loads import (
    UNKNOWN,
    headline,
    milliseconds,
    most_memory,
    rate,
    ratio,
    remarks,
    spread,
    verdict,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clip_deploy.bench.figures import Run
    from clip_deploy.bench.reports import BenchReport, Comparison, LoadResult

_PERCENTILES = ("p50_s", "p90_s", "p99_s", "p999_s")


def page(report: BenchReport) -> str:
    """The page of one served model."""
    title = f"{report.subject['model']} under load"
    return filled(
        "bench.html.j2", title=title, verdict="", ratios=[], sides=[_side("", report)], charts=[]
    )


def comparison_page(found: Comparison, names: Sequence[str]) -> str:
    """The page of two served models, measured in turn."""
    return filled(
        "bench.html.j2",
        title=f"{found.a.subject['model']} under load, compared",
        verdict=verdict(found),
        ratios=[
            (str(each.load), *(spread(f, ratio) for f in (each.throughput, each.p50, each.p99)))
            for each in found.ratios
        ],
        charts=[charts.both_against_throughput((found.a, found.b))],
        sides=[
            _side(f"{letter}: {name}", report)
            for letter, name, report in zip("AB", names, (found.a, found.b))
        ],
    )


def _side(name: str, report: BenchReport) -> dict[str, Any]:
    """Everything that the template says of one model."""
    settings, most_mb = report.settings, most_memory(report)
    memory = f"{most_mb:,.0f} MiB at most" if most_mb is not None else ""
    return {
        "name": name,
        "headline": headline(report),
        "created": report.created.replace("T", " ").replace("+00:00", " UTC"),
        "wrong": report.wrong,
        "answers": f"{sum(result.total('answered') for result in report.loads):,}",
        "loads": [_load(result) for result in report.loads],
        "runs": [
            _run(i, run) for result in report.loads for i, run in enumerate(result.repeats, 1)
        ],
        "subject": report.subject,
        "machine": {**report.machine, **({"server memory": memory} if memory else {})},
        "measured": f"{settings.repeats} × {settings.duration_s:g} s after {settings.warmup_s:g} s of warm-up, "
        f"with {settings.inputs} {settings.inputs_are}",
        "latency_chart": charts.latency_against_throughput(report),
        "time_chart": charts.where_time_goes(report),
        "batches_chart": charts.batches(report),
        "backlog_chart": charts.backlogs(report),
        "overloads": any(result.overloaded for result in report.loads),
    }


def _load(result: LoadResult) -> dict[str, Any]:
    return {
        "name": str(result.load),
        "throughput": spread(result.throughput, rate),
        "latencies": [spread(result.latency(name), milliseconds) for name in _PERCENTILES],
        "batch": f"{result.mean_batch:.1f}",
        "remarks": remarks(result),
        "state": "wrong" if result.total("wrong") else "overload" if result.overloaded else "",
    }


def _run(number: int, run: Run) -> list[str]:
    """One row of the table of everything."""
    latencies = (
        [milliseconds(getattr(run.latency, name)) for name in (*_PERCENTILES, "greatest_s")]
        if run.latency
        else [UNKNOWN] * 5
    )
    return [
        str(run.load),
        str(number),
        f"{run.sent:,}",
        f"{run.answered:,}",
        f"{run.wrong:,}",
        f"{sum(run.errors.values()):,}",
        rate(run.throughput),
        *latencies,
        milliseconds(run.queue_s),
        milliseconds(run.compute_s),
        f"{run.server_cores:.2f}" if run.server_cores is not None else UNKNOWN,
        f"{run.server_memory_mb:,.0f}" if run.server_memory_mb is not None else UNKNOWN,
        f"{run.client_cores:.2f}",
    ]
