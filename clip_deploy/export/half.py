"""FP32 graph → FP16 graph with FP32 inputs and outputs, and a rehearsal of it that rounds where a GPU rounds.

Precision is the graph's, not the builder's: TensorRT 11 has no FP16 switch, so the types of the graph's tensors decide.

ONNX Runtime's CPU has no FP16 kernels for most operators: it runs them in FP32 and drops the casts between them, so a
graph that overflows on a GPU gives right answers there, and nothing can be learned from them. ``rehearsal`` writes the
same graph in FP32 with every FP16 result rounded to FP16 by a pair of casts, which ONNX Runtime keeps.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.errors import ExportError, extra
from clip_deploy.export.graph import DATA, FILE

with extra("export"):
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.transformers import float16
    from onnxruntime.transformers.onnx_model import OnnxModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# Operators that stay in FP32, and why.
KEPT_OPERATORS = {
    **dict.fromkeys(
        ("LayerNormalization", "GroupNormalization", "InstanceNormalization"),
        "the squares of a normalisation leave FP16's range",
    ),
    **dict.fromkeys(("Pow", "Sqrt", "ReduceL2", "ReduceSumSquare"), "squares leave FP16's range"),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Exp", "Log"), "exponentials lose their digits"),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "GlobalAveragePool"), "a sum of many terms loses digits"
    ),
    **dict.fromkeys(("ArgMax", "ArgMin"), "above 2048, FP16 does not tell neighbours apart"),
}
# FP16 ends at 65504; inputs that were not measured may be some times larger than those that were.
FP16_LIMIT = 65504.0
NEAR_THE_LIMIT = FP16_LIMIT / 8
# Operators that move values and compute none: what goes in rounded comes out rounded.
_MOVES = {
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat", "Expand"),
    *("Gather", "GatherND", "GatherElements", "Flatten", "Identity", "Constant", "Tile"),
}
# Operators whose sums run over many products; a GPU may add them up in FP16.
_SUMS = ("MatMul", "Gemm", "Conv")
_INTEGERS = {TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL}
_REHEARSAL = "rehearsal.onnx"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did: node → why it stays in FP32, the largest value that any FP16 node met, casts put in."""

    kept: dict[str, str]
    largest: float
    casts: int

    def to_json(self) -> dict[str, Any]:
        return {"casts": self.casts, "largest_fp16_value": self.largest, "kept_fp32": self.kept}


def convert(folder: Path, input_name: str, inputs: list[NDArray[Any]]) -> Conversion:
    """Replace the FP32 graph in ``folder`` by its FP16 form, weights outside (``graph.finish`` puts them in).

    Args:
        input_name: the graph's input.
        inputs: arrays ``[n, …]`` to measure ranges on: the reference, and the user's own where there are some.

    Raises:
        ExportError: the result is not a well-typed graph.
    """
    _prepare(folder / FILE)
    model = _typed(folder / FILE)
    peaks = _peaks(model, folder, input_name, inputs)
    onnx.load_external_data_for_model(model, str(folder))
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            peaks[tensor.name] = _largest(numpy_helper.to_array(tensor))
    kept = _kept(model.graph, peaks, _types(model))
    ours = {node.name for node in model.graph.node}
    with _quiet():
        half = float16.convert_float_to_float16(
            model,
            keep_io_types=True,
            disable_shape_infer=True,
            op_block_list=[*float16.DEFAULT_OP_BLOCK_LIST, *KEPT_OPERATORS],
            node_block_list=list(kept),
        )
    _join(half.graph, ours)
    OnnxModel.graph_topological_sort(half.graph)
    del half.graph.value_info[:]
    (folder / DATA).unlink(missing_ok=True)
    _save(half, folder / FILE)
    _require_types(folder / FILE)
    met = [
        peaks.get(name, 0.0)
        for node in model.graph.node
        if node.name not in kept
        for name in (*node.input, *node.output)
    ]
    casts = sum(node.op_type == "Cast" for node in half.graph.node)
    return Conversion(kept, max(met, default=0.0), casts)


def _prepare(path: Path) -> None:
    """Make the graph one that the converter treats rightly: no branches, names for all nodes, constants as tensors."""
    model = onnx.load(path, load_external_data=False)
    seen: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type} {number}"
        seen.add(node.name)
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise ExportError(
                f"the graph has branches ({node.op_type}), which cannot be converted to FP16",
                remedy="export it with --precision fp32",
            )
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                values = np.asarray(helper.get_attribute_value(attribute), np.float32)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(values)))
    path.write_bytes(model.SerializeToString())


def _peaks(
    structure: onnx.ModelProto, folder: Path, input_name: str, inputs: list[NDArray[Any]]
) -> dict[str, float]:
    """Tensor → its largest finite magnitude over all inputs; for a node that adds up products, its name → Σ|x·w|.

    Infinities are masks, and FP16 has them, too.
    """
    names = [value.name for value in structure.graph.input]
    names += [name for node in structure.graph.node for name in node.output]
    types = _types(structure)
    floats = [name for name in names if types.get(name) == TensorProto.FLOAT]
    probe = onnx.ModelProto()
    probe.CopyFrom(structure)
    zero = numpy_helper.from_array(np.zeros((), np.float32), "peak zero")
    probe.graph.initializer.append(zero)
    del probe.graph.output[:]
    for node in structure.graph.node:
        if node.op_type in _SUMS and types.get(node.output[0]) == TensorProto.FLOAT:
            floats.append(_add_sum(probe, node))
    for name in floats:
        probe.graph.node.extend(
            [
                helper.make_node("IsInf", [name], [f"{name} is infinite"]),
                helper.make_node("Abs", [name], [f"{name} magnitude"]),
                helper.make_node(
                    "Where",
                    [f"{name} is infinite", zero.name, f"{name} magnitude"],
                    [f"{name} finite"],
                ),
                helper.make_node("ReduceMax", [f"{name} finite"], [f"{name} peak"], keepdims=0),
            ]
        )
        probe.graph.output.append(
            helper.make_tensor_value_info(f"{name} peak", TensorProto.FLOAT, [])
        )
    path = folder / "peaks.onnx"
    onnx.save(probe, path)
    try:
        session = _session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
        rows = [array[at : at + 4] for array in inputs for at in range(0, len(array), 4)]
        found = np.max([np.stack(session.run(None, {input_name: batch})) for batch in rows], axis=0)
    finally:
        path.unlink()
    return dict(zip(floats, map(float, found)))


def _add_sum(probe: onnx.ModelProto, node: onnx.NodeProto) -> str:
    """Add the node once more, on magnitudes; returns the name of its result, which no partial sum exceeds."""
    twin = onnx.NodeProto()
    twin.CopyFrom(node)
    twin.name = twin.output[0] = _sum_of(node)
    for index, name in enumerate(node.input):
        if name:
            twin.input[index] = f"{twin.name} {index}"
            probe.graph.node.append(helper.make_node("Abs", [name], [twin.input[index]]))
    probe.graph.node.append(twin)
    return twin.name


def _sum_of(node: onnx.NodeProto) -> str:
    return f"{node.name} in magnitudes"


def _kept(graph: onnx.GraphProto, peaks: dict[str, float], types: dict[str, int]) -> dict[str, str]:
    """Node → why it stays in FP32; nodes that compute no floats are not named."""
    kept: dict[str, str] = {}
    norms = [node for node in graph.node if node.op_type == "ReduceL2"]
    last: set[str] = set(norms[-1].output) if norms else set()
    for node in graph.node:
        names = [name for name in (*node.input, *node.output) if name in peaks]
        if not names:
            continue
        peak = float(np.max([peaks[name] for name in names]))  # NaN wins
        total = peaks.get(_sum_of(node), 0.0)
        if last & set(node.input) or last & set(node.output):
            last |= set(node.output)
            kept[node.name] = "the final normalisation"
        elif node.op_type in KEPT_OPERATORS:
            kept[node.name] = KEPT_OPERATORS[node.op_type]
        elif not peak <= NEAR_THE_LIMIT:
            kept[node.name] = f"its values reach {peak:.3g}, and FP16 ends at 65504"
        elif not total <= FP16_LIMIT:
            kept[node.name] = f"its partial sums may reach {total:.3g}, and FP16 ends at 65504"
        elif node.op_type == "Cast" and types.get(node.input[0]) in _INTEGERS:
            kept[node.name] = "above 2048, FP16 does not hold every whole number"
        elif node.op_type in float16.DEFAULT_OP_BLOCK_LIST:
            kept[node.name] = f"{node.op_type} has no FP16 form everywhere"
    return kept


def _join(graph: onnx.GraphProto, ours: set[str]) -> None:
    """Connect neighbours that both stay in FP32; the converter rounds what passes between them to FP16 and back.

    Only the converter's own casts are taken away, never those of the model, whose names are ``ours``.
    """
    casts = {
        node.output[0]: (node, attribute.i)
        for node in graph.node
        if node.op_type == "Cast" and node.name not in ours
        for attribute in node.attribute
        if attribute.name == "to"
    }
    direct = {}
    for name, (node, to) in casts.items():
        source, through = casts.get(node.input[0], (None, None))
        if to == TensorProto.FLOAT and source is not None and through == TensorProto.FLOAT16:
            direct[name] = source.input[0]
    for node in graph.node:
        node.input[:] = [direct.get(name, name) for name in node.input]
    wanted = {value.name for value in graph.output}
    for name in wanted & direct.keys():
        node, _ = casts[name]
        node.op_type = "Identity"
        node.input[:] = [direct[name]]
        del node.attribute[:]
    for _ in range(2):  # a cast back, and then the cast that nobody else reads
        used = wanted.union(*(node.input for node in graph.node))
        dead = {name for name in casts if name not in used}
        for node in [n for n in graph.node if n.op_type == "Cast" and n.output[0] in dead]:
            graph.node.remove(node)


def _largest(values: NDArray[Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def rehearsal(graph: Path) -> Path:
    """Write the FP32 graph that rounds as the FP16 graph does; the caller removes it and its weights.

    Every result that the FP16 graph stores in FP16 is rounded to it, and leaves its range where it would. Sums inside
    an operator are exact here; that a GPU's own cannot leave the range is what ``convert`` measures.
    """
    model = _typed(graph)
    types = _types(model)
    onnx.load_external_data_for_model(model, str(graph.parent))
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(_as_float(tensor))
    nodes = [new for node in model.graph.node for new in _rounding(node, types)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.value_info[:]
    path = graph.with_name(_REHEARSAL)
    _save(model, path)
    return path


def forget_rehearsal(path: Path) -> None:
    """Remove what ``rehearsal`` wrote."""
    for each in (path, path.with_name(f"{path.name}.data")):
        each.unlink(missing_ok=True)


def _rounding(node: onnx.NodeProto, types: dict[str, int]) -> Iterator[onnx.NodeProto]:
    """The node in FP32, and the casts that round its results."""
    for attribute in node.attribute:
        if attribute.t.data_type == TensorProto.FLOAT16:
            attribute.t.CopyFrom(_as_float(attribute.t))
    halves = [
        name
        for name in node.output
        if types.get(name) == TensorProto.FLOAT16 and node.op_type not in _MOVES
    ]
    if node.op_type == "Cast":
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    for index, name in enumerate(node.output):
        if name in halves:
            node.output[index] = f"{name} exact"
    yield node
    for name in halves:
        yield helper.make_node("Cast", [f"{name} exact"], [f"{name} half"], to=TensorProto.FLOAT16)
        yield helper.make_node("Cast", [f"{name} half"], [name], to=TensorProto.FLOAT)


def _as_float(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


def _typed(graph: Path, *, strict: bool = False) -> onnx.ModelProto:
    """The graph with the type of every tensor; weights that lie outside stay there."""
    path = graph.with_name("typed.onnx")
    try:
        onnx.shape_inference.infer_shapes_path(str(graph), str(path), strict, strict)
        return onnx.load(path, load_external_data=False)
    finally:
        path.unlink(missing_ok=True)


def _types(model: onnx.ModelProto) -> dict[str, int]:
    graph = model.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _require_types(graph: Path) -> None:
    """Type inference over the whole graph: a builder that is strongly typed refuses mixed types."""
    try:
        _typed(graph, strict=True)
    except onnx.shape_inference.InferenceError as error:
        raise ExportError(
            f"the FP16 graph mixes types: {str(error).strip().splitlines()[0][:200]}",
            remedy="export it with --precision fp32, and report the model's name",
        ) from error


def _save(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph with its weights in one file beside it."""
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=f"{path.name}.data",
        size_threshold=1024,
    )


def _session(path: Path, level: Any) -> onnxruntime.InferenceSession:
    """A session; without optimisation it keeps no copies of weights whose magnitudes are asked for."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The converter warns of every weight that rounds to zero."""
    logger = logging.getLogger(float16.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
