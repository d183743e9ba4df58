"""A report as a table that a person enjoys reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from clip_deploy.report import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.report import Report

# The mark of a status, its style, and the style of the figure beside it.
LOOKS = {
    Status.PASSED: ("✓", "green", ""),
    Status.FAILED: ("✗", "bold red", "red"),
    Status.SKIPPED: ("–", "yellow", "yellow"),
}


def table(report: Report) -> RenderableType:
    """The whole report: facts above, one row per check grouped by model, remedies of what failed below."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column()
    rows.add_column(max_width=52)
    rows.add_column(overflow="fold")
    group = None
    for check in report.checks:
        if check.model != group:
            group = check.model
            rows.add_row("", Text(f"\n{group or 'server'}", style="bold"), "")
        mark, mark_style, style = LOOKS[check.status]
        figure = f"skipped: {check.figure}" if check.status is Status.SKIPPED else check.figure
        rows.add_row(Text(mark, mark_style), Text(check.name), Text(figure, style))
    return Group(_facts(report), rows, Text(), _verdict(report), *_remedies(report))


def _facts(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for key, value in report.facts.items():
        grid.add_row(Text(key, "dim"), Text(value))
    return grid


def _verdict(report: Report) -> Text:
    return Text(
        f"{report.title}: {report.summary()}", style="bold green" if report.ok else "bold red"
    )


def _remedies(report: Report) -> list[Text]:
    return [Text(f"✗ {check.name} → {check.remedy}", "red") for check in report.failed]
