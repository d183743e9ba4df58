"""A report held to a stricter bar than the tolerance of its precision."""

from __future__ import annotations

from dataclasses import replace

from clip_deploy.report import Check, Report, Status

_FIGURE = "min_cosine"


def held_to(report: Report, min_cosine: float | None) -> Report:
    """The report with every comparison with torch failed whose cosine is below the bar."""
    if min_cosine is None:
        return report
    return replace(report, checks=tuple(_held(check, min_cosine) for check in report.checks))


def _held(check: Check, least: float) -> Check:
    found = check.data.get(_FIGURE)
    if check.status is not Status.PASSED or found is None or found >= least:
        return check
    return replace(
        check,
        status=Status.FAILED,
        figure=f"cosine {found:.6f}, and {least:g} at least is asked; {check.figure}",
        remedy="use another precision or engine, or ask for less with --min-cosine",
    )
