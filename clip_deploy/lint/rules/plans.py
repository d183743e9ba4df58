"""CD72x: TensorRT plans that ``build-trt`` made, held against its manifest beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from clip_deploy.artifacts import ENGINE, BuiltPlan
from clip_deploy.contract import PREFIX
from clip_deploy.errors import ConfigError
from clip_deploy.lint.engine import engine_folder, manifest
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.spec import LEAST_HALF_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target


_PLAN = "plan of TensorRT 10.4.0"
# The compute capability from which on ``ampere+`` plans run.
_AMPERE = 8


def _planned(config: str = "", most: int = 8, half_share: float = 0.9, cc: str = "9.0") -> Example:
    """A plan with its manifest, for a GPU of compute capability 9.0."""
    manifest = {
        "schema": 1,
        "file": "model.plan",
        "sha256": "5" * 64,
        "size_bytes": 91,
        "profile": f"1:4:{most}",
        "half_share": half_share,
        "provenance": {"compute_capability": cc, "hardware_compatibility": "none"},
    }
    files = {
        "1/model.plan": _PLAN,
        "1/engine.json": json.dumps(manifest, indent=2),
    }
    return Example(f'backend: "tensorrt"\n{config}', files=files, gpu=True)


def _told(key: str, value: str) -> str:
    return f'parameters {{ key: "{PREFIX}{key}" value {{ string_value: "{value}" }} }}'


@rule(
    "CD721",
    "beyond-the-profile",
    Severity.ERROR,
    "The plan runs batches up to its profile's largest; Triton loads it all the same, and larger batches fail.",
    bad=_planned(most=4),
    good=_planned(most=8),
)
def beyond_the_profile(model: Model, target: Target) -> Iterator[Hit]:
    built = _manifest(model)
    if built is not None and model.config.max_batch_size > built.profile.most:
        message = f"max_batch_size {model.config.max_batch_size}; the plan runs batches of {built.profile}"
        right = f"max_batch_size: {built.profile.most}"
        yield model.hit(message, "max_batch_size", right=right)


@rule(
    "CD722",
    "another-plan",
    Severity.ERROR,
    "The config was rendered for one plan, and another lies there.",
    bad=_planned(_told("plan_sha256", "7" * 64)),
    good=_planned(_told("plan_sha256", "5" * 64)),
)
def another_plan(model: Model, target: Target) -> Iterator[Hit]:
    built, told = _manifest(model), model.parameter(f"{PREFIX}plan_sha256")
    if built is None:
        return
    if told and told != built.sha256:
        place = model.parameter_place(f"{PREFIX}plan_sha256")
        message = f"the config is for plan {told[:12]}, and {built.sha256[:12]} lies there"
        yield Hit(message, place, remedy="render the model again")
    elif built.path.is_file() and built.path.stat().st_size != built.size_bytes:
        size = built.path.stat().st_size
        message = f"{built.file} has {size:,} bytes, its manifest says {built.size_bytes:,}"
        yield Hit(message, file=built.path, remedy="build and render the model again")


@rule(
    "CD723",
    "plan-without-half",
    Severity.ERROR,
    "FP16 was asked for, and no layer of the plan computes in it: it is as slow as FP32.",
    bad=_planned(_told("precision", "fp16"), half_share=0.0),
    good=_planned(_told("precision", "fp16")),
)
def plan_without_half(model: Model, target: Target) -> Iterator[Hit]:
    built = _manifest(model)
    if built is None or model.parameter(f"{PREFIX}precision") != "fp16":
        return
    if built.half_share is not None and built.half_share < LEAST_HALF_SHARE:
        place = model.parameter_place(f"{PREFIX}precision")
        message = f"precision is fp16, and {built.half_share:.0%} of the plan's layers are"
        yield Hit(message, place, remedy="build it again")


@rule(
    "CD724",
    "plan-of-another-gpu",
    Severity.ERROR,
    "A plan runs on the compute capability that it was built on, unless it was built to be compatible.",
    bad=_planned(cc="8.6"),
    good=_planned(cc="9.0"),
)
def plan_of_another_gpu(model: Model, target: Target) -> Iterator[Hit]:
    built = _manifest(model)
    if built is None or target.capability is None:
        return
    made_on = built.provenance.get("compute_capability")
    if not isinstance(made_on, str) or made_on == target.capability:
        return
    is_free = built.provenance.get("hardware_compatibility") == "ampere+"
    if is_free and int(target.capability.partition(".")[0]) >= _AMPERE:
        return
    message = (
        f"the plan was built on compute capability {made_on}, the target has {target.capability}"
    )
    yield Hit(message, model.place("backend"), remedy="build it on the target's GPU")


@rule(
    "CD725",
    "engine-manifest-damaged",
    Severity.ERROR,
    "Without its manifest nobody knows which batches, precision and GPU a plan was built for.",
    bad=Example('backend: "tensorrt"', {"1/model.plan": _PLAN, "1/engine.json": "{}"}, gpu=True),
    good=_planned(),
)
def engine_manifest_damaged(model: Model, target: Target) -> Iterator[Hit]:
    problem, folder = manifest(model), engine_folder(model)
    if isinstance(problem, ConfigError) and folder is not None:
        message = str(problem).replace(str(folder), folder.name)
        yield Hit(message, file=folder / ENGINE, remedy="build and render the model again")


def _manifest(model: Model) -> BuiltPlan | None:
    built = manifest(model)
    return built if isinstance(built, BuiltPlan) else None
