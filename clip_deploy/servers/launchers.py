"""What a launcher is to us: one row of a table, and what a caller may choose about a server."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError, ServerError
from clip_deploy.progress import Progress, silent
from clip_deploy.resources import cache_dir
from clip_deploy.servers.handle import Ports, ServerHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from clip_deploy.artifacts import ModelRepository

_KEPT_LOGS = 20

# Run in the child before the server replaces it: the kernel ends it when the thread that started it ends, however that
# happens. The parent may already be gone by the time the request is made, hence the comparison.
_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to start a server.

    Args:
        host: the address to listen on; anything but loopback opens the server to the network.
        ports: 0 picks a free one.
        log: where the server's output goes; a file in the cache folder by default.
        timeout_s: how long loading may take.
        release: the Triton release of the container image, as 26.05.
        gpus: Docker's ``--gpus``; None asks whether this machine has an NVIDIA driver.
        shm_size: shared memory of the container.
        arguments: more of tritonserver's own options.
    """

    host: str = "127.0.0.1"
    ports: Ports = field(default_factory=Ports)
    log: Path | None = None
    timeout_s: float = 300.0
    release: str = "26.05"
    gpus: str | None = None
    shm_size: str = "1g"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to run Triton.

    Args:
        name: what ``--launcher`` says.
        summary: one line for help texts.
        backends: what it can load, or None for anything; compared before a server is started.
        otherwise: what to do with a repository that needs more.
        start: starts it and waits until it is ready.
    """

    name: str
    summary: str
    backends: frozenset[str] | None
    otherwise: str
    start: Callable[[ModelRepository, ServerOptions, Progress], ServerHandle]

    def require_backends(self, repository: ModelRepository) -> None:
        """Raise ServerError where the repository needs a backend that this launcher lacks."""
        lacking = (
            sorted(repository.backends - self.backends - {""}) if self.backends is not None else []
        )
        if lacking:
            raise ServerError(
                f"the {self.name} server cannot load backend {lacking[0]}", remedy=self.otherwise
            )

    @contextmanager
    def serving(
        self, repository: ModelRepository, options: ServerOptions, progress: Progress = silent
    ) -> Iterator[ServerHandle]:
        """A ready server; where it ends under what is done with it, its log says why."""
        with self.start(repository, options, progress) as handle:
            try:
                yield handle
            except ServerError as error:
                if handle.process.poll() is None:
                    raise
                why = handle.failure()
                if str(why) in str(error):
                    raise
                raise ServerError(f"{error}; {why}", remedy=why.remedy) from error


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything chosen for one start: an identity, ports and a log."""

    identity: str
    host: str
    ports: Ports
    log: Path
    extra: tuple[str, ...] = field(default=())


def prepare(options: ServerOptions) -> Launch:
    """Draw an identity, pick free ports where none were given, and open a log's place."""
    identity = f"clip-deploy-{secrets.token_hex(6)}"
    log = options.log or _log_path(identity)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write the log {log}: {error.strerror}",
            remedy="choose another place with --log",
        ) from error
    return Launch(identity, options.host, _free_ports(options), log, options.arguments)


def spawn(launch: Launch, command: Sequence[str], environment: Mapping[str, str]) -> ServerHandle:
    """Start a server that ends with this process, in a session of its own so that Ctrl-C reaches only us."""
    with launch.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _TETHER, str(os.getpid()), *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            cwd=launch.log.parent,  # the Python backend puts its working directory on sys.path
            start_new_session=True,
        )
    return ServerHandle(launch.identity, launch.host, launch.ports, launch.log, process)


def server_arguments(launch: Launch, repository: str, host: str, ports: Ports) -> list[str]:
    """tritonserver's options that every launcher passes."""
    return [
        f"--model-repository={repository}",
        f"--id={launch.identity}",
        f"--http-address={host}",
        f"--grpc-address={host}",
        f"--metrics-address={host}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        *launch.extra,
    ]


def _free_ports(options: ServerOptions) -> Ports:
    """Fill in zeros. The sockets stay open until all are picked, so that no two are equal."""
    sockets = []
    ports = options.ports
    try:
        for name in ("http", "grpc", "metrics"):
            if getattr(ports, name) == 0:
                sockets.append(socket.create_server((options.host, 0)))
                ports = replace(ports, **{name: sockets[-1].getsockname()[1]})
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}: {error.strerror}",
            remedy="use an address of this machine with --host",
        ) from error
    finally:
        for each in sockets:
            each.close()
    return ports


def _log_path(identity: str) -> Path:
    """A new log in the cache folder, which keeps the newest few."""
    folder = cache_dir() / "logs"
    for old in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[
        : -_KEPT_LOGS + 1
    ]:
        old.unlink(missing_ok=True)
    return folder / f"{identity}.log"
