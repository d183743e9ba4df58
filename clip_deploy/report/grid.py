"""The table of results that commands and reports share."""

from __future__ import annotations

from rich import box
from rich.table import Table


def grid(*columns: str) -> Table:
    """A table of results, with a head and no frame."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        rows.add_column(column, overflow="fold")
    return rows
