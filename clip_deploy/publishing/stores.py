"""Where publications lie: a folder or object storage, with the few operations that publishing needs of either.

Keys are paths below the destination, with slashes. Every write appears whole or not at all: in a folder by a rename, in
object storage because an object is there only when its upload has ended.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from clip_deploy.errors import PublishError
from clip_deploy.files import digest, replacing, storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    Moved = Callable[[int], None]  # told how many more bytes have gone up

_BLOCK_BYTES = 8 * 2**20


class Store(Protocol):
    """A destination. ``place`` is its address as a person writes it."""

    place: str

    def folders(self) -> list[str]:
        """Names of the folders at the top."""

    def files(self, prefix: str = "") -> dict[str, int]:
        """Key → bytes of the files in a folder (at the top, those that lie there directly)."""

    def read(self, key: str, most_bytes: int = ...) -> bytes | None:
        """A small file; None where there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Put a small file in place of what was there."""

    def replace(self, files: Mapping[str, bytes]) -> None:
        """Put several small files in place of what was there: all, or as far as the storage can tell, none."""

    def create(self, key: str, data: bytes) -> bool:
        """Put a small file where there is none; False, and nothing done, where there is one."""

    def put(self, source: Path, key: str, moved: Moved) -> None:
        """Copy a file up."""

    def digest(self, key: str) -> str:
        """SHA-256 of a file's bytes, read back."""

    def copy(self, key: str, to: str) -> None:
        """Copy a file inside the destination."""

    def remove(self, prefix: str) -> None:
        """Remove a file, or a folder with all that is in it."""

    def settle(self, key: str) -> None:
        """Return when a file's bytes, or a folder's names, would outlast a power cut."""

    def require_room(self, size_bytes: int) -> None:
        """Raise PublishError where so much will not fit."""


class Folder:
    """A folder on this machine, or on a disk that is mounted here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)

    def folders(self) -> list[str]:
        with self._translated():
            return sorted(each.name for each in self.path.glob("*") if each.is_dir())

    def files(self, prefix: str = "") -> dict[str, int]:
        root = self.path / prefix
        with self._translated():
            return {
                path.relative_to(self.path).as_posix(): path.stat().st_size
                for path in (root.rglob("*") if prefix else root.glob("*"))
                if path.is_file()
            }

    def read(self, key: str, most_bytes: int = 64 * 2**20) -> bytes | None:
        try:
            with self._translated(), (self.path / key).open("rb") as file:
                return file.read(most_bytes)
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        self.replace({key: data})

    def replace(self, files: Mapping[str, bytes]) -> None:
        """All bytes are on the disk before the first rename, and a rename needs no room."""
        with self._translated(), ExitStack() as renamed:
            for key, data in files.items():
                path = self.path / key
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(renamed.enter_context(replacing(path)), data)

    def create(self, key: str, data: bytes) -> bool:
        path = self.path / key
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
            try:
                _write(temporary, data)
                os.link(temporary, path)  # fails where it is there, also on network file systems
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise
                return _create_without_links(path, data)
            finally:
                temporary.unlink(missing_ok=True)
            return True

    def put(self, source: Path, key: str, moved: Moved) -> None:
        path = self.path / key
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                replacing(path) as temporary,
                source.open("rb") as reader,
                temporary.open(
                    "r+b"
                ) as writer,  # empty; ext4 would flush one that was cut to nothing on close
            ):
                while count := _send(reader.fileno(), writer.fileno()):
                    moved(count)

    def digest(self, key: str) -> str:
        with self._translated():
            return digest([self.path / key])

    def copy(self, key: str, to: str) -> None:
        path = self.path / to
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                os.link(self.path / key, path)
            except OSError:
                shutil.copyfile(self.path / key, path)

    def remove(self, prefix: str) -> None:
        path = self.path / prefix
        with self._translated():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def settle(self, key: str) -> None:
        root = self.path / key
        folders = (*(each for each in root.rglob("*") if each.is_dir()), root.parent)
        with self._translated():
            for path in (root, *folders) if root.is_dir() else (root,):
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def require_room(self, size_bytes: int) -> None:
        nearest = next(each for each in (self.path, *self.path.resolve().parents) if each.exists())
        free = shutil.disk_usage(nearest).free
        if free < size_bytes:
            raise PublishError(
                f"{self.place} has room for {free / 1e9:.1f} GB, and {size_bytes / 1e9:.1f} GB are to go there",
                remedy="make room (clip-deploy published prune DEST --keep 2), or publish elsewhere",
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with storage(self.path, PublishError):
            yield


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _create_without_links(path: Path, data: bytes) -> bool:
    """For file systems without hard links: whoever reads it in the first instant may see it empty."""
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _send(source: int, target: int) -> int:
    """Copy a block from one open file to another inside the kernel, where that can be; its length, 0 at the end."""
    try:
        return os.copy_file_range(source, target, _BLOCK_BYTES)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    block = os.read(source, _BLOCK_BYTES)
    view = memoryview(block)
    while view:
        view = view[os.write(target, view) :]
    return len(block)
