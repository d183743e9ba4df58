"""A running Triton: where it listens, whether it is the one we started, and what it has loaded."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ServerError
from clip_deploy.servers.logs import decisive_lines, diagnose, tail

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from clip_deploy.artifacts import ModelRepository

_STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports; 0 means a free one."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0


@dataclass(frozen=True, slots=True)
class ServerHandle:
    """A Triton that this process started; a context manager that ends it.

    ``identity`` is the random ``--id`` it was given: whoever answers with another is somebody else's server.
    """

    identity: str
    host: str
    ports: Ports
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def http(self) -> str:
        return f"{self.host}:{self.ports.http}"

    @property
    def grpc(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def metrics(self) -> str:
        return f"{self.host}:{self.ports.metrics}"

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: politely, then not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        elif self.process.returncode < 0:  # killed: the processes of its models live on
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def is_ours(self) -> bool:
        """Whether the server on our port is the one we started."""
        metadata = self._ask("GET", "/v2")
        return isinstance(metadata, dict) and metadata.get("name") == self.identity

    def missing(self, repository: ModelRepository) -> list[str]:
        """Model versions of the repository that are not ready yet, as ``name:version``."""
        wanted = [
            (model.name, version) for model in repository.models for version in model.served or (1,)
        ]
        return [
            f"{name}:{version}" for name, version in wanted if not self._is_ready(name, version)
        ]

    def failure(self) -> ServerError:
        """Why the server died, or does not get ready, in words."""
        found = diagnose(tail(self.log))
        code = self.process.poll()
        state = "Triton does not get ready" if code is None else f"Triton ended with code {code}"
        if found:
            return ServerError(f"{found.cause} (log: {self.log})", remedy=found.remedy)
        lines = decisive_lines(self.log)
        return ServerError(
            f"{state}: {lines[-1] if lines else 'its log says nothing'}", remedy=f"read {self.log}"
        )

    def _is_ready(self, name: str, version: int) -> bool:
        return self._ask("GET", f"/v2/models/{name}/versions/{version}/ready") is not None

    def _ask(self, method: str, path: str) -> Any:
        """The JSON answer ({} for an empty one), or None when the server does not answer with 200."""
        connection = http.client.HTTPConnection(self.host, self.ports.http, timeout=5)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            return (json.loads(body) if body else {}) if response.status == 200 else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def await_ready(handle: ServerHandle, repository: ModelRepository, timeout_s: float) -> None:
    """Return when every model version is ready on *our* server; otherwise end it and say why.

    Raises:
        ServerError: it died, hangs on something known, or is not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while handle.process.poll() is None:
        if handle.is_ours() and not handle.missing(repository):
            return
        found = diagnose(tail(handle.log))
        if found and found.hangs:
            break
        if time.monotonic() > deadline:
            handle.stop()
            raise ServerError(
                f"Triton is not ready after {timeout_s:g} s (log: {handle.log})",
                remedy="give it longer with --timeout, or read the log",
            )
        time.sleep(0.1)
    error = handle.failure()
    handle.stop()
    raise error
