"""A plan built inside the image that will serve it, by its own trtexec: versions cannot differ."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from clip_deploy.engines.tensorrt import PLAN
from clip_deploy.engines.tensorrt.building import HARDWARE_COMPATIBILITY, Made, keep, machine
from clip_deploy.engines.tensorrt.reading import PlanFacts, half_share
from clip_deploy.errors import ConfigError, EngineError, MissingDependency
from clip_deploy.progress import Progress, silent
from clip_deploy.releases import IMAGE, release

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.artifacts import BuiltPlan, ExportedModel
    from clip_deploy.engines.tensorrt.building import BuildOptions
    from clip_deploy.spec import BatchProfile

_TRTEXEC = "/usr/src/tensorrt/bin/trtexec"
_LAYERS = "layers.json"


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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "[E]" in line]
        last = (lines or done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise EngineError(
            f"trtexec ended with code {done.returncode}: {last[:300]}",
            remedy=f"run it by hand: {shlex.join(command)}",
        )
    layers = (folder / _LAYERS).read_text("utf-8")
    (folder / _LAYERS).unlink()
    image = IMAGE.format(release=options.release)
    builder = {"builder": "trtexec", "container": image}
    return Made(_facts(exported, profile, layers), machine() | builder)


def docker_command(
    exported: ExportedModel, profile: BatchProfile, options: BuildOptions, folder: Path
) -> list[str]:
    """The docker command line: the export read-only, the plan's folder writable, nothing else."""
    assert options.release is not None  # checked by ``build``
    volumes = [f"{exported.directory.resolve()}:/export:ro", f"{folder.resolve()}:/plan"]
    if options.timing_cache is not None:
        volumes.append(f"{options.timing_cache.resolve().parent}:/cache")
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
        *(
            [f"--timingCacheFile=/cache/{options.timing_cache.name}"]
            if options.timing_cache
            else []
        ),
        *([f"--hardwareCompatibilityLevel={_LEVELS[level]}"] if level else []),
        *(["--versionCompatible"] if options.version_compatible else []),
        "--profilingVerbosity=detailed",
        f"--exportLayerInfo=/plan/{_LAYERS}",
        "--skipInference",
    ]


# TensorRT's names → trtexec's.
_LEVELS = {"AMPERE_PLUS": "ampere+", "SAME_COMPUTE_CAPABILITY": "sameComputeCapability"}


def _facts(exported: ExportedModel, profile: BatchProfile, layers: str) -> PlanFacts:
    """trtexec built these tensors and shapes or failed; the layers tell the precision."""
    contract = exported.contract
    shape = contract.input.shape
    shapes: Any = tuple((size, *shape) for size in (profile.least, profile.best, profile.most))
    return PlanFacts(
        tensors={
            contract.input.name: ("input", contract.input.dtype, (-1, *shape)),
            contract.output.name: ("output", contract.output.dtype, (-1, *contract.output.shape)),
        },
        profile={contract.input.name: shapes},
        half_share=half_share(layers),
    )
