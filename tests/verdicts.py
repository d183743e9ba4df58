"""What a real Triton says to model repositories that may be wrong: ready or not, model by model."""

from __future__ import annotations

import http.client
import json
import time
from typing import TYPE_CHECKING

from clip_deploy.servers import embedded, install
from clip_deploy.servers.launchers import ServerOptions, prepare, server_arguments, spawn

if TYPE_CHECKING:
    from pathlib import Path


class ServerDied(AssertionError):
    """The whole server ended over a model."""


_TRIES = 3


def verdicts(repository: Path, log: Path, timeout_s: float = 300) -> dict[str, bool]:
    """Model → whether every version that Triton tried is ready; models that it did not even read are False.

    Such a server starts whatever the models are like: it says so and goes on. Among many wrong models it dies now and
    then, by chance (SIGSEGV while a sequence's state or a warmup is set up); it is then asked again.

    Raises:
        ServerDied: it died every time.
    """
    for _ in range(_TRIES - 1):
        try:
            return _verdicts(repository, log, timeout_s)
        except ServerDied:
            continue
    return _verdicts(repository, log, timeout_s)


def _verdicts(repository: Path, log: Path, timeout_s: float) -> dict[str, bool]:
    files = install.installed()
    tolerant = ("--exit-on-error=false", "--strict-readiness=false")
    launch = prepare(ServerOptions(log=log, arguments=tolerant))
    command = [
        str(files.server),
        *server_arguments(launch, str(repository), launch.host, launch.ports),
        f"--backend-directory={files.backends}",
        "--backend-config=python,shm-default-byte-size=1048576",
        f"--backend-config=python,shm-region-prefix-name={launch.identity}",
    ]
    handle = spawn(launch, command, embedded._environment(files))
    try:
        deadline = time.monotonic() + timeout_s
        while not handle.is_ours():
            code = handle.process.poll()
            if code is not None:
                raise ServerDied(f"Triton ended with {code}: {log}")
            assert time.monotonic() < deadline, f"Triton does not start: {log}"
            time.sleep(0.1)
        connection = http.client.HTTPConnection(handle.host, handle.ports.http, timeout=10)
        connection.request("POST", "/v2/repository/index")
        answer = json.loads(connection.getresponse().read())
        connection.close()  # an open one keeps the server from ending
    finally:
        handle.stop()
    rows = answer if isinstance(answer, list) else []  # else it could not even list the folder
    found = {folder.name: False for folder in repository.iterdir()}
    for name in found:
        states = [row.get("state") for row in rows if row["name"] == name]
        found[name] = bool(states) and set(states) == {"READY"}
    return found
