"""CD85x: warmup samples. Triton sends them while it loads a model, so a wrong one makes the model unavailable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.lint.disk import inside
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.model import row_bytes
from clip_deploy.triton_schema import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_SAMPLE = (
    "model_warmup {{ name: 'w' batch_size: {batch} inputs {{ key: '{key}' value "
    "{{ data_type: TYPE_FP32 dims: {dims} {data} }} }} }}"
)


def _sample(
    batch: int = 1,
    key: str = "pixel_values",
    dims: str = "[ 3, 8, 8 ]",
    data: str = "zero_data: true",
) -> str:
    return _SAMPLE.format(batch=batch, key=key, dims=dims, data=data)


def _text_sample(data: str) -> Example:
    """A text model's sample; the model is Python, so that no graph contradicts its input."""
    config = (
        'backend: "python"\ninput { name: "input_ids" data_type: TYPE_INT32 dims: [ 3, 8, 8 ] }\n'
    )
    sample = _sample(key="input_ids", data=data).replace("TYPE_FP32", "TYPE_INT32")
    return Example(config + sample, files={"1/model.py": "python"})


@rule(
    "CD851",
    "warmup-shape",
    Severity.ERROR,
    "A warmup input has the shape of the model's input, without the batch axis, and every size given.",
    bad=_sample(dims="[ 3, 224, 224 ]"),
    good=_sample(),
)
def warmup_shape(model: Model, target: Target) -> Iterator[Hit]:
    for index, name, given, wanted in _inputs(model):
        dims = tuple(given.dims)
        if any(axis < 0 for axis in dims):
            yield Hit(f"{name} has a varying axis: {list(dims)}", _place(model, index))
        elif wanted is not None and wanted.dims and not _fits(dims, tuple(wanted.dims)):
            yield Hit(
                f"{name} is {list(dims)} in the warmup and {list(wanted.dims)} in the model",
                _place(model, index),
            )


@rule(
    "CD852",
    "warmup-input",
    Severity.ERROR,
    "A warmup sample gives every input of the model, and no other.",
    bad=_sample(key="images"),
    good=_sample(),
)
def warmup_input(model: Model, target: Target) -> Iterator[Hit]:
    known = {tensor.name: tensor for tensor in model.config.input}
    if not known or model.completes_itself:
        return
    for index, sample in _samples(model):
        strange = [name for name in sample.inputs if name not in known]
        lacking = [
            name
            for name, tensor in known.items()
            if name not in sample.inputs and not tensor.optional
        ]
        if strange and not model.config.HasField("sequence_batching"):
            yield Hit(
                f"the model has no input {strange[0]!r}; it has {', '.join(known)}",
                _place(model, index),
            )
        elif lacking:
            yield Hit(f"the sample lacks the input {lacking[0]!r}", _place(model, index))


@rule(
    "CD853",
    "warmup-dtype",
    Severity.ERROR,
    "A warmup input has the data type of the model's input.",
    bad=_sample().replace("TYPE_FP32", "TYPE_INT32"),
    good=_sample(),
)
def warmup_dtype(model: Model, target: Target) -> Iterator[Hit]:
    for index, name, given, wanted in _inputs(model):
        if wanted is not None and given.data_type != wanted.data_type:
            here, there = dtype_name(given.data_type), dtype_name(wanted.data_type)
            yield Hit(
                f"{name} is {here} in the warmup and {there} in the model", _place(model, index)
            )


@rule(
    "CD854",
    "warmup-too-large",
    Severity.ERROR,
    "A warmup batch above max_batch_size fails, and can take the server down.",
    bad=_sample(batch=64),
    good=_sample(batch=8),
)
def warmup_too_large(model: Model, target: Target) -> Iterator[Hit]:
    if model.completes_itself and not model.fields("max_batch_size"):
        return  # it will say how many
    most = max(model.max_batch, 1)
    for index, sample in _samples(model):
        if sample.batch_size > most:
            message = f"a warmup batch of {sample.batch_size} with max_batch_size {model.max_batch}"
            yield model.hit(
                message, "model_warmup", index, "batch_size", right=f"batch_size: {most}"
            )


@rule(
    "CD855",
    "warmup-data",
    Severity.ERROR,
    "Warmup data is zero, random, or a file in the model's warmup folder with enough bytes for one row.",
    bad=_sample(data="input_data_file: 'row.bin'"),
    good=Example(
        config=_sample(data="input_data_file: 'row.bin'"), files={"warmup/row.bin": "768 bytes"}
    ),
)
def warmup_data(model: Model, target: Target) -> Iterator[Hit]:
    for index, name, given, _ in _inputs(model):
        kind = given.WhichOneof("input_data_type")
        if kind is None:
            yield Hit(
                f"{name} has no data: zero_data, random_data or input_data_file",
                _place(model, index),
            )
        elif kind == "input_data_file":
            path = inside(model.folder / "warmup", given.input_data_file)
            size = row_bytes(given.data_type, given.dims)
            if not path.is_file():
                yield Hit(f"warmup/{given.input_data_file} is not there", _place(model, index))
            elif path.stat().st_size < size:
                have = f"{path.stat().st_size:,} bytes"
                yield Hit(
                    f"warmup/{given.input_data_file} has {have}, a row needs {size:,}",
                    _place(model, index),
                )


@rule(
    "CD856",
    "warmup-skipped",
    Severity.WARNING,
    "A warmup sample without batch_size is never sent.",
    bad=_sample(batch=0),
    good=_sample(batch=1),
)
def warmup_skipped(model: Model, target: Target) -> Iterator[Hit]:
    for index, sample in enumerate(model.config.model_warmup):
        if sample.batch_size == 0:
            yield Hit(
                "a sample of batch_size 0 is not sent",
                _place(model, index),
                remedy="write batch_size: 1",
            )


@rule(
    "CD857",
    "warmup-random-ids",
    Severity.WARNING,
    "Random bytes are no token ids: a graph refuses those beyond its vocabulary, and the model does not load.",
    bad=_text_sample("random_data: true"),
    good=_text_sample("zero_data: true"),
)
def warmup_random_ids(model: Model, target: Target) -> Iterator[Hit]:
    for index, name, given, _ in _inputs(model):
        if given.WhichOneof("input_data_type") == "random_data" and "INT" in dtype_name(
            given.data_type
        ):
            yield Hit(
                f"{name} is filled with random integers: use real ones from a file, or zero_data",
                _place(model, index),
            )


def _samples(model: Model) -> Iterator[tuple[int, Any]]:
    """(index, sample) of those that are sent; an ensemble's are refused as a whole."""
    if not model.is_ensemble:
        for index, sample in enumerate(model.config.model_warmup):
            if sample.batch_size > 0:
                yield index, sample


def _inputs(model: Model) -> Iterator[tuple[int, str, Any, Any]]:
    """(index of the sample, name, what the sample says, the model's input or None)."""
    known = {tensor.name: tensor for tensor in model.config.input}
    for index, sample in _samples(model):
        for name, given in sample.inputs.items():
            yield index, name, given, known.get(name)


def _place(model: Model, index: int) -> Any:
    return model.place("model_warmup", index)


def _fits(dims: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(dims) == len(wanted) and all(want in (-1, have) for have, want in zip(dims, wanted))
