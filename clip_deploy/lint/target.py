"""What a repository is judged for: a machine, a Triton release, and the backends that server has."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from clip_deploy.errors import ConfigError
from clip_deploy.releases import DEFAULT_RELEASE, TritonRelease, release

# Backends in NVIDIA's image; on a machine without GPU the first loads nothing.
_CONTAINER_BACKENDS = frozenset(
    {"tensorrt", "onnxruntime", "openvino", "pytorch", "python", "dali", "fil"}
)
# Python backends written by their users' own hands carry any name; these are the ones that one can misspell.
KNOWN_BACKENDS = _CONTAINER_BACKENDS | {
    "tensorflow",
    "tensorrtllm",
    "vllm",
    "identity",
    "repeat",
    "square",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server to be: with a GPU or without, of which release, and with which backends."""

    gpu: bool
    release: TritonRelease
    backends: frozenset[str] = _CONTAINER_BACKENDS
    agents: frozenset[str] = frozenset({"checksum"})


def target(
    kind: str = "auto", release_name: str = DEFAULT_RELEASE, backends: frozenset[str] | None = None
) -> Target:
    """Choose a target: ``cpu``, ``gpu``, or ``auto``, which asks whether this machine has an NVIDIA driver.

    Raises:
        ConfigError: an unknown kind or release.
    """
    if kind not in ("cpu", "gpu", "auto"):
        raise ConfigError(f"target {kind!r} is unknown", remedy="use cpu, gpu or auto")
    gpu = kind == "gpu" or (kind == "auto" and shutil.which("nvidia-smi") is not None)
    return Target(gpu, release(release_name), backends or _CONTAINER_BACKENDS)
