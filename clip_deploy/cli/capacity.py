"""``clip-deploy capacity``: how many boxes does this load need?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clip_deploy.cli.options import JsonFile, LogFile, Timeout
from clip_deploy.cli.output import Steps, say, show, write_json
from clip_deploy.cli.serving import encoder_at, servable, served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from clip_deploy.bench.box import Box
    from clip_deploy.bench.subject import BenchSubject
    from clip_deploy.capacity.checking import Comparison
    from clip_deploy.capacity.planning import Forecast, Plan
    from clip_deploy.progress import Progress


def capacity(
    repository: Annotated[
        Optional[Path],
        typer.Argument(
            help="A model repository: the embedded server is started on it and measured."
        ),
    ] = None,
    source: Annotated[
        Optional[Path],
        typer.Option(
            "--from",
            metavar="FILE",
            help="Plan from what bench --json or capacity --json wrote, without a server.",
        ),
    ] = None,
    rate: Annotated[
        Optional[float],
        typer.Option(
            "--rate", metavar="R", help="Requests per second to carry, for all boxes together."
        ),
    ] = None,
    p99_ms: Annotated[
        Optional[float],
        typer.Option("--p99-ms", metavar="N", help="What 99 of 100 requests may take."),
    ] = None,
    replicas: Annotated[
        Optional[int],
        typer.Option(help="Say what so many boxes do, whether or not they suffice.", min=1),
    ] = None,
    balancing: Annotated[
        str, typer.Option(metavar="random|turns", help="How requests are spread over the boxes.")
    ] = "random",
    tower: Annotated[
        Optional[str],
        typer.Option(metavar="image|text", help="Which encoder, where the repository has both."),
    ] = None,
    queue_delay: Annotated[
        Optional[int],
        typer.Option("--queue-delay-us", metavar="µs", help="What if: another queue delay.", min=0),
    ] = None,
    max_batch: Annotated[
        Optional[int], typer.Option(help="What if: a smaller largest batch.", min=1)
    ] = None,
    instances: Annotated[
        Optional[int],
        typer.Option(help="What if: so many instances, each as fast as those measured.", min=1),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure the server at 50, 80 and 95 % load, too; exit code 7 where a prediction is off by more than 10 % (throughput) or 20 % (p99).",
        ),
    ] = False,
    duration: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long to measure the curve, and each load of --check.",
            min=5,
        ),
    ] = 60.0,
    timeout: Timeout = 300.0,
    log: LogFile = None,
    json_file: JsonFile = None,
) -> None:
    """Say how many boxes a load needs within a latency.

    Triton's dynamic batcher is simulated on measured times of batches. Without --rate and --p99-ms it measures and
    shows what one box does.
    """
    from clip_deploy.bench.box import read_box
    from clip_deploy.capacity.planning import LEVELS, forecast, plan
    from clip_deploy.errors import CheckFailed

    _require_consistent(repository, source, rate, p99_ms, replicas, balancing, check)
    comparisons: tuple[Comparison, ...] = ()
    with Steps() as steps:
        if source is not None:
            box = read_box(source)
        else:
            with _subject(repository, tower, timeout, log, steps) as subject:
                box, comparisons = _measured(subject, duration, check, steps)
        changed = box.changed(queue_delay_us=queue_delay, max_batch=max_batch, instances=instances)
        steps("simulating")
        found = None
        if rate is not None and p99_ms is not None:
            found = plan(changed, rate, p99_ms / 1e3, replicas=replicas, even=balancing == "turns")
        levels = (
            found.levels
            if found
            else tuple(forecast(changed, s * changed.capacity) for s in LEVELS)
        )
    _show(changed, found, levels, comparisons, beside=json_file)
    write_json(_as_json(changed, found, levels, comparisons), json_file)
    if instances is not None and instances != box.serving.instances:
        say(
            "The instances share this machine's cores: unless each has cores of its own, measure with so many instead."
        )
    if not all(comparison.holds for comparison in comparisons):
        raise CheckFailed(
            "a prediction is further off than 10 % of throughput or 20 % of p99",
            remedy="measure on a machine that does nothing else (column others), and for longer (--duration)",
        )
    if found is not None and not found.holds and replicas is not None:
        say(
            f"{plan(changed, rate or 0, found.p99_s, even=balancing == 'turns').replicas} boxes would carry it."
        )


def _require_consistent(
    repository: Path | None,
    source: Path | None,
    rate: float | None,
    p99_ms: float | None,
    replicas: int | None,
    balancing: str,
    check: bool,
) -> None:
    from clip_deploy.errors import ConfigError

    if (repository is None) is (source is None):
        raise ConfigError(
            "a plan needs a repository to measure, or --from a file with a measured curve",
            remedy="name one of the two",
        )
    if check and repository is None:
        raise ConfigError(
            "--check without a server", remedy="name the repository instead of --from"
        )
    if (rate is None) is not (p99_ms is None) or (rate is None and replicas is not None):
        raise ConfigError(
            "a plan needs both a rate and a latency", remedy="add --rate R --p99-ms N"
        )
    if rate is None and source is not None:
        raise ConfigError("nothing to plan", remedy="add --rate R --p99-ms N")
    if balancing not in ("random", "turns"):
        raise ConfigError(f"balancing {balancing!r} is unknown", remedy="use random or turns")


@contextlib.contextmanager
def _subject(
    path: Path | None, tower: str | None, timeout_s: float, log: Path | None, progress: Progress
) -> Iterator[BenchSubject]:
    """One encoder of a repository, on an embedded server."""
    from clip_deploy.servers import ServerOptions

    repository, _ = servable(path)
    options = ServerOptions(timeout_s=timeout_s, log=log)
    with served("embedded", repository, options, progress) as handle:
        yield encoder_at(handle.grpc, repository, tower, progress, pid=handle.process.pid)


def _measured(
    subject: BenchSubject, duration_s: float, check: bool, progress: Progress
) -> tuple[Box, tuple[Comparison, ...]]:
    """The box that was measured, and how well it predicts where that was asked."""
    from clip_deploy.bench.costs import measure_box
    from clip_deploy.bench.others import in_quiet
    from clip_deploy.capacity.checking import check as compare_with

    def measure() -> Box:
        return measure_box(subject, seconds=duration_s, progress=progress)

    box, _ = in_quiet(measure, subject.pid, progress)
    if not check:
        return box, ()
    return box, compare_with(subject, box, measure, duration_s=duration_s, progress=progress)


def _show(
    box: Box,
    found: Plan | None,
    levels: tuple[Forecast, ...],
    comparisons: tuple[Comparison, ...],
    *,
    beside: Path | None,
) -> None:
    from clip_deploy.capacity.planning import LEVELS

    show(_levels_table(LEVELS, levels), beside=beside)
    if comparisons:
        show(_comparison_table(comparisons), beside=beside)
    show(_facts(box, found), beside=beside)


def _facts(box: Box, found: Plan | None) -> str:
    """The answer in a sentence, or what one box can do."""
    if found is None:
        return f"One box of {box.model} answers at most {box.capacity:.4g} requests/s; add --rate R --p99-ms N for a plan."
    within = f"One box carries {found.greatest_rate:.4g} requests/s within that latency, {box.capacity:.4g} at most."
    more = f" The rate may grow by {found.headroom:.0%}." if found.holds else ""
    return f"{found.sentence()}\n{within}{more}"


def _levels_table(shares: tuple[float, ...], levels: tuple[Forecast, ...]) -> RenderableType:
    from clip_deploy.report.grid import grid

    rows = grid("load", "requests/s", "p50 ms", "p99 ms", "by chance", "p99.9 ms", "batch", "busy")
    for share, each in zip(shares, levels):
        latency = each.latency
        p50, p99, p999 = (_ms(s) for s in (latency.p50_s, latency.p99_s, latency.p999_s))
        chance = f"{_ms(each.p99_least_s)}–{_ms(each.p99_greatest_s)}"
        batch, busy = f"{each.mean_batch:.2g}", f"{each.utilisation:.0%}"
        rows.add_row(f"{share:.0%}", f"{each.load.rate:.4g}", p50, p99, chance, p999, batch, busy)
    return rows


def _comparison_table(comparisons: tuple[Comparison, ...]) -> RenderableType:
    from clip_deploy.capacity.checking import P99_BAR, THROUGHPUT_BAR
    from clip_deploy.report.grid import grid

    rows = grid(
        "load", "", "measured", "predicted", "by chance", "same pace", "error", "", "others"
    )
    for each in comparisons:
        assert each.measured.latency is not None  # check refuses a run without answers
        rows.add_row(
            f"{each.level:.0%}",
            "answers/s",
            f"{each.measured.throughput:.4g}",
            f"{each.predicted_throughput:.4g}",
            "",
            "",
            f"{each.throughput_error:+.1%}",
            "✓" if abs(each.throughput_error) <= THROUGHPUT_BAR else "✗",
            "" if each.others_cores is None else f"{each.others_cores:.2f} cores",
        )
        rows.add_row(
            "",
            "p99 ms",
            _ms(each.measured.latency.p99_s),
            _ms(each.predicted.p99_s),
            "–".join(_ms(seconds) for seconds in each.chance_s),
            "" if each.same_pace_p99_s is None else _ms(each.same_pace_p99_s),
            f"{each.p99_error:+.1%}",
            "✓" if abs(each.p99_error) <= P99_BAR else "✗",
        )
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _as_json(
    box: Box, found: Plan | None, levels: tuple[Forecast, ...], comparisons: tuple[Comparison, ...]
) -> dict[str, Any]:
    from clip_deploy.bench.stored import SCHEMA

    return {
        "schema": SCHEMA,
        "kind": "capacity",
        "curve": box.to_json(),
        "capacity": box.capacity,
        "plan": found.to_json() if found else None,
        "levels": [level.to_json() for level in levels],
        "check": [comparison.to_json() for comparison in comparisons],
    }
