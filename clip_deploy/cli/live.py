"""Loads while they are measured: a line each that keeps itself up to date; plain lines where nobody looks on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clip_deploy.cli.output import say
from clip_deploy.report.loads import progress_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from clip_deploy.bench.benchmark import Step
    from clip_deploy.bench.figures import Load, Run
    from clip_deploy.bench.reports import Settings


class LiveLoads:
    """Shows how a benchmark goes, on stderr; a context manager, and the ``show`` function of ``benchmark``.

    Args:
        names: of the subjects; a single one is not repeated on every line.
        loads: what will be measured.
        settings: how.
    """

    def __init__(self, names: Sequence[str], loads: Sequence[Load], settings: Settings) -> None:
        self._names, self._repeats = names, settings.repeats
        self._lines = {(place, load): "" for load in loads for place in range(len(names))}
        self._done = dict.fromkeys(self._lines, 0)
        each_s = settings.duration_s + settings.warmup_s
        minutes, seconds = divmod(round(each_s * settings.repeats * len(self._lines)), 60)
        self._first = (
            f"{len(self._lines)} loads, {settings.repeats} × {each_s:g} s each: "
            f"{minutes} min {seconds} s at least"
        )
        console = Console(stderr=True)
        self._live = (
            Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveLoads:
        say(self._first)
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, step: Step, news: str | Run) -> None:
        key = step.subject, step.load
        if isinstance(news, str):
            self._lines[key] = news
            return
        self._done[key] += 1
        self._lines[key] = progress_line(news)
        if self._live is None:
            count = f"{step.repeat + 1} of {self._repeats}"
            say(f"{self._name(step.subject)}{step.load}, {count}: {self._lines[key]}")

    def _name(self, place: int) -> str:
        return f"{'AB'[place]}, " if len(self._names) > 1 else ""

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for (place, load), line in self._lines.items():
            done = self._done[place, load]
            style = "dim" if not line else "green" if done == self._repeats else ""
            marks = "●" * done + "○" * (self._repeats - done)
            grid.add_row(
                Text(f"{self._name(place)}{load}", style), Text(marks, style), Text(line, style)
            )
        return grid
