"""What a value of clip-deploy.toml can be: how it is told, held and described to an editor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Args:
        said: what it is, for a person.
        example: how it is written in the file.
        schema: the same for an editor, as JSON Schema.
        holds: whether a value read from TOML is one.
        is_path: whether it is resolved against the file's folder; ``maybe`` where it may be a name instead.
    """

    said: str
    example: str
    schema: Mapping[str, Any]
    holds: Callable[[object], bool]
    is_path: bool | str = False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_of(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


_TEXT = {"type": "string", "minLength": 1}
TEXT = Kind("a text", '"…"', _TEXT, _is_text)
PATH = Kind("a path", '"…"', _TEXT, _is_text, is_path=True)
NAME_OR_PATH = Kind("a name or a path", '"…"', _TEXT, _is_text, is_path="maybe")
WHOLE = Kind("a whole number", "8", {"type": "integer"}, _is_whole)
NUMBER = Kind("a number", "0.5", {"type": "number"}, _is_number)
YES_OR_NO = Kind("true or false", "true", {"type": "boolean"}, lambda v: isinstance(v, bool))
TEXTS = Kind("a list of texts", '["…"]', {"type": "array", "items": _TEXT}, _list_of(_is_text))
WHOLES = Kind(
    "a list of whole numbers",
    "[0, 1]",
    {"type": "array", "items": {"type": "integer"}},
    _list_of(_is_whole),
)
CHANNELS = Kind(
    "three numbers",
    "[0.5, 0.5, 0.5]",
    {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3},
    lambda v: _list_of(_is_number)(v) and isinstance(v, list) and len(v) == 3,
)
PARAMETERS = Kind(
    "a table of texts",
    '{ intra_op_thread_count = "4" }',
    {"type": "object", "additionalProperties": {"type": "string"}},
    lambda v: isinstance(v, dict) and all(isinstance(each, str) for each in v.values()),
)


def written(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {written(v)}' for k, v in value.items())} }}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
