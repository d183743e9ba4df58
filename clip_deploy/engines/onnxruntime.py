"""ONNX Runtime: Triton opens the exported graph as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.artifacts import EngineBuild
from clip_deploy.engines.backends import Backend

if TYPE_CHECKING:
    from clip_deploy.artifacts import ExportedModel


def _build(exported: ExportedModel) -> EngineBuild:
    return EngineBuild(
        exported, BACKEND.name, {path.name: path for path in exported.graph_files}, BACKEND.kinds
    )


BACKEND = Backend(
    name="onnxruntime",
    summary="Triton's ONNX Runtime backend, in the server's container; CPU or GPU",
    kinds={"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"},
    build=_build,
)
