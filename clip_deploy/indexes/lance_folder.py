"""The folder of a LanceDB index: who may write, what model it is of, and how its failures read.

PLACE/index.json    the model, written once, before the folder has its name
PLACE/newest.json   the last version that was written: Lance itself would open an older one without a word
PLACE/items.lance/  the table
PLACE/.lock         held by the one who writes
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError, IndexDamaged
from clip_deploy.files import storage, write_json
from clip_deploy.indexes.port import IndexIdentity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

TABLE = "items"
_SCHEMA = 1
_LOCK_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.02
# Failures of the machine, which say nothing about the files.
_TRANSIENT = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT")
}


@dataclass(frozen=True, slots=True)
class Newest:
    """The last write: of which model, its version of the table, and how many rows the vector index was trained on.

    The model is here again because this file is read with every search: a folder may be replaced under a gateway.
    """

    weights_sha256: str
    version: int
    trained_rows: int = 0


class LanceFolder:
    """A folder that is, or becomes, an index."""

    def __init__(self, place: str) -> None:
        self.path = Path(place).absolute()

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Whether an index is here, in whatever state.

        Raises:
            ConfigError: something else is.
        """
        if (self.path / "index.json").is_file():
            return True
        if (self.path / f"{TABLE}.lance").exists() or (self.path / "newest.json").exists():
            raise self.damaged("index.json is not there")
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"{self} is no index, and not empty", remedy="name a new folder for the index"
            )
        return False

    def identity(self) -> IndexIdentity:
        """The model that the index was made with."""
        data = self._read("index.json")
        if data.get("schema") != _SCHEMA:
            raise ConfigError(
                f"the index {self} is of schema {data.get('schema')}, which this version cannot read",
                remedy="upgrade clip-deploy, or make the index again",
            )
        try:
            identity = IndexIdentity(**data["identity"])
            whole = isinstance(identity.embed_dim, int) and identity.embed_dim > 0
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise self.damaged("index.json does not say of which model")
        return identity

    def newest(self) -> Newest:
        """What was written last."""
        try:
            return Newest(**self._read("newest.json"))
        except TypeError as error:
            raise self.damaged("newest.json is not what was written there") from error

    def record(self, newest: Newest) -> None:
        """Remember what was written last; only while the lock is held."""
        with storage(self.path, ConfigError):
            write_json(self.path / "newest.json", asdict(newest))

    def damaged(self, what: object) -> IndexDamaged:
        """The failure: ``what`` cannot be read."""
        return IndexDamaged(
            f"the index {self} is damaged: {_first_line(what)}",
            remedy="put a backup in its place, or delete the folder and run clip-deploy index add again",
        )

    @contextlib.contextmanager
    def making(self, identity: IndexIdentity) -> Iterator[Path]:
        """Yield a hidden folder beside the place, and give it its name when the block succeeds.

        Of two that make the same index at once, the second finds the first's, and leaves its own.
        """
        with storage(self.path, ConfigError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(
                tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
            )
        try:
            yield temporary
            with storage(self.path, ConfigError):
                temporary.chmod(0o755)
                about = {"schema": _SCHEMA, "engine": "lancedb", "identity": asdict(identity)}
                write_json(temporary / "index.json", about)
                try:
                    temporary.rename(self.path)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY or not self.exists():
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Hold the lock: writers of all processes wait for one another. It ends with its process, however that ends."""
        with storage(self.path, ConfigError):
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            waited_s = 0.0
            while not _taken(handle):
                if waited_s > _LOCK_TIMEOUT_S:
                    raise ConfigError(
                        f"another process has been writing the index {self} for {_LOCK_TIMEOUT_S:g} s",
                        remedy="wait for it, or end it",
                    )
                await asyncio.sleep(_LOCK_POLL_S)
                waited_s += _LOCK_POLL_S
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """LanceDB's failures in words."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise self._failure(error) from error
        except (
            BaseException
        ) as error:  # Rust's panics have no class to import, and may be no Exceptions
            if "Panic" not in type(error).__name__:
                raise
            raise self._failure(error) from error

    def bytes(self) -> int:
        """What the folder takes on disk."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a writer tidied up
                    total += (Path(folder) / name).stat().st_size
        return total

    def _failure(self, error: BaseException) -> IndexDamaged | ConfigError:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else getattr(error, "errno", None)
        if code is not None and code in _TRANSIENT:
            return ConfigError(
                f"the index {self} cannot be used now: {os.strerror(code)}",
                remedy="check the folder's permissions, the room on its disk and the limits of the process",
            )
        return self.damaged(error)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(f"{name}: {error}") from error
        if not isinstance(data, dict):
            raise self.damaged(f"{name} is not what was written there")
        return data


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _first_line(what: object) -> str:
    line = next(iter(str(what).strip().splitlines()), "") or type(what).__name__
    return line if len(line) <= 200 else f"{line[:200]}…"
