"""The keys for others: as JSON Schema for editors, as a table for the docs, as a commented file to begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.deploy.keys import TABLES, keys_of
from clip_deploy.deploy.kinds import written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clip_deploy.deploy.key import Key

SCHEMA_FILE = "clip-deploy.schema.json"


def schema() -> dict[str, Any]:
    """JSON Schema of clip-deploy.toml, of the draft that editors of TOML know."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "clip-deploy.toml",
        "description": "Deployments of CLIP models, each in tables of its own name: [NAME.encoder], [NAME.engine] …",
        "type": "object",
        "minProperties": 1,
        "propertyNames": {
            "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$",
            "not": {"enum": list(TABLES)},
        },
        "additionalProperties": {"$ref": "#/definitions/deployment"},
        "definitions": {
            "deployment": {
                "type": "object",
                "required": ["encoder"],
                "additionalProperties": False,
                "properties": {table: _table(table) for table in TABLES},
            }
        },
    }


def _table(table: str) -> dict[str, Any]:
    keys = keys_of(table).values()
    required = [key.name for key in keys if key.is_required]
    return {
        "type": "object",
        "description": TABLES[table],
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": {key.name: _property(key) for key in keys},
    }


def _property(key: Key) -> dict[str, Any]:
    shape = dict(key.kind.schema)
    if key.choices:
        words = {"enum": list(key.choices)}
        shape = shape | ({"items": words} if shape["type"] == "array" else words)
    default = key.default_value()
    told = {"description": f"{key.help} ({key.flag})"}
    return shape | told | ({} if default is None else {"default": default})


def table() -> str:
    """Keys, flags and the Python API side by side, in Markdown."""
    parts = []
    for name, what in TABLES.items():
        rows = [
            f"| `{key.name}` | `{key.flag}` | `{key.attribute}` | {_default(key)} | {key.help} |"
            for key in keys_of(name).values()
        ]
        head = [
            f"### [NAME.{name}]: {what}\n",
            "| key | on the command line | from Python | default | |",
            "|---|---|---|---|---|",
        ]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def _default(key: Key) -> str:
    if key.is_required:
        return "needed"
    value = key.default_value()
    return f"`{written(value)}`" if value not in (None, [], {}) else ""


def starting_file(model: str, pretrained: str | None, name: str, notes: Sequence[str] = ()) -> str:
    """A clip-deploy.toml that works as it stands with the embedded server; every other key is a comment.

    Args:
        notes: what was found on this machine, for the reader to choose by.
    """
    set_here: Mapping[str, Any] = {
        "encoder.model": model,
        "encoder.pretrained": pretrained,
        "engine.backend": "python",
    }
    lines = [
        f"#:schema ./{SCHEMA_FILE}",
        "# What clip-deploy deploys, from the weights to the servers:",
        "#   clip-deploy deploy --dry-run   says what would run, and why",
        "#   clip-deploy deploy             runs it; what is up to date is left out",
        "# Keys that are commented out show their default, or how they are written. Paths are relative to this file.",
        "# Several deployments may stand here, each under a name of its own.",
        *([""] if notes else []),
        *(f"# {note}" for note in notes),
    ]
    for table_name, what in TABLES.items():
        keys = list(keys_of(table_name).values())
        is_set = any(set_here.get(key.path) is not None for key in keys)
        mark = "" if is_set else "# "
        lines += ["", f"# {what[0].upper()}{what[1:]}.", f"{mark}[{name}.{table_name}]"]
        lines += [_line(key, set_here.get(key.path), name) for key in keys]
    return "\n".join(lines) + "\n"


def _line(key: Key, value: Any, name: str) -> str:
    if value is not None:
        return f"{key.name} = {written(value)}  # {key.help}"
    return f"# {key.name} = {key.shown().replace('NAME', name)}  # {key.help}"
