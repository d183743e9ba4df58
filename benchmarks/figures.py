"""What all benchmarks share: a ratio with its bar, the peak memory of a process, and the table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One ratio and its bar; ``parts`` are what it was made of."""

    name: str
    ratio: float
    least: float
    greatest: float
    bar: str
    holds: bool
    parts: dict[str, float]


def figure(
    name: str, ratios: list[float], bar: float, at_most: bool, parts: dict[str, float]
) -> Figure:
    middle = statistics.median(ratios)
    holds = middle <= bar if at_most else middle >= bar
    return Figure(
        name, middle, min(ratios), max(ratios), f"{'≤' if at_most else '≥'} {bar:g}", holds, parts
    )


def peak(code: str) -> float:
    """Peak resident memory of a Python process, in MB; ru_maxrss would count its parent before the exec, too."""
    report = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], check=True, capture_output=True, text=True
    )
    return float(done.stdout.splitlines()[-1]) / 1024


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return f"{name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def report(figures: list[Figure], json_file: str | None) -> int:
    """Print the table, write the JSON; exit code 1 when a bar is missed."""
    table = Table("ratio", "median", "least–greatest", "bar", "", "made of", title=machine())
    for f in figures:
        parts = ", ".join(f"{key} {value:.4g}" for key, value in f.parts.items())
        spread = f"{f.least:.2f}–{f.greatest:.2f}"
        table.add_row(f.name, f"{f.ratio:.2f}", spread, f.bar, "✓" if f.holds else "✗", parts)
    Console().print(table)
    if json_file:
        rows = {"machine": machine(), "figures": [asdict(f) for f in figures]}
        Path(json_file).write_text(json.dumps(rows, indent=2))
    return 0 if all(f.holds for f in figures) else 1
