"""Reports of checks as Markdown, for the page of a CI job."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from clip_deploy.report import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clip_deploy.report import Check, Report

_MARKS = {Status.PASSED: "✅", Status.FAILED: "❌", Status.SKIPPED: "➖"}
# What a cell or a line must not be taken for: markup, a mention, a link, HTML.
_SPECIAL = "\\`*_{}[]<>#|~@$"
_MOST_CHARACTERS = 400


def markdown(reports: Sequence[Report], *, folded: Sequence[str] = ()) -> str:
    """The text: a table per report, with remedies of what failed below; reports named in ``folded`` start closed."""
    return "\n".join(_section(report, is_folded=report.title in folded) for report in reports)


def _section(report: Report, *, is_folded: bool) -> str:
    mark = _MARKS[
        Status.PASSED if report.ok else Status.FAILED if report.failed else Status.SKIPPED
    ]
    body = "\n".join([*_facts(report), *_rows(report), *_remedies(report)])
    if is_folded:
        title = escape(f"{report.title}: {report.summary()}")
        return f"<details><summary>{mark} {title}</summary>\n\n{body}\n</details>\n"
    return f"## {mark} {escaped(report.title)}: {escaped(report.summary())}\n\n{body}"


def _facts(report: Report) -> list[str]:
    lines = [f"- {escaped(key)}: {escaped(value)}" for key, value in report.facts.items()]
    return [*lines, ""] if lines else []


def _rows(report: Report) -> list[str]:
    return [
        "| | | seconds | |",
        "|---|---|---:|---|",
        *(_row(check) for check in report.checks),
        "",
    ]


def _row(check: Check) -> str:
    name = f"{check.model}: {check.name}" if check.model else check.name
    seconds = f"{check.seconds:.1f}" if check.seconds >= 0.05 else ""
    figure = f"skipped: {check.figure}" if check.status is Status.SKIPPED else check.figure
    return f"| {_MARKS[check.status]} | {escaped(name)} | {seconds} | {escaped(figure)} |"


def _remedies(report: Report) -> list[str]:
    lines = [f"- **{escaped(c.name)}**: {escaped(c.remedy)}" for c in report.failed if c.remedy]
    return [*lines, ""] if lines else []


def escaped(text: str) -> str:
    """A text on one line that Markdown shows as it is; names of files and models may hold anything."""
    line = " ".join(text.split())
    line = line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"
    return "".join(f"\\{each}" if each in _SPECIAL else each for each in line)
