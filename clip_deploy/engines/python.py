"""Triton's Python backend around ONNX Runtime: what the embedded server can load, with no GPU and no Docker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.artifacts import EngineBuild
from clip_deploy.engines.backends import Backend
from clip_deploy.resources import templates_dir

if TYPE_CHECKING:
    from clip_deploy.artifacts import ExportedModel


def _build(exported: ExportedModel) -> EngineBuild:
    files = {path.name: path for path in exported.graph_files}
    return EngineBuild(
        exported,
        BACKEND.name,
        {"model.py": templates_dir() / "python" / "model.py", **files},
        BACKEND.kinds,
    )


BACKEND = Backend(
    name="python",
    summary="ONNX Runtime inside Triton's Python backend; CPU, runs in the embedded server",
    kinds={"auto": "KIND_CPU", "cpu": "KIND_CPU"},
    build=_build,
    needs=("numpy", "onnxruntime"),
)
