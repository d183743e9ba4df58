"""Where a command finds its server: one that it starts on a repository for its own time, or one that runs already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.cli.lint import require_clean, server_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.bench.subject import BenchSubject
    from clip_deploy.lint import LintReport
    from clip_deploy.progress import Progress
    from clip_deploy.servers import ServerHandle, ServerOptions
    from clip_deploy.smoke.subject import Target


def require_either(repository: Path | None, url: str | None, verb: str) -> None:
    """Raise ConfigError where neither a repository nor a server was named."""
    from clip_deploy.errors import ConfigError

    if repository is None and url is None:
        raise ConfigError(
            f"nothing to {verb}",
            remedy="name a model repository, or a running server with --url HOST:PORT",
        )


def servable(
    path: Path | None, launcher: str = "embedded", release: str = ""
) -> tuple[ModelRepository, LintReport]:
    """A repository on which a launcher's server may be started, and what the linter said of it.

    Raises:
        ConfigError: there is no such launcher, or no repository.
        CheckFailed: the linter found an error.
    """
    from clip_deploy import repository as repositories
    from clip_deploy.errors import ConfigError
    from clip_deploy.servers import LAUNCHERS

    assert path is not None  # require_either has seen to it
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"launcher {launcher!r} is unknown", remedy=f"use {' or '.join(LAUNCHERS)}"
        )
    found = repositories.read(path)
    return found, require_clean(path, server_target(launcher, release))


def served(
    launcher: str, repository: ModelRepository, options: ServerOptions, progress: Progress
) -> AbstractContextManager[ServerHandle]:
    """A ready server; where it ends under what is done with it, its log says why."""
    from clip_deploy.servers import LAUNCHERS

    return LAUNCHERS[launcher].serving(repository, options, progress)


def encoder_at(
    url: str,
    repository: ModelRepository | None,
    tower: str | None,
    progress: Progress,
    *,
    inputs: Callable[[Target], NDArray[Any]] | None = None,
    pid: int | None = None,
) -> BenchSubject:
    """One encoder of a server, ready for loads.

    Args:
        tower: which; None takes the image encoder where there is one.
        inputs: the user's own for a target ``[n, …]``; the reference's by default.
        pid: the server's process, where we started it on this machine.

    Raises:
        ConfigError: there is no such encoder.
        CheckFailed: its answers are not right.
    """
    from clip_deploy.bench.subject import bench_subject
    from clip_deploy.client import TritonInferenceClient
    from clip_deploy.errors import ConfigError
    from clip_deploy.smoke.subject import targets_of

    with TritonInferenceClient(url) as client:
        targets = targets_of(client, repository)
        target = next((each for each in targets if tower in (None, each.tower.value)), None)
        if target is None:
            raise ConfigError(
                f"there is no {tower} encoder",
                remedy=f"use --tower {' or '.join(each.tower.value for each in targets)}",
            )
        progress(f"{target.name}: asking for every input alone")
        return bench_subject(client, target, inputs=inputs(target) if inputs else None, pid=pid)
