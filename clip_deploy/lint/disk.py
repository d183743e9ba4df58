"""What lies on disk, asked carefully: a repository may hold anything, and nothing here raises or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# A text larger than this is none that anybody wrote.
MAX_TEXT_BYTES = 64 * 2**20


def folders(path: Path) -> list[Path]:
    """Folders inside a folder, links to folders included, in order of their names."""
    try:
        return sorted(each for each in path.iterdir() if each.is_dir())
    except OSError:
        return []


def names_in(folder: Path) -> list[str]:
    """What lies in a folder, in order; nothing where it is no folder, or may not be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def head(file: Path, limit: int = MAX_TEXT_BYTES) -> bytes | None:
    """The first bytes of a regular file; None where there is none, or it may not be read.

    Pipes and devices are left alone: opening one waits for somebody at the other end.
    """
    try:
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            return opened.read(limit)
    except OSError:
        return None
