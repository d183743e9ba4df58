"""CD6xx: instance groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.triton_schema import enum_name, model_config_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_KINDS = model_config_pb2.ModelInstanceGroup


@rule(
    "CD601",
    "gpu-on-cpu",
    Severity.ERROR,
    "KIND_GPU needs a GPU; on a machine without one Triton refuses the model.",
    bad="instance_group { kind: KIND_GPU }",
    good="instance_group { kind: KIND_CPU }",
)
def gpu_on_cpu(model: Model, target: Target) -> Iterator[Hit]:
    if target.gpu or model.is_ensemble:
        return
    for index, group in enumerate(model.config.instance_group):
        if group.kind == _KINDS.KIND_AUTO and group.gpus:
            yield Hit(
                f"gpus {list(group.gpus)}, and the target has no GPU",
                model.place("instance_group", index, "gpus"),
            )
        if group.kind == _KINDS.KIND_GPU:
            message = "KIND_GPU, and the target has no GPU"
            yield model.hit(message, "instance_group", index, "kind", right="kind: KIND_CPU")


@rule(
    "CD606",
    "half-on-cpu",
    Severity.WARNING,
    "On a CPU, ONNX Runtime computes FP16 graphs in FP32, and some of its versions die of them.",
    bad=Example(files={"1/model.onnx": "graph in FP16"}),
    good=Example(files={"1/model.onnx": "graph"}),
)
def half_on_cpu(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend != "onnxruntime" or model.graph is None or not model.graph.is_half:
        return
    groups = list(model.config.instance_group)
    on_cpu = [i for i, group in enumerate(groups) if group.kind == _KINDS.KIND_CPU]
    if on_cpu or not target.gpu:
        place = model.place("instance_group", on_cpu[0], "kind") if on_cpu else None
        remedy = "serve it on a GPU, or export it with --precision fp32"
        yield Hit("an FP16 graph on a CPU", place, remedy=remedy)


@rule(
    "CD602",
    "gpus-without-gpu",
    Severity.ERROR,
    "gpus belong to KIND_GPU and count from 0; with KIND_CPU or KIND_MODEL Triton refuses them.",
    bad="instance_group { kind: KIND_CPU gpus: [ 0 ] }",
    good="instance_group { kind: KIND_CPU }",
)
def gpus_without_gpu(model: Model, target: Target) -> Iterator[Hit]:
    for index, group in enumerate(model.config.instance_group):
        negative = [gpu for gpu in group.gpus if gpu < 0]
        if negative:
            place = model.place("instance_group", index, "gpus")
            yield Hit(f"there is no GPU {negative[0]}", place)
        elif group.gpus and group.kind in (_KINDS.KIND_CPU, _KINDS.KIND_MODEL):
            message = f"gpus {list(group.gpus)} with {enum_name(_KINDS.Kind, group.kind)}"
            yield model.hit(message, "instance_group", index, "gpus", right="")


@rule(
    "CD603",
    "fixed-gpus",
    Severity.WARNING,
    "Fixed GPU ids fail on a machine with fewer of them; without the list Triton uses all that are there.",
    bad=Example("instance_group { gpus: [ 0 ] }", gpu=True),
    good=Example("instance_group { count: 1 }", gpu=True),
)
def fixed_gpus(model: Model, target: Target) -> Iterator[Hit]:
    for index, group in enumerate(model.config.instance_group):
        if target.gpu and group.gpus and group.kind in (_KINDS.KIND_GPU, _KINDS.KIND_AUTO):
            yield Hit(
                f"the ids {list(group.gpus)} are fixed",
                model.place("instance_group", index, "gpus"),
            )


@rule(
    "CD604",
    "many-instances",
    Severity.NOTE,
    "Each instance holds the whole model; more than one rarely pays where one already uses the device fully.",
    bad="instance_group { count: 4 }",
    good="instance_group { count: 1 }",
)
def many_instances(model: Model, target: Target) -> Iterator[Hit]:
    for index, group in enumerate(model.config.instance_group):
        if group.count > 1:
            yield Hit(
                f"{group.count} instances take {group.count} times the memory: measure before keeping them",
                model.place("instance_group", index, "count"),
            )


@rule(
    "CD605",
    "profile-without-plan",
    Severity.ERROR,
    "Optimization profiles exist in TensorRT plans only, and are numbered from 0.",
    bad='instance_group { profile: [ "0" ] }',
    good="instance_group { count: 1 }",
)
def profile_without_plan(model: Model, target: Target) -> Iterator[Hit]:
    for index, group in enumerate(model.config.instance_group):
        wrong = [profile for profile in group.profile if not profile.isdecimal()]
        if group.profile and model.backend not in ("tensorrt", ""):
            yield Hit(
                f"a profile for backend {model.backend}",
                model.place("instance_group", index, "profile"),
            )
        elif wrong:
            yield Hit(
                f"profile {wrong[0]!r} is not a number",
                model.place("instance_group", index, "profile"),
            )
