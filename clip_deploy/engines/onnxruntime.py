"""ONNX Runtime: Triton opens the exported graph as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.engines.backends import Backend, Made, require_auto

if TYPE_CHECKING:
    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.progress import Progress
    from clip_deploy.spec import EngineSpec


def graph(exported: ExportedModel, spec: EngineSpec, progress: Progress) -> Made:
    require_auto(exported, spec)
    return Made({path.name: path for path in exported.graph_files})


BACKEND = Backend(
    name="onnxruntime",
    summary="Triton's ONNX Runtime backend, in the server's container; CPU or GPU",
    kinds={"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"},
    engines={"onnxruntime": graph},
)
