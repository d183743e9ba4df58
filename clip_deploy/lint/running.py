"""A graph run on the CPU at several batch sizes, on made-up data (``--run``): what reading it cannot show."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import extra

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.lint.model import Model

# One row changes by less than this, relative to its size, when its neighbours change: other kernels for other batches.
_TOLERANCE = 1e-3
# A varying axis of an input that is not the batch axis gets this size.
_VARYING = 4
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What running showed.

    Args:
        failures: batch size → what ONNX Runtime said.
        shapes: batch size → output → shape.
        influence: outputs of which one row depends on its neighbours, with the relative change.
        refused: why nothing could be found out, when made-up data is not good enough for the graph.
    """

    failures: dict[int, str] = field(default_factory=dict)
    shapes: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    influence: dict[str, float] = field(default_factory=dict)
    refused: str | None = None


def run(model: Model, path: Path) -> RunFacts:
    """Run a graph at batches 1, 2 and the model's largest, or once, where the model does not batch."""
    inputs = tuple(
        (
            tensor.name,
            _numpy(tensor.data_type),
            tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims),
        )
        for tensor in model.config.input
    )
    if not inputs and model.graph is not None:
        skip = 1 if model.max_batch else 0
        inputs = tuple(
            (t.name, _NUMPY.get(t.dtype, ""), (t.shape or ())[skip:])
            for t in model.graph.inputs.values()
        )
    return _run(str(path), path.stat().st_mtime_ns, inputs, model.max_batch)


_NUMPY = {
    "TYPE_BOOL": "bool",
    "TYPE_UINT8": "uint8",
    "TYPE_UINT16": "uint16",
    "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64",
    "TYPE_INT8": "int8",
    "TYPE_INT16": "int16",
    "TYPE_INT32": "int32",
    "TYPE_INT64": "int64",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
}


def _numpy(data_type: int) -> str:
    from clip_deploy.triton_schema import dtype_name

    return _NUMPY.get(dtype_name(data_type), "")


@functools.lru_cache(maxsize=256)
def _run(
    path: str, changed: int, inputs: tuple[tuple[str, str, tuple[int, ...]], ...], most: int
) -> RunFacts:
    with extra("server"):
        import onnxruntime

    if not inputs or any(not dtype for _, dtype, _ in inputs):
        return RunFacts(refused="it takes data that cannot be made up")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base
        return RunFacts(
            refused=f"ONNX Runtime {onnxruntime.__version__} does not load it: {_first(error)}"
        )
    names = [output.name for output in session.get_outputs()]
    rows = min(most, _MOST_ROWS) or 1
    data = {name: _made(dtype, dims, rows, batched=most > 0) for name, dtype, dims in inputs}
    facts = RunFacts()
    answers: dict[int, Any] = {}
    for size in sorted({1, min(2, rows), rows}):
        given = {name: values[:size] for name, values in data.items()} if most else data
        try:
            answers[size] = session.run(None, given)
        except Exception as error:  # see above
            facts.failures[size] = _first(error)
        else:
            facts.shapes[size] = {name: tuple(v.shape) for name, v in zip(names, answers[size])}
    if 1 in facts.failures:
        return RunFacts(refused=f"it refuses made-up data: {facts.failures[1]}")
    if most > 1 and rows in answers:
        facts.influence.update(_influence(session, names, data, answers, rows))
    return facts


def _made(dtype: str, dims: tuple[int, ...], rows: int, *, batched: bool) -> Any:
    """Rows that differ from one another: small numbers, and only 0 and 1 for integers, which may be indices."""
    import numpy as np

    sizes = [_VARYING if axis < 1 else axis for axis in dims]
    if not batched and dims and dims[0] < 1:
        sizes[0] = 1
    shape = [rows, *sizes] if batched else sizes
    random = np.random.default_rng(0)
    if dtype.startswith("float"):
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)


def _influence(
    session: Any, names: list[str], data: dict[str, Any], answers: dict[int, Any], rows: int
) -> dict[str, float]:
    """Compare the first row alone with the first row in company; a graph that differs from itself says nothing."""
    import numpy as np

    alone = session.run(None, {name: values[:1] for name, values in data.items()})
    found = {}
    for name, first, again, full in zip(names, answers[1], alone, answers[rows]):
        if (
            not np.issubdtype(first.dtype, np.floating)
            or first.shape[:1] != (1,)
            or full.shape[:1] != (rows,)
        ):
            continue
        size = float(np.abs(first).max()) or 1.0
        if np.array_equal(first, again, equal_nan=True) and first.shape[1:] == full.shape[1:]:
            change = float(np.abs(first[0].astype(np.float64) - full[0]).max()) / size
            if not change <= _TOLERANCE:
                found[name] = change
    return found


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
