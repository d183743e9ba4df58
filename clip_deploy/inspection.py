"""What a model file is, read without running it: an ONNX graph or a TensorRT plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import ENGINE, BuiltPlan
from clip_deploy.errors import ConfigError, extra
from clip_deploy.lint import graph as graphs
from clip_deploy.plan import read_header
from clip_deploy.releases import first_that_reads, with_tensorrt

if TYPE_CHECKING:
    from pathlib import Path


def inspect(path: Path) -> dict[str, Any]:
    """Facts about a file, by name; values are texts, numbers and lists.

    Raises:
        ConfigError: there is no such file, or it is neither an ONNX graph nor a plan.
        MissingDependency: onnx is not installed.
    """
    try:
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}", remedy="name a model.onnx or a model.plan"
            )
        header = read_header(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", remedy="check the path and its permissions"
        ) from error
    if header is not None:
        return _plan(path, header.product, header.version)
    with extra("lint"):
        import onnx  # noqa: F401
    try:
        return _graph(path)
    except graphs.Unreadable as error:
        raise ConfigError(
            f"{path} {error}", remedy="name an ONNX graph or a TensorRT plan"
        ) from error


def _plan(path: Path, product: str, version: tuple[int, ...]) -> dict[str, Any]:
    fitting = [each.name for each in with_tensorrt(version)] if product == "TensorRT" else []
    facts: dict[str, Any] = {
        "kind": f"{product} plan",
        "built by": f"{product} {'.'.join(map(str, version))}",
        "size_bytes": path.stat().st_size,
        "Triton releases": fitting or "none that is known",
    }
    if (path.parent / ENGINE).is_file():
        facts |= _manifest(path.parent)
    return facts


def _manifest(folder: Path) -> dict[str, Any]:
    """What ``build-trt`` wrote beside the plan."""
    try:
        built = BuiltPlan.read(folder)
    except ConfigError as error:
        return {"manifest": str(error)}
    told = {str(key): str(value) for key, value in built.provenance.items() if value is not None}
    return {"profile": str(built.profile), "half_share": built.half_share, "provenance": told}


def _graph(path: Path) -> dict[str, Any]:
    graph = graphs.read(path)
    opset = graph.opsets.get("", graph.opsets.get("ai.onnx", 0))
    first = first_that_reads(graph.ir_version, opset)
    inputs = [*graph.inputs.values(), *graph.defaults.values()]
    return {
        "kind": "ONNX graph",
        "inputs": [_told(tensor) for tensor in inputs],
        "outputs": [_told(tensor) for tensor in graph.outputs.values()],
        "opset": opset,
        "other opsets": {
            name: v for name, v in graph.opsets.items() if name not in ("", "ai.onnx")
        },
        "ir_version": graph.ir_version,
        "parameters": graph.parameters,
        "weights by type": dict(graph.weight_types),
        "size_bytes": path.stat().st_size,
        "external data": sorted({each.location for each in graph.external}),
        "first Triton release": first.name if first else "none that is known",
    }


def _told(tensor: graphs.Tensor) -> str:
    shape = "of unknown shape" if tensor.shape is None else list(tensor.shape)
    return f"{tensor.name} {tensor.dtype.removeprefix('TYPE_')} {shape}"
