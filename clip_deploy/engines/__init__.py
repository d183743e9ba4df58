"""An exported graph → the files that a Triton backend opens; one module per backend, one row each."""

from __future__ import annotations

from clip_deploy.engines import onnxruntime, openvino, python, tensorrt
from clip_deploy.engines.backends import Backend

BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (onnxruntime.BACKEND, python.BACKEND, openvino.BACKEND, tensorrt.BACKEND)
}

__all__ = ["BACKENDS", "Backend"]
