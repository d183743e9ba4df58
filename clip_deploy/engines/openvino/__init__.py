"""OpenVINO: an IR beside the export, made when it is asked for, held against torch. Nothing here imports OpenVINO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.artifacts import ENGINE
from clip_deploy.contract import PREFIX
from clip_deploy.engines.backends import Backend, Made
from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.engines.openvino.building import BuiltNetwork
    from clip_deploy.progress import Progress
    from clip_deploy.spec import EngineSpec

NETWORK, WEIGHTS = "model.xml", "model.bin"


def _made(built: BuiltNetwork, parameters: dict[str, str]) -> Made:
    files = {name: built.directory / name for name in (NETWORK, WEIGHTS, ENGINE)}
    return Made(files, {PREFIX + "engine_precision": built.precision.value, **parameters})


def network(exported: ExportedModel, spec: EngineSpec, progress: Progress) -> Made:
    """For the Python backend, which hands OpenVINO's own hint on and holds the compiled model to it."""
    from clip_deploy.engines.openvino.building import build

    built = build(exported, spec, progress=progress)
    return _made(built, {"INFERENCE_PRECISION_HINT": built.hint})


def _for_backend(exported: ExportedModel, spec: EngineSpec, progress: Progress) -> Made:
    """For Triton's OpenVINO backend, which can be told to use bfloat16 and cannot be told not to."""
    from clip_deploy.engines.openvino.building import build

    built = build(exported, spec, progress=progress)
    if built.hint != "bf16":
        raise ConfigError(
            "Triton's OpenVINO backend cannot be kept to FP32: it computes in bfloat16 wherever the CPU has it",
            remedy="use --precision bf16, or --backend python --engine openvino",
        )
    return _made(built, {"HINT_BF16": "YES"})


BACKEND = Backend(
    name="openvino",
    summary="Triton's OpenVINO backend, in containers that carry it; CPU, bfloat16",
    kinds={"auto": "KIND_CPU", "cpu": "KIND_CPU"},
    engines={"openvino": _for_backend},
)
