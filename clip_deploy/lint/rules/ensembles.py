"""CD80x: ensembles, step by step, against the models that they name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.triton_schema import DataType, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

HEAD = """name: "clip_pipeline"
platform: "ensemble"
max_batch_size: 8
input { name: "raw" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 4 ] }
"""
STEP = """ensemble_scheduling { step {
  model_name: "clip_image" model_version: -1
  input_map { key: "pixel_values" value: "raw" }
  output_map { key: "image_embeds" value: "embedding" }
} }
"""


def some(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def pipeline(old: str = "", new: str = "", head: str = HEAD) -> Example:
    """An ensemble around the model of the examples, with one thing changed."""
    return Example(
        models={"clip_pipeline": (head + STEP).replace(old, new) if old else head + STEP}
    )


@rule(
    "CD801",
    "step-model-missing",
    Severity.ERROR,
    "A step names a model, or a version of it, that the repository does not serve.",
    bad=pipeline('model_name: "clip_image"', 'model_name: "clip_images"'),
    good=pipeline(),
)
def step_model_missing(model: Model, target: Target) -> Iterator[Hit]:
    known = model.repository.known
    for index, step in steps(model):
        name, version = step.model_name, step.model_version
        if name and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            message = f"there is no model {name!r} in the repository; it has {some(known)}"
            right = f'model_name: "{near[0]}"' if near else None
            yield model.hit(
                message, "ensemble_scheduling", "step", index, "model_name", right=right
            )
        elif name and version != -1 and version not in known[name].served:
            served = ", ".join(map(str, known[name].served)) or "none"
            path = ("ensemble_scheduling", "step", index, "model_version")
            asked = version if model.fields(*path) else "0, as none is written; -1 is the newest"
            message = f"{name} serves version {served}, the step asks for {asked}"
            yield model.hit(message, *path, right="model_version: -1")


@rule(
    "CD802",
    "step-incomplete",
    Severity.ERROR,
    "Every step has a model_name, an input_map and an output_map, and an ensemble has a step.",
    bad=pipeline('  output_map { key: "image_embeds" value: "embedding" }\n', ""),
    good=pipeline(),
)
def step_incomplete(model: Model, target: Target) -> Iterator[Hit]:
    if not model.config.HasField("ensemble_scheduling"):
        return
    if not model.config.ensemble_scheduling.step:
        yield Hit("the ensemble has no step", model.place("ensemble_scheduling"))
    for index, step in steps(model):
        wanted = {
            "model_name": step.model_name,
            "input_map": step.input_map,
            "output_map": step.output_map,
        }
        lacking = [name for name, value in wanted.items() if not value]
        if lacking:
            yield Hit(
                f"the step lacks {' and '.join(lacking)}",
                model.place("ensemble_scheduling", "step", index),
            )


@rule(
    "CD803",
    "step-tensor-unknown",
    Severity.ERROR,
    "A map's key is an input or output of the step's model.",
    bad=pipeline('key: "pixel_values"', 'key: "images"'),
    good=pipeline(),
)
def step_tensor_unknown(model: Model, target: Target) -> Iterator[Hit]:
    for index, step, member in members(model):
        for side, mapping in (("input", step.input_map), ("output", step.output_map)):
            known = _tensors(member, side)
            for key in mapping:
                if known and key not in known:
                    place = model.place("ensemble_scheduling", "step", index, f"{side}_map")
                    yield Hit(
                        f"{member.name} has no {side} {key!r}; it has {', '.join(known)}", place
                    )


@rule(
    "CD804",
    "step-input-unmapped",
    Severity.ERROR,
    "Every input that a model needs must be mapped in its step.",
    bad=Example(
        files={"1/model.onnx": "graph with two inputs"},
        config="input [ { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] },\n"
        "        { name: 'mask' data_type: TYPE_FP32 dims: [ 4 ] } ]",
        models={"clip_pipeline": HEAD + STEP},
    ),
    good=pipeline(),
)
def step_input_unmapped(model: Model, target: Target) -> Iterator[Hit]:
    for index, step, member in members(model):
        known = _tensors(member, "input")
        if set(step.input_map) - set(known):
            continue  # CD803 says it: most likely a wrong name for what is missing
        for name, tensor in known.items():
            if name not in step.input_map and not tensor.optional:
                place = model.place("ensemble_scheduling", "step", index)
                yield Hit(f"the step maps nothing to {member.name}'s input {name!r}", place)


@rule(
    "CD806",
    "step-tensor-differs",
    Severity.ERROR,
    "Two models that share a tensor agree on its type and shape; -1 goes with everything.",
    bad=pipeline("TYPE_FP32 dims: [ 4 ]", "TYPE_FP16 dims: [ 4 ]"),
    good=pipeline(),
)
def step_tensor_differs(model: Model, target: Target) -> Iterator[Hit]:
    seen = {
        tensor.name: _Seen(model.name, tensor.data_type, _dims(tensor), model.max_batch > 0)
        for tensor in (*model.config.input, *model.config.output)
    }
    for index, step, member in members(model):
        for side, mapping in (("input", step.input_map), ("output", step.output_map)):
            known = _tensors(member, side)
            for key, name in mapping.items():
                if key not in known:
                    continue
                here = _Seen(
                    member.name, known[key].data_type, tuple(known[key].dims), member.max_batch > 0
                )
                there = seen.setdefault(name, here)
                if (complaint := there.differs(here)) is not None:
                    place = model.place("ensemble_scheduling", "step", index, f"{side}_map")
                    yield Hit(f"the tensor {name!r} {complaint}", place)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a model says of a tensor that it shares."""

    model: str
    data_type: int
    dims: tuple[int, ...]
    batched: bool

    def differs(self, other: _Seen) -> str | None:
        if self.data_type != other.data_type:
            mine, theirs = dtype_name(self.data_type), dtype_name(other.data_type)
            return f"is {mine} in {self.model} and {theirs} in {other.model}"
        if _alike(self.dims, other.dims) or _alike(self._full(), other._full()):
            return None
        return f"is {list(self._full())} in {self.model} and {list(other._full())} in {other.model}"

    def _full(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batched else self.dims


def _alike(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x == y or -1 in (x, y) for x, y in zip(a, b))


@rule(
    "CD807",
    "ensemble-batch",
    Severity.ERROR,
    "An ensemble batches no more rows than each of its models.",
    bad=pipeline("max_batch_size: 8", "max_batch_size: 32"),
    good=pipeline(),
)
def ensemble_batch(model: Model, target: Target) -> Iterator[Hit]:
    most = model.config.max_batch_size
    for _, _, member in members(model):
        if member.max_batch and member.max_batch < most:
            message = (
                f"the ensemble batches {most}, its model {member.name} only {member.max_batch}"
            )
            yield model.hit(message, "max_batch_size", right=f"max_batch_size: {member.max_batch}")


@rule(
    "CD808",
    "ensemble-options",
    Severity.ERROR,
    "An ensemble has platform ensemble and ensemble_scheduling, and no instances, optimization or warmup of its own.",
    bad=pipeline(head=HEAD + "instance_group { count: 1 }\n"),
    good=pipeline(),
)
def ensemble_options(model: Model, target: Target) -> Iterator[Hit]:
    config, scheduled = model.config, model.config.HasField("ensemble_scheduling")
    if not scheduled:
        if config.platform == "ensemble":
            yield Hit(
                "platform is ensemble, and there is no ensemble_scheduling", model.place("platform")
            )
        return
    if config.platform != "ensemble":
        place = model.place("platform") or model.place("ensemble_scheduling")
        yield Hit(
            "ensemble_scheduling needs a platform of ensemble",
            place,
            remedy='write platform: "ensemble"',
        )
        return
    for name, has in (
        ("instance_group", bool(config.instance_group)),
        ("optimization", config.HasField("optimization")),
        ("model_warmup", bool(config.model_warmup)),
    ):
        if has:
            yield Hit(f"an ensemble has no {name} of its own", model.place(name))


def steps(model: Model) -> list[tuple[int, Any]]:
    return list(enumerate(model.config.ensemble_scheduling.step))


def members(model: Model) -> Iterator[tuple[int, Any, Model]]:
    """(index, step, its model), for models that are there and can be read."""
    for index, step in steps(model):
        member = model.repository.known.get(step.model_name)
        if member is not None and member.is_parsed:
            yield index, step, member


@dataclass(frozen=True, slots=True)
class _Completed:
    """A tensor that Triton takes from the graph because the config does not list it."""

    data_type: int
    dims: tuple[int, ...]
    optional: bool = False


def _tensors(model: Model, side: str) -> dict[str, Any]:
    """A model's inputs or outputs, from its config, else from its graph."""
    listed = {tensor.name: tensor for tensor in getattr(model.config, side)}
    if listed or model.graph is None:
        return listed
    found = model.graph.inputs if side == "input" else model.graph.outputs
    skip = 1 if model.max_batch > 0 else 0
    return {
        name: _Completed(DataType.Value(tensor.dtype), (tensor.shape or ())[skip:])
        for name, tensor in found.items()
        if tensor.dtype
    }


def _dims(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else tuple(tensor.dims)
