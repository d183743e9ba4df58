"""CD407–414: inputs and outputs in themselves."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from clip_deploy.lint.disk import inside
from clip_deploy.lint.findings import Example, Hit, Severity, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

SIDES = ("input", "output")


@rule(
    "CD407",
    "tensor-incomplete",
    Severity.ERROR,
    "Every input and output needs a name, a data_type and dims.",
    bad="output { name: 'image_embeds' dims: [ 4 ] }",
    good="output { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] }",
)
def tensor_incomplete(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor in tensors(model):
        needed = {"name": tensor.name, "data_type": tensor.data_type, "dims": tensor.dims}
        lacking = [field for field, value in needed.items() if not value]
        if lacking and not (tensor.name and model.completes_itself):
            yield Hit(f"this {side} lacks {' and '.join(lacking)}", model.place(side, index))


@rule(
    "CD408",
    "dims-not-possible",
    Severity.ERROR,
    "An axis has a size of 1 or more, or -1 where it varies.",
    bad="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 0, 8 ] }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def dims_not_possible(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor in tensors(model):
        for name, values in (("dims", tensor.dims), ("reshape", tensor.reshape.shape)):
            wrong = [value for value in values if is_impossible(value)]
            if wrong:
                yield Hit(
                    f"{tensor.name} has an axis of size {wrong[0]} in {name}",
                    model.place(side, index, name),
                )


@rule(
    "CD409",
    "reshape-differs",
    Severity.ERROR,
    "A reshape has as many elements as dims, between any two varying axes.",
    bad="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 100 ] reshape { shape: [ 3, 8, 8 ] } }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 192 ] reshape { shape: [ 3, 8, 8 ] } }",
)
def reshape_differs(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor in tensors(model):
        if not tensor.HasField("reshape") or not tensor.dims:
            continue
        dims, shape = tuple(tensor.dims), tuple(tensor.reshape.shape)
        if not shape and model.config.max_batch_size == 0:
            message = "an empty reshape needs max_batch_size above 0: Triton has no scalars"
        elif shape and _stretches(dims) != _stretches(shape):
            message = f"{tensor.name} has {listed(dims)} and is reshaped to {listed(shape)}: not as many elements"
        elif not shape and prod(dims) != 1:
            message = f"{tensor.name} has {listed(dims)} and is reshaped to a scalar"
        else:
            continue
        yield Hit(message, model.place(side, index, "reshape"))


@rule(
    "CD410",
    "optional-and-batched",
    Severity.ERROR,
    "The ONNX Runtime backend takes optional inputs only where max_batch_size is 0.",
    bad="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] optional: true }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def optional_and_batched(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend != "onnxruntime":
        return
    for index, tensor in enumerate(model.config.input):
        if tensor.optional and model.max_batch > 0:
            yield Hit(
                f"{tensor.name} is optional in a model that batches",
                model.place("input", index, "optional"),
            )
        elif tensor.optional and model.graph is not None and tensor.name in model.graph.inputs:
            message = f"{tensor.name} is optional here, and the graph has no default for it"
            yield Hit(message, model.place("input", index, "optional"))


@rule(
    "CD411",
    "tensor-twice",
    Severity.WARNING,
    "Two inputs or two outputs have the same name; one of them does not count.",
    bad="output [ { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] },\n"
    "         { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] } ]",
    good="output [ { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] } ]",
)
def tensor_twice(model: Model, target: Target) -> Iterator[Hit]:
    for side in SIDES:
        if side == "input" and model.backend == "onnxruntime":
            continue  # CD412 says it
        names = [tensor.name for tensor in getattr(model.config, side)]
        for index, name in enumerate(names):
            if name and name in names[:index]:
                yield Hit(f"the {side} {name!r} stands twice", model.place(side, index))


@rule(
    "CD412",
    "input-twice",
    Severity.ERROR,
    "The ONNX Runtime backend counts the inputs, and a repeated one makes them too many.",
    bad="input [ { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] },\n"
    "        { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]",
    good="input [ { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]",
)
def input_twice(model: Model, target: Target) -> Iterator[Hit]:
    names = [tensor.name for tensor in model.config.input]
    if model.backend == "onnxruntime" and len(set(names)) < len(names):
        yield Hit(
            "an input stands twice, and the backend expects one",
            model.place("input", len(names) - 1),
        )


@rule(
    "CD413",
    "tensor-option-of-another-backend",
    Severity.ERROR,
    "An option of this tensor works with other backends or other shapes only.",
    bad="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] is_shape_tensor: true }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def option_of_another_backend(model: Model, target: Target) -> Iterator[Hit]:
    for side, index, tensor in tensors(model):
        if tensor.is_shape_tensor and model.backend not in ("tensorrt", ""):
            yield Hit(
                "is_shape_tensor is for TensorRT only", model.place(side, index, "is_shape_tensor")
            )
        linear = not getattr(tensor, "is_non_linear_format_io", False)
        if not linear and model.backend not in ("tensorrt", ""):
            place = model.place(side, index, "is_non_linear_format_io")
            yield Hit("is_non_linear_format_io is for TensorRT only", place)
        if side == "input" and tensor.format and len(tensor.dims) != 3:
            yield Hit(
                "a format of NCHW or NHWC needs three dims", model.place(side, index, "format")
            )


@rule(
    "CD414",
    "labels-missing",
    Severity.ERROR,
    "A label file is read when the model is loaded.",
    bad="output { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] label_filename: 'labels.txt' }",
    good=Example(
        config="output { name: 'image_embeds' data_type: TYPE_FP32 dims: [ 4 ] label_filename: 'labels.txt' }",
        files={"labels.txt": "cat\ndog\nbird\nfish\n"},
    ),
)
def labels_missing(model: Model, target: Target) -> Iterator[Hit]:
    for index, tensor in enumerate(model.config.output):
        name = tensor.label_filename
        if name and not inside(model.folder, name).is_file():
            yield Hit(
                f"the label file {name} is not there",
                model.place("output", index, "label_filename"),
            )


def tensors(model: Model) -> Iterator[tuple[str, int, Any]]:
    """(side, index, tensor) of everything that the config lists."""
    for side in SIDES:
        for index, tensor in enumerate(getattr(model.config, side)):
            yield side, index, tensor


def is_impossible(axis: int) -> bool:
    """Whether an axis has a size that no tensor has."""
    return axis < 1 and axis != -1


def listed(values: tuple[int, ...]) -> str:
    """Dims as they stand in a config."""
    return f"[ {', '.join(map(str, values))} ]"


def _stretches(dims: tuple[int, ...]) -> list[int]:
    """Elements between varying axes: [2, 4, -1, 6] → [8, 6]."""
    counts = [1]
    for axis in dims:
        if axis == -1:
            counts.append(1)
        else:
            counts[-1] *= axis
    return counts
