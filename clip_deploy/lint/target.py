"""What a repository is judged for: a machine, a Triton release, and the backends that server has."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError
from clip_deploy.releases import DEFAULT_RELEASE, TritonRelease, release

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """A server to be: with a GPU or without, of which release, and with which backends and repository agents.

    ``release_is_given`` is False where nobody said which; what depends on one exact release is not judged then.
    ``capability`` is the GPU's compute capability, as 9.0; None where it is not known.
    """

    gpu: bool
    release: TritonRelease
    backends: frozenset[str]
    agents: frozenset[str]
    release_is_given: bool
    capability: str | None = None


def target(
    kind: str = "auto",
    release_name: str | None = None,
    *,
    backends: frozenset[str] | None = None,
    agents: frozenset[str] = frozenset({"checksum"}),
    more: Iterable[str] = (),
) -> Target:
    """Choose a target: ``cpu``, ``gpu``, ``gpu:9.0`` of that compute capability, or ``auto``, which asks this machine.

    Backends and agents are those of NVIDIA's container image where nothing else is said; ``more`` are backends beside
    them.

    Raises:
        ConfigError: an unknown kind or release.
    """
    word, _, capability = kind.partition(":")
    if word not in ("cpu", "gpu", "auto") or (capability and not _is_capability(word, capability)):
        raise ConfigError(f"target {kind!r} is unknown", remedy="use cpu, gpu, gpu:9.0 or auto")
    gpu = word == "gpu" or (word == "auto" and shutil.which("nvidia-smi") is not None)
    return Target(
        gpu=gpu,
        release=release(release_name or DEFAULT_RELEASE),
        backends=(backends or _CONTAINER_BACKENDS) | frozenset(more),
        agents=agents,
        release_is_given=release_name is not None,
        capability=capability or (_capability_here() if gpu and word == "auto" else None),
    )


def _is_capability(word: str, text: str) -> bool:
    major, dot, minor = text.partition(".")
    return word == "gpu" and bool(dot) and major.isdecimal() and minor.isdecimal()


def _capability_here() -> str | None:
    """The compute capability of this machine's GPUs, as 9.0; None where it has several kinds or does not tell."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    kinds = set(done.stdout.split()) if done.returncode == 0 else set()
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return kind if kind and _is_capability("gpu", kind) else None
