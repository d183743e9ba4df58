"""A folder as it was in a git revision."""

from __future__ import annotations

import contextlib
import subprocess
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def folder_of(text: str) -> Iterator[Path]:
    """The folder that ``text`` names: a path, or ``REV:PATH`` in the git repository around the working directory.

    Raises:
        ConfigError: there is neither such a folder nor such a revision of it.
    """
    if Path(text).exists() or ":" not in text:
        yield Path(text)
        return
    revision, _, path = text.partition(":")
    archive = _archive(revision, path)
    with tempfile.TemporaryDirectory(prefix="clip-deploy-") as place:
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(place, filter="data")
        yield Path(place) / path


def _archive(revision: str, path: str) -> bytes:
    """The folder in that revision, as a tar."""
    try:
        top = Path(_git("rev-parse", "--show-toplevel").decode().strip())
        commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        return _git("archive", "--format=tar", commit.decode().strip(), "--", path, folder=top)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode("utf-8", "replace").strip() or str(error)
        raise ConfigError(
            f"there is no {path!r} in revision {revision!r}: {said.splitlines()[-1]}",
            remedy="name a folder, or REV:PATH with a path from the top of this git repository",
        ) from error


def _git(*arguments: str, folder: Path | None = None) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True, cwd=folder).stdout
