"""Files written whole or not at all, and their digests.

A folder is built beside its place under a hidden name and renamed into it, so that an interrupted or failed run leaves
what was there before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clip_deploy.errors import ClipDeployError

_STORAGE_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO"),
        *("ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY", "ENAMETOOLONG"),
    )
}


def digest(paths: Iterable[Path]) -> str:
    """SHA-256, in hex, of the files' bytes one after the other; for one file, what ``sha256sum`` prints."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def digest_or_none(path: Path) -> str | None:
    """The digest of a file, or None where there is none."""
    return digest([path]) if path.is_file() else None


def digest_json(value: object) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write JSON for people: indented, UTF-8, renamed into place."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``; rename it into place when the block succeeds."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        temporary.chmod(0o644)
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def building(directory: Path, failure: type[ClipDeployError]) -> Iterator[Path]:
    """Yield a hidden folder beside ``directory``; put it in its place when the block succeeds.

    What stood there before stays until the new folder is complete. Leftovers of killed runs are removed first.

    Raises:
        failure: the disk is full, or the place cannot be written to.
    """
    with storage(directory, failure):
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        temporary = Path(
            tempfile.mkdtemp(
                prefix=f".{directory.name}.{os.getpid()}.", suffix=".tmp", dir=directory.parent
            )
        )
        temporary.chmod(0o755)
        try:
            yield temporary
            _swap(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def storage(path: Path, failure: type[ClipDeployError]) -> Iterator[None]:
    """Translate failures of the file system into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRNOS:
            raise
        free = shutil.disk_usage(_nearest(path)).free / 1e9
        raise failure(
            f"cannot write {path}: {error.strerror or error}",
            remedy=f"check the place and its permissions, and make room ({free:.1f} GB are free), then run it again",
        ) from error


def _nearest(path: Path) -> Path:
    return next(parent for parent in (path, *path.resolve().parents) if parent.exists())


def _swap(temporary: Path, directory: Path) -> None:
    if not directory.exists():
        temporary.rename(directory)
        return
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old.tmp")
    directory.rename(old)
    try:
        temporary.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Clean up after killed runs; one that died between the two renames of ``_swap`` has its folder put back."""
    for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):
        pid = leftover.name.removeprefix(f".{directory.name}.").split(".")[0]
        if not pid.isdecimal() or _alive(int(pid)):
            continue
        if leftover.name.endswith(".old.tmp") and not directory.exists():
            leftover.rename(directory)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
