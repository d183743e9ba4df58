"""CD2xx: the text of config.pbtxt against Triton's schema."""

from __future__ import annotations

import difflib
import functools
import re
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from clip_deploy.lint.disk import MAX_TEXT_BYTES
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.text import Block, Field, Place, Problem, Scalar
from clip_deploy.triton_schema import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

# Words from other tools and from memory → what Triton's schema says.
_ALIASES = {
    "TYPE_FLOAT": "TYPE_FP32",
    "TYPE_FLOAT32": "TYPE_FP32",
    "TYPE_FLOAT16": "TYPE_FP16",
    "TYPE_HALF": "TYPE_FP16",
    "TYPE_DOUBLE": "TYPE_FP64",
    "TYPE_FLOAT64": "TYPE_FP64",
    "TYPE_BFLOAT16": "TYPE_BF16",
    "TYPE_INT": "TYPE_INT32",
    "TYPE_LONG": "TYPE_INT64",
    "TYPE_BYTES": "TYPE_STRING",
    "TYPE_BOOLEAN": "TYPE_BOOL",
    "FP32": "TYPE_FP32",
    "FP16": "TYPE_FP16",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT8": "TYPE_UINT8",
    "BYTES": "TYPE_STRING",
    "CPU": "KIND_CPU",
    "GPU": "KIND_GPU",
    "shape": "dims",
    "dim": "dims",
    "dtype": "data_type",
    "type": "data_type",
    "datatype": "data_type",
    "max_batch": "max_batch_size",
    "batch_size": "max_batch_size",
    "inputs": "input",
    "outputs": "output",
    "instance_groups": "instance_group",
    "max_queue_delay_us": "max_queue_delay_microseconds",
    "preferred_batch_sizes": "preferred_batch_size",
}


@rule(
    "CD201",
    "encoding",
    Severity.ERROR,
    "Triton reads plain UTF-8; a byte order mark or another encoding stops it at the first character.",
    bad=Example(files={"config.pbtxt": "utf-8-bom"}),
    good=Example(),
)
def encoding(model: Model, target: Target) -> Iterator[Hit]:
    data = model.config_bytes
    if data is None:
        return
    marks = {
        b"\xef\xbb\xbf": "UTF-8 with a byte order mark",
        b"\xff\xfe": "UTF-16",
        b"\xfe\xff": "UTF-16",
    }
    kind = next((name for mark, name in marks.items() if data.startswith(mark)), None)
    if kind:
        yield Hit(
            f"the file is {kind}", Place(1, 1), remedy="save it as UTF-8 without a byte order mark"
        )
    elif b"\0" in data:
        yield Hit("the file is binary, or UTF-16", Place(1, 1), remedy="save it as UTF-8")


@rule(
    "CD202",
    "syntax",
    Severity.ERROR,
    "The text is not protobuf text, so Triton reads nothing of it.",
    bad="version_policy: { latest: { num_versions: 1 }",
    good="version_policy: { latest: { num_versions: 1 } }",
)
def syntax(model: Model, target: Target) -> Iterator[Hit]:
    if _is_strange(model):
        return
    problem = _first_problem(model)
    if problem is not None:
        yield Hit(problem.message, problem.place, fix=_without_comma(model, problem))
        return
    error = model.parsed[1]
    if error is not None and not any(True for _ in _schema_hits(model)):
        what = str(error).rpartition("': ")[2] or str(error)
        yield Hit(what, Place(error.GetLine() or 1, error.GetColumn() or 1))


def _first_problem(model: Model) -> Problem | None:
    """Where the text stops being protobuf text; what follows is guesswork, and nothing is said of it."""
    return min(model.document.problems, key=lambda problem: problem.place, default=None)


def _without_comma(model: Model, problem: Problem) -> str | None:
    if problem.message != "a comma before ']'":
        return None
    place = problem.place
    line = model.document.line(place.line)
    return re.sub(r",(\s*)$", r"\1", line[: place.column - 1]) + line[place.column - 1 :]


@rule(
    "CD203",
    "unknown-field",
    Severity.ERROR,
    "Triton refuses a config with a field that its schema does not have.",
    bad="dynamic_batching { max_queue_delay_us: 5000 }",
    good="dynamic_batching { max_queue_delay_microseconds: 5000 }",
)
def unknown_field(model: Model, target: Target) -> Iterator[Hit]:
    yield from _of_kind(model, "unknown-field")


@rule(
    "CD204",
    "unknown-value",
    Severity.ERROR,
    "A field of a fixed set of words has another word.",
    bad="input { name: 'pixel_values' data_type: TYPE_FLOAT32 dims: [ 3, 8, 8 ] }",
    good="input { name: 'pixel_values' data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }",
)
def unknown_value(model: Model, target: Target) -> Iterator[Hit]:
    yield from _of_kind(model, "unknown-value")


@rule(
    "CD205",
    "given-twice",
    Severity.ERROR,
    "A field that may stand once stands twice, or two fields exclude each other.",
    bad=Example(config="version_policy: { all: {} latest: {} }"),
    good="version_policy: { all: {} }",
)
def given_twice(model: Model, target: Target) -> Iterator[Hit]:
    yield from _of_kind(model, "given-twice")


@rule(
    "CD206",
    "wrong-kind-of-value",
    Severity.ERROR,
    "A field has a value of another kind: a text for a number, a number beyond its range, a value for a message.",
    bad='max_batch_size: "8"',
    good="max_batch_size: 8",
)
def wrong_kind(model: Model, target: Target) -> Iterator[Hit]:
    yield from _of_kind(model, "wrong-kind")


@rule(
    "CD207",
    "key-given-twice",
    Severity.WARNING,
    "A key of a map stands twice; the last one wins without a word.",
    bad='parameters { key: "intra_op_thread_count" value { string_value: "2" } }\n'
    'parameters { key: "intra_op_thread_count" value { string_value: "4" } }',
    good='parameters { key: "intra_op_thread_count" value { string_value: "4" } }',
)
def key_given_twice(model: Model, target: Target) -> Iterator[Hit]:
    for name in ("parameters", "metric_tags", "cc_model_filenames"):
        seen: dict[str, Place] = {}
        for block in [b for f in model.document.root.all(name) for b in f.blocks()]:
            key = block.first("key")
            if key is None or not key.scalars():
                continue
            text = key.scalars()[0].string
            if text in seen:
                yield Hit(f"{name} has {text!r} twice, first in line {seen[text].line}", key.place)
            seen.setdefault(text, key.place)


@rule(
    "CD208",
    "unreadable",
    Severity.ERROR,
    "The file cannot be read or judged, or is far too large to be a configuration.",
    bad=Example(files={"config.pbtxt": "folder"}),
    good=Example(),
)
def unreadable(model: Model, target: Target) -> Iterator[Hit]:
    if not model.has_config or model.config_bytes is not None:
        return
    if model.config_path.is_file() and model.config_path.stat().st_size > MAX_TEXT_BYTES:
        yield Hit(f"{model.config_path.stat().st_size:,} bytes are no configuration")
    else:
        yield Hit("the file cannot be read: it is no file, or its permissions forbid it")


def _is_strange(model: Model) -> bool:
    """Whether CD201 or CD208 speak of the whole file."""
    return model.config_bytes is None or any(True for _ in encoding(model, None))  # type: ignore[arg-type]


def _of_kind(model: Model, kind: str) -> Iterator[Hit]:
    if not _is_strange(model):
        for found, hit in _schema_hits(model):
            if found == kind:
                yield hit


@functools.lru_cache(maxsize=1)
def _schema_hits(model: Model) -> tuple[tuple[str, Hit], ...]:
    """Walk the text along the schema; (kind, hit) for everything that does not fit.

    Kept for the model at hand: one rule per kind asks for it.
    """
    problem = _first_problem(model)
    return tuple(
        (kind, hit)
        for kind, hit in _message(model, model.document.root, ModelConfig.DESCRIPTOR)
        if problem is None or (hit.place is not None and hit.place < problem.place)
    )


def _message(model: Model, block: Block, descriptor: Any) -> Iterator[tuple[str, Hit]]:
    seen: dict[str, Field] = {}
    choices: dict[str, Field] = {}
    for field in block.fields:
        known = descriptor.fields_by_name.get(field.name)
        if known is None:
            yield "unknown-field", _unknown_field(model, field, descriptor)
            continue
        is_repeated = (
            known.is_repeated
            if hasattr(known, "is_repeated")
            else known.label == known.LABEL_REPEATED
        )
        if not is_repeated:
            yield from _twice(field, known, seen, choices)
            if len(field.values) > 1 or _is_list(model, field):
                yield "wrong-kind", Hit(f"{field.name} takes one value, not a list", field.place)
                continue
        for value in field.values:
            yield from _value(model, field, value, known)


def _is_list(model: Model, field: Field) -> bool:
    if len(field.values) == 1:
        return False
    line = model.document.line(field.place.line)[field.place.column - 1 + len(field.name) :]
    return line.lstrip(" \t:").startswith("[")


def _twice(
    field: Field, known: Any, seen: dict[str, Field], choices: dict[str, Field]
) -> Iterator[tuple[str, Hit]]:
    if field.name in seen:
        first = seen[field.name].place.line
        yield "given-twice", Hit(f"{field.name} stands twice, first in line {first}", field.place)
    elif known.containing_oneof is not None:
        choice = known.containing_oneof.name
        if choice in choices:
            other = choices[choice]
            message = f"{field.name} and {other.name} (line {other.place.line}) exclude each other"
            yield "given-twice", Hit(message, field.place)
        choices.setdefault(choice, field)
    seen.setdefault(field.name, field)


def _unknown_field(model: Model, field: Field, descriptor: Any) -> Hit:
    names = list(descriptor.fields_by_name)
    right = _nearest(field.name, names)
    where = "" if descriptor is ModelConfig.DESCRIPTOR else f" in {descriptor.name}"
    hint = f"; did you mean {right}?" if right else _elsewhere(field.name)
    fix = model.document.respelt(field.place, field.name, right) if right else None
    return Hit(f"there is no field {field.name}{where}{hint}", field.place, fix=fix)


def _elsewhere(name: str) -> str:
    """Where a field of that name belongs, when it is one of another message."""
    for field in ModelConfig.DESCRIPTOR.fields:
        if field.message_type is not None and name in field.message_type.fields_by_name:
            return f"; it belongs into {field.name} {{ … }}"
    return (
        "; it belongs to the model itself" if name in ModelConfig.DESCRIPTOR.fields_by_name else ""
    )


def _nearest(word: str, known: list[str]) -> str | None:
    alias = _ALIASES.get(word) or _ALIASES.get(word.upper())
    if alias in known:
        return alias
    upper = {name.upper(): name for name in known}
    near = difflib.get_close_matches(word.upper(), upper, n=1, cutoff=0.7)
    return upper[near[0]] if near else None


def _value(
    model: Model, field: Field, value: Scalar | Block, known: Any
) -> Iterator[tuple[str, Hit]]:
    if known.message_type is not None:
        if isinstance(value, Block):
            yield from _message(model, value, known.message_type)
        else:
            yield (
                "wrong-kind",
                Hit(f"{field.name} takes {{ … }}, not {value.text[:20]}", value.place),
            )
    elif isinstance(value, Block):
        yield "wrong-kind", Hit(f"{field.name} takes a value, not {{ … }}", value.place)
    elif known.enum_type is not None:
        yield from _enum(model, field, value, known)
    elif (complaint := _scalar_complaint(value, known)) is not None:
        yield (
            "wrong-kind",
            Hit(
                f"{field.name} {complaint}", value.place, fix=_unquoted(model, field, value, known)
            ),
        )


def _enum(model: Model, field: Field, value: Scalar, known: Any) -> Iterator[tuple[str, Hit]]:
    names = [v.name for v in known.enum_type.values]
    if value.text in names or re.fullmatch(r"-?\d+", value.text):
        return  # Triton takes numbers that stand for nothing
    right = _nearest(value.string, names)
    fix = model.document.respelt(value.place, value.text, right) if right else None
    hint = f"did you mean {right}?" if right else f"use one of {', '.join(names[:8])}"
    yield (
        "unknown-value",
        Hit(f"{field.name} cannot be {value.text[:40]}; {hint}", value.place, fix=fix),
    )


# A whole number has 20 at most, and Python refuses to read some thousands of them.
_MAX_DIGITS = 64
_WHOLE = {
    "INT32": (-(2**31), 2**31 - 1),
    "UINT32": (0, 2**32 - 1),
    "INT64": (-(2**63), 2**63 - 1),
    "UINT64": (0, 2**64 - 1),
}


def _scalar_complaint(value: Scalar, known: Any) -> str | None:
    """What is wrong with a scalar; None when it is right."""
    kind = _kind_name(known)
    if kind in ("STRING", "BYTES"):
        return None if value.kind == "string" else f"takes a text in quotes, not {value.text[:20]}"
    if kind == "BOOL":
        right = value.text in ("true", "false", "True", "False", "t", "f", "0", "1")
        return None if right else f"takes true or false, not {value.text[:20]}"
    if kind in _WHOLE:
        least, most = _WHOLE[kind]
        if len(value.text) > _MAX_DIGITS:
            return f"cannot be a number of {len(value.text)} digits"
        if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", value.text, re.ASCII):
            return f"takes a whole number, not {value.text[:20]}"
        return (
            None
            if least <= int(value.text, 0 if "x" in value.text.lower() else 10) <= most
            else f"cannot be {value.text}"
        )
    return None if value.kind != "string" else f"takes a number, not {value.text[:20]}"


# Number → name of protobuf's scalar types, which are constants of its descriptors: TYPE_INT32.
_KIND_NAMES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_")
    for name in vars(FieldDescriptor)
    if name.startswith("TYPE_")
}


def _kind_name(known: Any) -> str:
    return str(_KIND_NAMES.get(known.type, ""))


def _unquoted(model: Model, field: Field, value: Scalar, known: Any) -> str | None:
    """A number or a word in quotes, without them; a text without quotes, with them."""
    if value.kind == "string":
        return model.document.respelt(value.place, value.text, value.string)
    if _kind_name(known) == "STRING":
        return model.document.respelt(value.place, value.text, f'"{value.text}"')
    return None
