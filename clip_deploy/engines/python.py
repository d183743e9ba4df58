"""Triton's Python backend around an engine: what the embedded server can load, with no GPU and no Docker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.contract import PREFIX
from clip_deploy.engines import onnxruntime, openvino
from clip_deploy.engines.backends import Backend, Made
from clip_deploy.resources import templates_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.progress import Progress
    from clip_deploy.spec import EngineSpec

    Engine = Callable[[ExportedModel, EngineSpec, Progress], Made]


def _wrapped(name: str, engine: Engine) -> Engine:
    """An engine's files with the code that runs them, which reads the engine's name from the config."""

    def build(exported: ExportedModel, spec: EngineSpec, progress: Progress) -> Made:
        made = engine(exported, spec, progress)
        return Made(
            {"model.py": templates_dir() / "python" / "model.py", **made.files},
            {PREFIX + "engine": name, **made.parameters},
            made.max_batch,
        )

    return build


BACKEND = Backend(
    name="python",
    summary="ONNX Runtime or OpenVINO inside Triton's Python backend; CPU, runs in the embedded server",
    kinds={"auto": "KIND_CPU", "cpu": "KIND_CPU"},
    engines={
        "onnxruntime": _wrapped("onnxruntime", onnxruntime.graph),
        "openvino": _wrapped("openvino", openvino.network),
    },
)
