"""CD401–406: inputs and outputs against the graph.

What the server compares, and how, was taken from its behaviour: an input of the config may be narrower than the
graph's, never wider; an output must be equal, and -1 is no wildcard there; names of axes do not matter.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.rules.tensors import is_impossible, listed, tensors
from clip_deploy.triton_schema import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.graph import Graph, Tensor
    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target


@rule(
    "CD401",
    "tensor-not-in-graph",
    Severity.ERROR,
    "The config names an input or output that the graph does not have.",
    bad="input { name: 'images' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def tensor_not_in_graph(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor, known in _against_graph(model):
        if tensor.name and tensor.name not in known:
            near = difflib.get_close_matches(tensor.name, known, n=1, cutoff=0.5)
            right = near[0] if near else next(iter(known)) if len(known) == 1 else None
            message = (
                f"the graph has no {side} {tensor.name!r}; it has {', '.join(known) or 'none'}"
            )
            yield model.hit(
                message, side, index, "name", right=f'name: "{right}"' if right else None
            )


@rule(
    "CD402",
    "input-missing",
    Severity.ERROR,
    "The config lists some inputs and leaves out one that the graph needs.",
    bad=Example(files={"1/model.onnx": "graph with two inputs"}),
    good=Example(),
)
def input_missing(model: Model, target: Target) -> Iterator[Hit]:
    graph = model.graph
    if graph is None or not model.config.input:
        return
    given = {tensor.name for tensor in model.config.input} | _other_inputs(model)
    if given - set(graph.inputs) - set(graph.defaults):
        return  # CD401 says it: most likely a wrong name for what is missing
    for name in (name for name in graph.inputs if name not in given):
        tensor = graph.inputs[name]
        dims = listed(_unbatched(model, tensor.shape or ()))
        yield Hit(
            f"the graph needs an input {name!r}, which the config leaves out",
            model.place("input"),
            remedy=f'add input {{ name: "{name}" data_type: {tensor.dtype} dims: {dims} }}',
        )


def _other_inputs(model: Model) -> set[str]:
    """Inputs that the batcher feeds: batch inputs, sequence controls and states."""
    config = model.config
    names = {name for batch in config.batch_input for name in batch.target_name}
    names |= {control.name for control in config.sequence_batching.control_input}
    return names | {state.input_name for state in config.sequence_batching.state}


@rule(
    "CD403",
    "dtype-differs",
    Severity.ERROR,
    "The config gives a tensor another data type than the graph.",
    bad="output { name: 'image_embeds' data_type: TYPE_FP16 dims: [ 4 ] }",
    good="output { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] }",
)
def dtype_differs(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor, known in _against_graph(model):
        graph_tensor = known.get(tensor.name)
        dtype = dtype_name(tensor.data_type)
        if (
            graph_tensor is None
            or dtype in ("TYPE_INVALID", graph_tensor.dtype)
            or not graph_tensor.dtype
        ):
            continue
        message = f"{tensor.name} is {dtype} here and {graph_tensor.dtype} in the graph"
        right = f"data_type: {graph_tensor.dtype}"
        yield model.hit(message, side, index, "data_type", right=right)


@rule(
    "CD404",
    "dims-differ",
    Severity.ERROR,
    "The config's dims do not fit the graph's shape: inputs may be narrower, outputs must be equal.",
    bad="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def dims_differ(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor, known in _against_graph(model):
        shape = known[tensor.name].shape if tensor.name in known else None
        dims = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else tuple(tensor.dims)
        if (
            not shape
            or not tensor.dims
            or _is_ragged(tensor)
            or _is_batch_output(model, tensor.name)
        ):
            continue
        if model.config.max_batch_size < 0 or any(is_impossible(axis) for axis in dims):
            continue  # CD504 and CD408 say it
        if model.max_batch > 0 and shape[0] != -1:
            continue  # CD406 says it
        full = (-1, *dims) if model.max_batch > 0 else dims
        declared = known[tensor.name].declared
        either = [shape, *([declared] if declared else [])]
        is_loose = side == "output" and model.graph is not None and model.graph.is_foreign
        if any(_fits(full, each, exact=side == "output", loose=is_loose) for each in either):
            continue
        if _has_batch_axis(model, dims, shape):
            continue
        here = f"{listed(full)} here{_with_batch(model)}"
        message = f"{tensor.name} is {here} and {listed(shape)} in the graph"
        yield model.hit(message, side, index, "dims", right=_right_dims(model, tensor, shape))


@rule(
    "CD405",
    "batch-axis-in-dims",
    Severity.ERROR,
    "With max_batch_size above 0 Triton adds the batch axis itself; dims must not have it too. With 0 they must.",
    bad="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ -1, 3, 8, 8 ] }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def batch_axis_in_dims(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor, known in _against_graph(model):
        shape = known[tensor.name].shape if tensor.name in known else None
        if not shape or tensor.HasField("reshape") or _is_ragged(tensor):
            continue
        if (
            model.max_batch > 0
            and shape[0] == -1
            and _has_batch_axis(model, tuple(tensor.dims), shape)
        ):
            adds = f"max_batch_size {model.max_batch} adds it once more"
            message = f"{tensor.name} has the batch axis in dims, and {adds}"
            yield model.hit(message, side, index, "dims", right=_right_dims(model, tensor, shape))


@rule(
    "CD406",
    "graph-cannot-batch",
    Severity.ERROR,
    "max_batch_size above 0 needs a graph whose first axis is free in every input and output.",
    bad=Example(files={"1/model.onnx": "graph of batch 1"}),
    good=Example(files={"1/model.onnx": "graph"}),
)
def graph_cannot_batch(model: Model, target: Target) -> Iterator[Hit]:
    if model.max_batch == 0:
        return
    for _, _, tensor, known in _against_graph(model):
        shape = known[tensor.name].shape if tensor.name in known else None
        if (
            shape
            and shape[0] != -1
            and not _is_ragged(tensor)
            and not _is_batch_output(model, tensor.name)
        ):
            yield Hit(
                f"{tensor.name} is {listed(shape)} in the graph: its batch axis is fixed to {shape[0]}",
                model.place("max_batch_size"),
                remedy="export the graph with a dynamic batch axis; or max_batch_size: 0, and the batch axis in dims",
            )
            return
    if model.graph is not None and not (model.config.input and model.config.output):
        tensors = [*model.graph.inputs.values(), *model.graph.outputs.values()]
        fixed = [t for t in tensors if not t.shape or t.shape[0] != -1]
        if fixed and model.config.max_batch_size > 0:
            yield Hit(
                f"{fixed[0].name} is {listed(fixed[0].shape or ())} in the graph: it cannot batch",
                model.place("max_batch_size"),
                remedy="write max_batch_size: 0",
            )


def _against_graph(model: Model) -> Iterator[tuple[str, int, Any, dict[str, Tensor]]]:
    """(side, index, tensor, the graph's tensors of that side by name), where there is a graph to compare with."""
    graph: Graph | None = model.graph
    if graph is None:
        return
    known = {"input": graph.inputs | graph.defaults, "output": graph.outputs}
    for side, index, tensor in tensors(model):
        yield side, index, tensor, known[side]


def _fits(
    full: tuple[int, ...], shape: tuple[int, ...], *, exact: bool, loose: bool = False
) -> bool:
    """Whether dims fit a shape; ``loose`` where a free axis may be fixed in truth."""
    if len(full) != len(shape):
        return False
    is_free = loose or not exact
    return all(here == there or (there == -1 and is_free) for here, there in zip(full, shape))


def _has_batch_axis(model: Model, dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether dims fit the graph's whole shape, batch axis included, although Triton adds one."""
    return (
        model.max_batch > 0
        and len(dims) == len(shape)
        and _fits(dims[1:], shape[1:], exact=False)
        and dims[0] < 2
    )


def _unbatched(model: Model, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if model.max_batch > 0 else shape


def _right_dims(model: Model, tensor: Any, shape: tuple[int, ...]) -> str | None:
    """How dims would fit; not known for a tensor that is reshaped."""
    is_reshaped = tensor.HasField("reshape")
    return None if is_reshaped else f"dims: {listed(_unbatched(model, shape))}"


def _is_ragged(tensor: Any) -> bool:
    """Whether rows of several sizes are joined end to end; a field that inputs have and outputs lack."""
    return bool(getattr(tensor, "allow_ragged_batch", False))


def _is_batch_output(model: Model, name: str) -> bool:
    return any(name in batch.target_name for batch in model.config.batch_output)


def _with_batch(model: Model) -> str:
    return " (with the batch axis that max_batch_size adds)" if model.max_batch > 0 else ""
