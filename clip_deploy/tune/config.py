"""config.pbtxt with other values: the text edited where it must be, every comment and all else as it was."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError
from clip_deploy.files import replacing, storage
from clip_deploy.lint.text import Block, read
from clip_deploy.repository.rendering import parse_config, quoted
from clip_deploy.triton_schema import as_text

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.lint.text import Document, Field, Place
    from clip_deploy.triton_schema import ModelConfig

_SHOWN_CHARACTERS = 100
_DELAY_IN_WORDS = "waits up to {} µs for company"  # a comment of the shipped template


def edited(text: str, wanted: ModelConfig, place: object = "config.pbtxt") -> str:
    """The text of a config that says what ``wanted`` says, with as few characters changed as can be.

    Raises:
        ConfigError: the text is written in a way that this cannot edit; nothing is guessed.
    """
    have = parse_config(text, place)
    editor = _Editor(read(text))
    editor.reconcile(editor.document.root, have, wanted)
    result = _true_to_comment(editor.result(), have, wanted)
    if parse_config(result, place) != wanted:
        raise ConfigError(
            f"{place} is written in a way that cannot be edited safely",
            remedy="write the settings there by hand, or render the model with them",
        )
    return result


def difference(before: str, after: str, name: str) -> str:
    """What changes, as a unified diff; empty where nothing does. Overlong lines are cut."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} (now)", f"{name} (tuned)", "", "", 2, ""
    )
    return "\n".join(
        line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"
        for line in lines
    )


def replace_config(path: Path, before: str, after: str) -> None:
    """Put the new text in the place of the old, whole or not at all.

    Raises:
        ConfigError: somebody changed the file meanwhile, or the place cannot be written to.
    """
    if path.read_bytes() != before.encode():
        raise ConfigError(
            f"{path} was changed while its settings were searched",
            remedy="look at both, then run the same command again",
        )
    with storage(path, ConfigError), replacing(path) as temporary:
        temporary.write_bytes(after.encode())


def _true_to_comment(text: str, have: ModelConfig, wanted: ModelConfig) -> str:
    """The sentence that our template writes above the queue delay names it; the rest of the comments is the user's."""
    old, new = (
        _DELAY_IN_WORDS.format(config.dynamic_batching.max_queue_delay_microseconds)
        for config in (have, wanted)
    )
    return text.replace(f"# A request {old}", f"# A request {new}")


@dataclass(slots=True)
class _Editor:
    """Collects edits of one text: from, to, and what to put there.

    Insertions wait until all is known: a field that goes is no place to put another after.
    """

    document: Document
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    insertions: list[tuple[Block, str]] = field(default_factory=list)
    removed: list[Field] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._starts = [0, *(m.end() for m in re.finditer("\n", self.document.text))]

    def result(self) -> str:
        text = self.document.text
        inserted = [self._inserted(block, new) for block, new in self.insertions]
        for start, end, new in sorted(self.edits + inserted, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def reconcile(self, block: Block, have: Any, want: Any) -> None:
        """Edit a block that says ``have`` until it says ``want``. What it cannot edit is left: the caller compares."""
        for kind in have.DESCRIPTOR.fields:
            old, new = getattr(have, kind.name), getattr(want, kind.name)
            fields = block.all(kind.name)
            if old == new and _is_set(have, kind) == _is_set(want, kind):
                continue
            if kind.message_type is None:
                self._scalars(block, kind, fields, new)
            elif kind.message_type.GetOptions().map_entry:
                self._entries(block, kind.name, fields, old, new)
            else:
                self._messages(block, kind.name, fields, _all(have, kind), _all(want, kind))

    def _scalars(self, block: Block, kind: Any, fields: list[Field], new: Any) -> None:
        several = not isinstance(new, (int, float, str, bytes))
        if several and not new:
            for each in fields:
                self._remove(each)
            return
        text = (
            f"[ {', '.join(_written(kind, v) for v in new)} ]" if several else _written(kind, new)
        )
        if not fields:
            self.insertions.append((block, f"{kind.name}: {text}"))
            return
        for each in fields[:-1]:
            self._remove(each)
        self._replace(fields[-1], f"{kind.name}: {text}")

    def _entries(self, block: Block, name: str, fields: list[Field], old: Any, new: Any) -> None:
        """A map: one ``name { key: … value … }`` per entry."""
        by_key = {_key(entry): (each, entry) for each in fields for entry in each.blocks()}
        for key in sorted(set(old) | set(new)):
            each, entry = by_key.get(key, (None, None))
            if each is None or entry is None:
                inside = f"key: {quoted(key)} value {{ {_flat(new[key])} }}"
                self.insertions.append((block, f"{name} {{ {inside} }}"))
            elif key not in new:
                self._remove(each)
            elif old[key] != new[key] and (value := entry.first("value")) is not None:
                for inner in value.blocks():
                    self.reconcile(inner, old[key], new[key])

    def _messages(
        self, block: Block, name: str, fields: list[Field], old: list[Any], new: list[Any]
    ) -> None:
        blocks = [inner for each in fields for inner in each.blocks()]
        if not new:
            for each in fields:
                self._remove(each)
        elif not blocks:
            for message in new:
                lines = "".join(f"  {line}\n" for line in as_text(message).splitlines())
                self.insertions.append((block, f"{name} {{\n{lines}}}"))
        elif len(blocks) == len(old) == len(new):
            for inner, had, wanted in zip(blocks, old, new):
                self.reconcile(inner, had, wanted)

    def _replace(self, each: Field, new: str) -> None:
        self.edits.append((self._at(each.place), self._at(each.end), new))

    def _remove(self, each: Field) -> None:
        """With its line, where nothing else stands on it."""
        self.removed.append(each)
        text, start, end = self.document.text, self._at(each.place), self._at(each.end)
        end += len(re.match(r"[ \t]*[,;]?", text[end:]).group())  # type: ignore[union-attr]
        line = text.rfind("\n", 0, start) + 1
        if not text[line:start].strip() and (rest := re.match(r"[ \t]*(?:\n|\Z)", text[end:])):
            start, end = line, end + rest.end()
        self.edits.append((start, end, ""))

    def _inserted(self, block: Block, new: str) -> tuple[int, int, str]:
        """After a block's last field that stays, on a line of its own where that field ends its line."""
        text = self.document.text
        last = next((each for each in reversed(block.fields) if each not in self.removed), None)
        if last is None:
            at = self._at(block.place) + (block is not self.document.root)
            return at, at, f" {new} " if at else f"{new}\n"
        start, at = self._at(last.place), self._at(last.end)
        rest = re.match(r"[ \t]*[,;]?[ \t]*(?:#[^\n]*)?(?=\n|\Z)", text[at:])
        if rest is None:
            return at, at, f" {new}"
        line = text.rfind("\n", 0, start) + 1
        indent = text[line:start] if not text[line:start].strip() else ""
        at += rest.end()
        return at, at, "".join(f"\n{indent}{each}" for each in new.splitlines())

    def _at(self, place: Place) -> int:
        return self._starts[place.line - 1] + place.column - 1


def _is_set(message: Any, kind: Any) -> bool:
    return bool(message.HasField(kind.name)) if kind.has_presence else True


def _all(message: Any, kind: Any) -> list[Any]:
    """The messages of a field: those of a repeated one, or the one that is there, or none."""
    value = getattr(message, kind.name)
    if kind.has_presence:
        return [value] if message.HasField(kind.name) else []
    return list(value)


def _written(kind: Any, value: Any) -> str:
    """A scalar as protobuf text."""
    if kind.enum_type is not None:
        return str(kind.enum_type.values_by_number[value].name)
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else str(value)


def _key(entry: Block) -> str:
    found = entry.first("key")
    return found.scalars()[0].string if found and found.scalars() else ""


def _flat(message: Any) -> str:
    return " ".join(as_text(message).split("\n")).strip()
