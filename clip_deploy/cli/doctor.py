"""``clip-deploy doctor``: what this machine has, and the command for what it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.cli.options import JsonFile
from clip_deploy.cli.output import show, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.doctor import Finding


def doctor(json_file: JsonFile = None) -> None:
    """Say what this machine has and lacks.

    Everything that clip-deploy can use: found, or missing with the command that gets it.
    """
    from clip_deploy.doctor import examine

    findings = examine()
    show(_table(findings), beside=json_file)
    write_json([finding.to_json() for finding in findings], json_file)


def _table(findings: list[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    for finding in findings:
        mark = Text("✓", "green") if finding.found else Text("–", "yellow")
        detail = Text(finding.detail, overflow="fold")
        if not finding.found:
            detail.append(f" (for {finding.purpose})", "dim")
            detail.append(f"\n→ {finding.remedy}", "yellow")
        grid.add_row(mark, Text(finding.name, "bold"), detail)
    return grid
