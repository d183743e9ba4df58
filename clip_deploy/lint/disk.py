"""What lies on disk, asked carefully: a repository may hold anything, and nothing here raises or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# A text larger than this is none that anybody wrote; a tokenizer in a config takes 1 MB.
MAX_TEXT_BYTES = 4 * 2**20


def folders(path: Path) -> list[Path]:
    """Folders inside a folder, links to folders included, in order of their names."""
    try:
        return sorted(each for each in path.iterdir() if is_folder(each))
    except OSError:
        return []


def is_folder(path: Path) -> bool:
    """Whether it is one; a link that cannot be followed is none, and does not hide the others."""
    try:
        return path.is_dir()
    except OSError:
        return False


def exists(path: Path) -> bool:
    """Whether something is there; what may not be looked at counts."""
    try:
        return path.exists() or path.is_symlink()
    except OSError:
        return True


def inside(folder: Path, name: str) -> Path:
    """A file that a config names, where Triton looks for it: a leading slash does not lead out of the folder."""
    return folder / name.replace("\0", "�").lstrip("/")


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
