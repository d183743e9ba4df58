"""NVIDIA's own Triton image, run by Docker: every backend, with or without GPU."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

from clip_deploy.errors import MissingDependency
from clip_deploy.progress import Progress, silent
from clip_deploy.releases import IMAGE
from clip_deploy.servers.handle import Ports, await_ready
from clip_deploy.servers.launchers import (
    Launch,
    Launcher,
    ServerOptions,
    prepare,
    server_arguments,
    spawn,
)

if TYPE_CHECKING:
    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.servers.handle import ServerHandle

_INSIDE = Ports(http=8000, grpc=8001, metrics=8002)


def command(launch: Launch, repository: ModelRepository, options: ServerOptions) -> list[str]:
    """The docker command line: read-only models, published on the chosen address only, gone when it ends."""
    gpus = (
        options.gpus if options.gpus is not None else ("all" if shutil.which("nvidia-smi") else "")
    )
    published = zip(
        (launch.ports.http, launch.ports.grpc, launch.ports.metrics),
        (_INSIDE.http, _INSIDE.grpc, _INSIDE.metrics),
    )
    return [
        *("docker", "run", "--rm", "--init", f"--name={launch.identity}"),
        *([f"--gpus={gpus}"] if gpus else []),
        f"--shm-size={options.shm_size}",
        *(f"--publish={launch.host}:{outside}:{inside}" for outside, inside in published),
        f"--volume={repository.path.resolve()}:/models:ro",
        IMAGE.format(release=options.release),
        "tritonserver",
        *server_arguments(launch, "/models", "0.0.0.0", _INSIDE),  # noqa: S104  # inside the container
    ]


def start(
    repository: ModelRepository, options: ServerOptions, progress: Progress = silent
) -> ServerHandle:
    """Print the docker command, run it, and wait until every model version is ready.

    Raises:
        MissingDependency: there is no Docker, or its engine does not answer.
        ServerError: the server cannot load the repository, died, or is not ready in time.
    """
    LAUNCHER.require_backends(repository)
    launch = prepare(options)
    line = command(launch, repository, options)
    _require_docker(shlex.join(line))
    progress(shlex.join(line))
    handle = spawn(launch, line, os.environ)
    try:
        await_ready(handle, repository, options.timeout_s)
    except BaseException:
        handle.stop()
        raise
    return handle


def _require_docker(line: str) -> None:
    remedy = f"run it where Docker runs: {line}"
    if shutil.which("docker") is None:
        raise MissingDependency("there is no docker command on this machine", remedy=remedy)
    try:
        asked = subprocess.run(
            ["docker", "version"], capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        raise MissingDependency("the Docker engine does not answer", remedy=remedy) from None
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MissingDependency(f"the Docker engine does not answer: {reason}", remedy=remedy)


LAUNCHER = Launcher(
    name="container",
    summary=f"NVIDIA's image {IMAGE.format(release='<release>')}, by Docker; CPU or GPU",
    backends=frozenset({"onnxruntime", "tensorrt", "openvino", "pytorch"}),
    otherwise="render it with --backend onnxruntime: the image's Python has no onnxruntime",
    start=start,
)
