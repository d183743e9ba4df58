"""The generated parts of docs/operations.md: each alert and each threshold, from their tables."""

from __future__ import annotations

import re

from clip_deploy.operations import THRESHOLDS
from clip_deploy.operations.alerts import ALERTS, alerts_of
from clip_deploy.operations.dashboard import ROWS


def filled(text: str) -> str:
    """The page with what stands between ``<!-- name -->`` and ``<!-- end -->`` written anew."""
    for name, part in {
        "alerts": _alerts(),
        "thresholds": _thresholds(),
        "panels": _panels(),
    }.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"docs/operations.md has no place for {name}"
        text = pattern.sub(lambda found, part=part: f"{found[1]}\n{part}\n\n{found[2]}", text)
    return text


def _alerts() -> str:
    done = dict(alerts_of({"triton", "gateway", "gpu"}, {}))
    parts = []
    for alert in ALERTS:
        wait = f"after {alert.lasting}" if alert.lasting != "0m" else "at once"
        parts.append(
            f"### {alert.name}\n\n*{alert.severity.capitalize()}, {wait}.* {alert.meaning}\n\n"
            f"**Do:** {alert.remedy}\n\n```promql\n{done[alert]}\n```"
        )
    return "\n\n".join(parts)


def _thresholds() -> str:
    rows = []
    for name, row in THRESHOLDS.items():
        users = ", ".join(alert.name for alert in ALERTS if f"${name}" in alert.expression)
        rows.append(f"| `{name}` | {row.default:g} | {row.meaning} | {users} |")
    return "\n".join(["| name | default | | compared by |", "|---|---|---|---|", *rows])


def _panels() -> str:
    rows = [
        f"| {row.title} | {panel.title} | {panel.description} |"
        for row in ROWS
        for panel in row.panels
    ]
    return "\n".join(["| row | panel | shows |", "|---|---|---|", *rows])
