"""A server for the time of one command."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.progress import Progress
    from clip_deploy.servers import ServerHandle, ServerOptions


def require_launcher(name: str) -> None:
    """Raise ConfigError where there is no such launcher."""
    from clip_deploy.errors import ConfigError
    from clip_deploy.servers import LAUNCHERS

    if name not in LAUNCHERS:
        raise ConfigError(f"launcher {name!r} is unknown", remedy=f"use {' or '.join(LAUNCHERS)}")


@contextlib.contextmanager
def served(
    launcher: str, repository: ModelRepository, options: ServerOptions, progress: Progress
) -> Iterator[ServerHandle]:
    """A ready server; where it ends under what is done with it, its log says why."""
    from clip_deploy.errors import ServerError
    from clip_deploy.servers import LAUNCHERS

    with LAUNCHERS[launcher].start(repository, options, progress) as handle:
        try:
            yield handle
        except ServerError as error:
            if handle.process.poll() is None:
                raise
            why = handle.failure()
            raise ServerError(f"{error}; {why}", remedy=why.remedy) from error
