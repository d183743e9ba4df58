"""CD9xx: what clip-deploy itself wrote: the contract in parameters, the manifest beside the model, the two towers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import MANIFEST, ExportedModel
from clip_deploy.contract import PREFIX, Contract
from clip_deploy.errors import ConfigError
from clip_deploy.lint.disk import head
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.spec import TensorSpec, Tower
from clip_deploy.triton_schema import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target
    from clip_deploy.lint.text import Place


@rule(
    "CD901",
    "contract-incomplete",
    Severity.ERROR,
    "A client reads preprocessing, tokens and scoring from these parameters and refuses a model that lacks one.",
    bad='parameters { key: "clip_deploy.contract" value { string_value: "1" } }',
    good=Example(),
)
def contract_incomplete(model: Model, target: Target) -> Iterator[Hit]:
    if not model.is_ours or not (model.config.input and model.config.output):
        return
    try:
        _contract(model)
    except (ConfigError, ValueError) as error:
        yield Hit(str(error), model.place("parameters"), remedy=getattr(error, "remedy", None))


@rule(
    "CD902",
    "towers-disagree",
    Severity.ERROR,
    "The two encoders of one deployment come from one checkpoint, and write vectors of one size.",
    bad=Example(
        models={
            "clip_text_encoder": "text tower of other weights",
            "clip_image_encoder": "image tower",
        }
    ),
    good=Example(models={"clip_text_encoder": "text tower", "clip_image_encoder": "image tower"}),
)
def towers_disagree(model: Model, target: Target) -> Iterator[Hit]:
    if model.name != Tower.TEXT.model_name or not model.is_ours:
        return
    other = model.repository.known.get(Tower.IMAGE.model_name)
    if other is None or not other.is_ours:
        return
    for key, what in (
        ("weights_sha256", "weights"),
        ("scoring", "scoring"),
        ("normalized", "normalisation"),
    ):
        mine, theirs = _parameter(model, key), _parameter(other, key)
        if mine != theirs:
            yield Hit(
                f"{what} {mine[:16]!r} here and {theirs[:16]!r} in {other.name}: export both towers of one model",
                _place(model, key),
            )
    dims = [[list(output.dims) for output in m.config.output] for m in (model, other)]
    if all(dims) and dims[0] != dims[1]:
        yield Hit(
            f"vectors of {dims[0][0]} here and {dims[1][0]} in {other.name}", model.place("output")
        )


@rule(
    "CD903",
    "manifest-disagrees",
    Severity.ERROR,
    "The manifest beside the model says what was checked; a config that says otherwise serves something unchecked.",
    bad=Example(models={"clip_image_encoder": "image tower with another mean"}),
    good=Example(models={"clip_image_encoder": "image tower"}),
)
def manifest_disagrees(model: Model, target: Target) -> Iterator[Hit]:
    exported = _manifest(model)
    if exported is None or not model.is_ours:
        return
    wanted = exported.contract.to_parameters()
    for key, value in wanted.items():
        if (found := _parameter(model, key.removeprefix(PREFIX))) != value:
            place = _place(model, key.removeprefix(PREFIX))
            yield Hit(f"{key} is {found[:40]!r} here and {value[:40]!r} in the manifest", place)


@rule(
    "CD904",
    "beyond-what-was-checked",
    Severity.ERROR,
    "Batches were compared with torch up to the manifest's max_batch, and no further.",
    bad=Example(models={"clip_image_encoder": "image tower with max batch 64"}),
    good=Example(models={"clip_image_encoder": "image tower"}),
)
def beyond_what_was_checked(model: Model, target: Target) -> Iterator[Hit]:
    exported = _manifest(model)
    if exported is not None and model.config.max_batch_size > exported.max_batch:
        right = f"max_batch_size: {exported.max_batch}"
        message = f"max_batch_size {model.config.max_batch_size}; the export was checked up to {exported.max_batch}"
        yield model.hit(message, "max_batch_size", right=right)


@rule(
    "CD905",
    "not-the-precision-asked-for",
    Severity.ERROR,
    "The contract says half precision and the graph's weights are not: it was never converted.",
    bad=Example(models={"clip_image_encoder": "image tower that claims fp16"}),
    good=Example(models={"clip_image_encoder": "image tower"}),
)
def not_the_precision(model: Model, target: Target) -> Iterator[Hit]:
    if not model.is_ours or _parameter(model, "precision") != "fp16" or model.graph is None:
        return
    if not model.graph.is_half:
        share = f"{model.graph.half_share:.0%} of its weights are FP16"
        yield Hit(f"precision is fp16, and {share}", _place(model, "precision"))


@rule(
    "CD906",
    "manifest-damaged",
    Severity.ERROR,
    "A manifest that cannot be read vouches for nothing.",
    bad=Example(files={"1/manifest.json": '{"schema": 1, "kind": "exported-model"}'}),
    good=Example(models={"clip_image_encoder": "image tower"}),
)
def manifest_damaged(model: Model, target: Target) -> Iterator[Hit]:
    for folder in model.served.values():
        path = folder / MANIFEST
        if not _claims_to_be_ours(head(path, 4096) or b""):
            continue
        try:
            ExportedModel.read(folder)
        except ConfigError as error:
            yield Hit(
                str(error).replace(str(folder), folder.name),
                file=path,
                remedy="render the model again",
            )


def _claims_to_be_ours(beginning: bytes) -> bool:
    return b"exported-model" in beginning


def _parameter(model: Model, key: str) -> str:
    return model.parameter(PREFIX + key)


def _place(model: Model, key: str) -> Place | None:
    return model.parameter_place(PREFIX + key)


def _contract(model: Model) -> Contract:
    parameters = {key: value.string_value for key, value in model.config.parameters.items()}
    return Contract.from_parameters(
        parameters,
        inputs=tuple(_spec(model, tensor) for tensor in model.config.input),
        outputs=tuple(_spec(model, tensor) for tensor in model.config.output),
    )


def _spec(model: Model, tensor: Any) -> TensorSpec:
    dims = tuple(tensor.dims)[0 if model.config.max_batch_size else 1 :]
    return TensorSpec(tensor.name, dtype_name(tensor.data_type).removeprefix("TYPE_"), dims)


@functools.lru_cache(maxsize=1)  # several rules ask about the model at hand
def _manifest(model: Model) -> ExportedModel | None:
    """The manifest of the newest served version, where it is ours and can be read."""
    folder = next(iter(reversed(model.served.values())), None)
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    try:
        return ExportedModel.read(folder)
    except ConfigError:
        return None
