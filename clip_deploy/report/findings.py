"""What the linter found: for a terminal, for code scanning (SARIF), for GitHub's annotations, as checks for JUnit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rich.console import Group
from rich.table import Table
from rich.text import Text

from clip_deploy import __version__
from clip_deploy.lint import RULES, Severity
from clip_deploy.lint.explain import explanation
from clip_deploy.report import Check, Report, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from clip_deploy.lint import Finding, LintReport, Rule

# A severity's mark and style at a terminal, and its names in SARIF and in GitHub's annotations.
_LOOKS = {
    Severity.ERROR: ("✗", "bold red", "error", "error"),
    Severity.WARNING: ("!", "yellow", "warning", "warning"),
    Severity.NOTE: ("·", "cyan", "note", "notice"),
}
_SARIF_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_HOME = "https://pypi.org/project/clip-deploy/"


def findings(report: LintReport) -> RenderableType:
    """Findings by file, each with its place and the corrected line; what was found and not looked at below."""
    parts: list[RenderableType] = []
    rows = Table.grid()
    path = None
    for finding in report.findings:
        if finding.path != path:
            path = finding.path
            rows = _rows()
            parts += [Text(_relative(path), "bold", no_wrap=True, overflow="ignore"), rows]
        _add_finding(rows, finding)
    return Group(*parts, *([Text()] if parts else []), verdict(report), *_footnotes(report))


def _rows() -> Table:
    rows = Table.grid(padding=(0, 1))
    rows.add_column(justify="right", min_width=7, style="dim")
    rows.add_column()
    rows.add_column()
    rows.add_column(overflow="fold")
    return rows


def _add_finding(rows: Table, finding: Finding) -> None:
    mark, style, _, _ = _LOOKS[finding.severity]
    place = f"{finding.line}:{finding.column}" if finding.line else ""
    rows.add_row(place, Text(mark, style), Text(finding.code, style), Text(finding.message))
    if finding.fix is not None:
        rows.add_row("", "", "", Text(f"- {(finding.source or '').strip()}", "red"))
        if finding.fix:
            rows.add_row("", "", "", Text(f"+ {finding.fix.strip()}", "green"))
    elif finding.remedy:
        rows.add_row("", "", "", Text(f"→ {finding.remedy}", "green"))


def verdict(report: LintReport) -> Text:
    """One line: how many of what."""
    errors, warnings = report.count(Severity.ERROR), report.count(Severity.WARNING)
    style = "bold red" if errors else "bold yellow" if warnings else "bold green"
    return Text(f"lint: {report.summary()}", style)


def _footnotes(report: LintReport) -> Iterator[Text]:
    if report.findings:
        worst = min(report.findings, key=lambda finding: list(Severity).index(finding.severity))
        yield Text(
            f"clip-deploy lint --explain {worst.code} says why, and what right looks like", "dim"
        )
    for sentence in report.unseen:
        yield Text(f"not looked at: {sentence}", "dim")


def workflow_commands(report: LintReport) -> str:
    """GitHub's workflow commands, which put the findings beside the lines of a pull request."""
    return "".join(f"{_annotation(finding)}\n" for finding in report.findings)


def _annotation(finding: Finding) -> str:
    properties = {"file": _relative(finding.path), "line": finding.line, "col": finding.column}
    properties["title"] = f"{finding.code} {finding.name}"
    given = ",".join(
        f"{k}={_escaped(str(v), ':,')}" for k, v in properties.items() if v is not None
    )
    return f"::{_LOOKS[finding.severity][3]} {given}::{_escaped(_with_fix(finding))}"


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def sarif(report: LintReport) -> dict[str, Any]:
    """A SARIF 2.1.0 log; paths are relative to where the command ran, as code scanning wants them."""
    used = sorted({finding.code for finding in report.findings})
    driver = {
        "name": "clip-deploy lint",
        "version": __version__,
        "informationUri": _HOME,
        "rules": [_sarif_rule(RULES[code]) for code in used],
    }
    results = [_sarif_result(finding, used.index(finding.code)) for finding in report.findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return empty_sarif() | {"runs": [run]}


def empty_sarif() -> dict[str, Any]:
    """A log without a run."""
    return {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": []}


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": rule.why},
        "help": {"text": rule.why, "markdown": explanation(rule)},
        "defaultConfiguration": {"level": _LOOKS[rule.severity][2]},
    }


def _sarif_result(finding: Finding, index: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": quote(_relative(finding.path))}}
    if finding.line:
        place["region"] = {"startLine": finding.line, "startColumn": finding.column or 1}
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LOOKS[finding.severity][2],
        "message": {"text": _with_fix(finding)},
        "locations": [{"physicalLocation": place}],
    }


def as_checks(report: LintReport, *, strict: bool = False) -> Report:
    """One check per finding, failed where it fails the run, and one for each model without any."""
    failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    checks = [
        Check(
            name=f"{finding.code} {finding.name}",
            status=Status.FAILED if finding.severity in failing else Status.PASSED,
            figure=f"{finding.severity.value}: {_place(finding)}: {finding.message}",
            model=finding.model,
            remedy=finding.fix or finding.remedy or "",
        )
        for finding in report.findings
    ]
    named = {finding.model for finding in report.findings}
    clean = [
        Check("nothing to complain about", Status.PASSED, "", name)
        for name in report.models
        if name not in named
    ]
    facts = {"not looked at": "; ".join(report.unseen)} if report.unseen else {}
    return Report("lint", facts, tuple(checks + clean))


def as_check(report: LintReport) -> Check:
    """One row for a report of something else, of a repository without errors."""
    data = report.to_json()["summary"]
    return Check("the linter finds no error", Status.PASSED, report.summary(), data=data)


def _place(finding: Finding) -> str:
    line = f":{finding.line}:{finding.column}" if finding.line else ""
    return f"{_relative(finding.path)}{line}"


def _with_fix(finding: Finding) -> str:
    fix = finding.remedy if finding.fix is None else finding.fix.strip() or "take the line out"
    return f"{finding.message}\nFix: {fix}" if fix else finding.message


def _relative(path: str) -> str:
    """The path as seen from here, where it lies below."""
    try:
        return Path(path).resolve().relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError, RuntimeError):
        return Path(path).as_posix()
