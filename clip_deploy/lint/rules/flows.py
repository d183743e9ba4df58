"""CD805, CD809, CD810: how tensors run through an ensemble."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.rules.ensembles import HEAD, STEP, members, pipeline, steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_FORK = """ensemble_scheduling { step [
  { model_name: "clip_image" model_version: -1 input_map { key: "pixel_values" value: "raw" }
    output_map { key: "image_embeds" value: "embedding" } },
  { model_name: "clip_image" model_version: -1 input_map { key: "pixel_values" value: "raw" }
    output_map { key: "image_embeds" value: "other" } }
] }
output { name: "other" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def _forked(policy: str) -> Example:
    """Two steps side by side."""
    config = f'backend: "python"\n{policy}'
    return Example(config, files={"1/model.py": "python"}, models={"clip_pipeline": HEAD + _FORK})


def _nested(name: str) -> str:
    """The step of an ensemble around another ensemble like it."""
    step = STEP.replace('"clip_image"', f'"{name}"')
    return step.replace('"pixel_values"', '"raw"').replace('"image_embeds"', '"embedding"')


@rule(
    "CD805",
    "ensemble-flow",
    Severity.ERROR,
    "Every tensor of an ensemble is written once, read somewhere, and reaches an output.",
    bad=pipeline('value: "raw"', 'value: "pixels"'),
    good=pipeline(),
)
def ensemble_flow(model: Model, target: Target) -> Iterator[Hit]:
    if not model.config.HasField("ensemble_scheduling"):
        return
    sequence = [step for _, step in steps(model)]
    written = [value for step in sequence for value in step.output_map.values()]
    read = {value for step in sequence for value in step.input_map.values()}
    inputs = [tensor.name for tensor in model.config.input]
    outputs = [tensor.name for tensor in model.config.output]
    place = model.place("ensemble_scheduling")
    for name in sorted({name for name in written if written.count(name) > 1 or name in inputs}):
        yield Hit(f"the tensor {name!r} is written twice", place)
    for index, name in enumerate(inputs):
        if name not in read and name not in outputs:
            yield Hit(
                f"the ensemble's input {name!r} is read by no step", model.place("input", index)
            )
    ready = _reached(sequence, set(inputs))
    for index, name in enumerate(outputs):
        if name not in ready:
            yield Hit(
                f"the ensemble's output {name!r} is never written", model.place("output", index)
            )
    for name in sorted((set(written) | read) - set(outputs)):
        if name not in ready and name in read:
            yield Hit(f"the tensor {name!r} is read and never written", place)
        elif name not in read:
            yield Hit(f"the tensor {name!r} is written and never read", place)


def _reached(steps: list[Any], ready: set[str]) -> set[str]:
    """All tensors that come to exist, beginning with the ensemble's inputs."""
    while True:
        new = {
            value
            for step in steps
            if set(step.input_map.values()) <= ready
            for value in step.output_map.values()
        }
        if new <= ready:
            return ready
        ready = ready | new


@rule(
    "CD809",
    "ensemble-cycle",
    Severity.ERROR,
    "Ensembles that contain one another never load.",
    bad=Example(
        models={
            "clip_pipeline": HEAD + _nested("other_pipeline"),
            "other_pipeline": HEAD.replace("clip_pipeline", "other_pipeline")
            + _nested("clip_pipeline"),
        }
    ),
    good=pipeline(),
)
def ensemble_cycle(model: Model, target: Target) -> Iterator[Hit]:
    reached, waiting = set(), [step.model_name for _, step in steps(model)]
    while waiting:
        name = waiting.pop()
        if name == model.name:
            yield Hit(
                "the ensemble contains itself, by way of others", model.place("ensemble_scheduling")
            )
            return
        if name not in reached and name in model.repository.known:
            reached.add(name)
            waiting += [step.model_name for _, step in steps(model.repository.known[name])]


@rule(
    "CD810",
    "decoupled-branches",
    Severity.ERROR,
    "A decoupled model answers as often as it likes, so nothing can wait for it and for another model at once.",
    bad=_forked("model_transaction_policy { decoupled: true }"),
    good=_forked(""),
)
def decoupled_branches(model: Model, target: Target) -> Iterator[Hit]:
    waiting = list(members(model))
    if not any(member.config.model_transaction_policy.decoupled for _, _, member in waiting):
        return
    # Which decoupled step each tensor comes from; 0 for none.
    origin = {tensor.name: 0 for tensor in model.config.input}
    while ready := [row for row in waiting if set(row[1].input_map.values()) <= set(origin)]:
        waiting = [row for row in waiting if row not in ready]
        for index, step, member in ready:
            origins = {origin[name] for name in step.input_map.values()}
            if len(origins) > 1:
                place = model.place("ensemble_scheduling", "step", index)
                yield Hit(f"{member.name} waits for different decoupled models", place)
            is_decoupled = member.config.model_transaction_policy.decoupled
            mine = index + 1 if is_decoupled else max(origins, default=0)
            origin |= dict.fromkeys(step.output_map.values(), mine)
    if len({origin.get(tensor.name, 0) for tensor in model.config.output}) > 1:
        yield Hit("the outputs come from different decoupled models", model.place("output"))
