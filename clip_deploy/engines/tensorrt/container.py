"""A plan built inside the image that will serve it, by its own trtexec: versions cannot differ."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from clip_deploy.engines.tensorrt import PLAN
from clip_deploy.engines.tensorrt.building import HARDWARE_COMPATIBILITY, TIMING, Made, keep
from clip_deploy.engines.tensorrt.device import device
from clip_deploy.engines.tensorrt.reading import Layers, PlanFacts
from clip_deploy.errors import ConfigError, EngineError, MissingDependency
from clip_deploy.progress import Progress, silent
from clip_deploy.releases import IMAGE, release

if TYPE_CHECKING:
    from clip_deploy.artifacts import BuiltPlan, ExportedModel
    from clip_deploy.engines.tensorrt.building import BuildOptions
    from clip_deploy.spec import BatchProfile

_TRTEXEC = "/usr/src/tensorrt/bin/trtexec"
_LAYERS = "layers.json"
# Exit codes of docker itself, not of what it runs.
_DOCKERS_OWN = (125, 126, 127)


def build(
    exported: ExportedModel, options: BuildOptions, *, progress: Progress = silent
) -> BuiltPlan:
    """Build a plan inside ``nvcr.io/nvidia/tritonserver:<release>-py3``.

    Raises:
        ConfigError: no release was named.
        MissingDependency: there is no Docker.
        EngineError: trtexec fails, or the plan is not what was asked for.
    """
    if options.release is None:
        raise ConfigError(
            "--in-container without a release",
            remedy="name the serving release with --triton-release YY.MM",
        )
    bounds = release(options.release).tensorrt_bounds()
    if bounds is not None and bounds[1][0] < 10:
        raise ConfigError(
            f"Triton {options.release} carries TensorRT {bounds[1][0]}, which is not strongly typed",
            remedy="use release 24.05 or later",
        )
    if shutil.which("docker") is None:
        raise MissingDependency(
            "there is no docker command",
            remedy="install Docker Engine and NVIDIA's container toolkit",
        )
    return keep(exported, options, _by_trtexec, progress)


def _by_trtexec(
    exported: ExportedModel, profile: BatchProfile, options: BuildOptions, folder: Path
) -> Made:
    command = docker_command(exported, profile, options, folder)
    done = subprocess.run(command, capture_output=True, check=False)
    output = (done.stdout + done.stderr).decode("utf-8", "replace").splitlines()
    if done.returncode in _DOCKERS_OWN:
        lines = (
            [line for line in output if line.startswith("docker:")] or output or ["no reason given"]
        )
        raise MissingDependency(
            f"docker cannot run the image: {lines[0].strip()[:300]}",
            remedy="check Docker and NVIDIA's container toolkit: docker run --rm --gpus=all ubuntu nvidia-smi",
        )
    if done.returncode != 0:
        lines = [line for line in output if "[E]" in line] or output or ["it says nothing"]
        by_hand = docker_command(exported, profile, options, Path("plan"))
        raise EngineError(
            f"trtexec ended with code {done.returncode}: {lines[-1].strip()[:300]}",
            remedy=f"run it by hand: mkdir plan && {shlex.join(by_hand)}",
        )
    try:
        layers = Layers.read((folder / _LAYERS).read_text("utf-8"))
        (folder / _LAYERS).unlink()
    except (OSError, ValueError) as error:
        raise EngineError(
            f"trtexec left no description of its layers: {error}", remedy="report the release"
        ) from error
    if not (folder / PLAN).is_file():
        raise EngineError("trtexec left no plan", remedy="check the disk, and Docker's mounts")
    image = IMAGE.format(release=options.release)
    builder = {"builder": "trtexec", "container": image, "read_back": "header and layers"}
    return Made(PlanFacts(None, None, layers), (device() or {}) | builder)


def docker_command(
    exported: ExportedModel, profile: BatchProfile, options: BuildOptions, folder: Path
) -> list[str]:
    """The docker command line: the export read-only, the plan's folder writable, nothing else."""
    assert options.release is not None  # checked by ``build``
    volumes = [f"{exported.directory.resolve()}:/export:ro", f"{folder.resolve()}:/plan"]
    return [
        *("docker", "run", "--rm", "--gpus=all", "--network=none"),
        f"--user={os.getuid()}:{os.getgid()}",
        *(f"--volume={volume}" for volume in volumes),
        IMAGE.format(release=options.release),
        *trtexec_command(exported, profile, options),
    ]


def trtexec_command(
    exported: ExportedModel, profile: BatchProfile, options: BuildOptions
) -> list[str]:
    """trtexec's command line inside the image.

    Strong typing is a flag up to TensorRT 10 and the only way from 11 on, where no flag is given.
    """
    tensor = exported.contract.input

    def shapes(size: int) -> str:
        return f"{tensor.name}:{'x'.join(map(str, (size, *tensor.shape)))}"

    bounds = release(str(options.release)).tensorrt_bounds()
    is_ten = bounds is not None and bounds[1][0] < 11
    level = HARDWARE_COMPATIBILITY[options.hardware]
    return [
        _TRTEXEC,
        f"--onnx=/export/{exported.graph.file}",
        f"--saveEngine=/plan/{PLAN}",
        f"--minShapes={shapes(profile.least)}",
        f"--optShapes={shapes(profile.best)}",
        f"--maxShapes={shapes(profile.most)}",
        *(["--stronglyTyped"] if is_ten else []),
        *([f"--timingCacheFile=/plan/{TIMING}"] if options.timing_cache else []),
        *([f"--hardwareCompatibilityLevel={_LEVELS[level]}"] if level else []),
        *(["--versionCompatible"] if options.version_compatible else []),
        "--profilingVerbosity=detailed",
        f"--exportLayerInfo=/plan/{_LAYERS}",
        "--skipInference",
    ]


# TensorRT's names → trtexec's.
_LEVELS = {"AMPERE_PLUS": "ampere+", "SAME_COMPUTE_CAPABILITY": "sameComputeCapability"}
