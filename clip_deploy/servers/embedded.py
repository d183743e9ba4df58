"""A real Triton from PyPI's ``nvidia-pytriton`` wheel, started as a child process: no Docker, no GPU, loopback only."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from clip_deploy.errors import ServerError
from clip_deploy.progress import Progress, silent
from clip_deploy.servers import install
from clip_deploy.servers.handle import await_ready
from clip_deploy.servers.launchers import (
    Launcher,
    ServerOptions,
    prepare,
    server_arguments,
    spawn,
)

if TYPE_CHECKING:
    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.servers.handle import ServerHandle

# Shared memory between the server and a model's process: enough for a batch of 64 pictures of 224 pixels; it grows in
# small steps beyond, which costs time under load.
_SHM_BYTES = 64 * 2**20
# Ways for a Python model to hand NumPy arrays over; ``Tensor.from_dlpack(`` is not one of them.
_NUMPY_ARRAYS = re.compile(r"\.as_numpy\(|\bpb_utils\.Tensor\(")
# A large model needs longer than the Python backend's own 30 seconds to load.
_STUB_TIMEOUT_S = 600


def start(
    repository: ModelRepository, options: ServerOptions, progress: Progress = silent
) -> ServerHandle:
    """Start the embedded server and wait until every model version is ready.

    Raises:
        MissingDependency: it is not installed, or this Python has no shared library.
        ServerError: it cannot load the repository, died, or is not ready in time.
    """
    LAUNCHER.require_backends(repository)
    files = install.installed()
    _require_safe_arrays(repository)
    launch = prepare(options)
    command = [
        str(files.server),
        *server_arguments(launch, str(repository.path.resolve()), launch.host, launch.ports),
        f"--backend-directory={files.backends}",
        f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}",
        f"--backend-config=python,shm-region-prefix-name={launch.identity}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT_S}",
    ]
    progress(
        f"starting Triton {install.TRITON_VERSION} and loading {len(repository.models)} models"
    )
    handle = spawn(launch, command, _environment(files))
    try:
        await_ready(handle, repository, options.timeout_s)
    except BaseException:
        handle.stop()
        raise
    return handle


def _require_safe_arrays(repository: ModelRepository) -> None:
    """This Triton was built before NumPy 2, whose arrays it misreads without a word: every element of an input becomes
    its first one, and outputs come out empty. Models that pass tensors by DLPack, as ours do, are not affected.
    """
    if _numpy_major() < 2:
        return
    for model in repository.models:
        for number in model.served:
            for file in (repository.path / model.name / str(number)).glob("*.py"):
                found = _NUMPY_ARRAYS.search(file.read_text("utf-8", "replace"))
                if found:
                    raise ServerError(
                        f"{file} uses {found.group().strip('(')}, which gives wrong values in Triton "
                        f"{install.TRITON_VERSION} with NumPy 2",
                        remedy="pass tensors by DLPack (np.from_dlpack, Tensor.from_dlpack), or pip install 'numpy<2'",
                    )


def _numpy_major() -> int:
    try:
        return int(version("numpy").partition(".")[0])
    except PackageNotFoundError:
        return 0


def _environment(files: install.Installation) -> dict[str, str]:
    """The Python backend runs in the environment of the first ``python3`` on PATH: make that ours."""
    environment = dict(os.environ)
    environment.pop("PYTHONHOME", None)
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    folders = [*files.library_folders, environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, map(str, folders)))
    return environment


LAUNCHER = Launcher(
    name="embedded",
    summary="a real Triton without Docker or GPU; Python backend; loopback only",
    backends=frozenset({"python"}),
    otherwise="render it with --backend python, or serve it with --launcher container",
    start=start,
)
