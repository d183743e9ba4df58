"""On which line of a TOML text a key stands: what the standard library's parser does not tell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART = r"(?:[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*')"
_HEAD = re.compile(rf"\s*\[\[?\s*({_PART}(?:\s*\.\s*{_PART})*)\s*\]")
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_INSIDE = re.compile(rf"({_PART})\s*=")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_LONG = ('"""', "'''")


def lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Dotted keys and tables → the line, counted from 1, where each is first named."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in _statements(text):
        if head := _HEAD.match(line):
            table = _parts(head[1])
            _note(found, table, number)
        elif key := _KEY.match(line):
            path = table + _parts(key[1])
            _note(found, path, number)
            if line[key.end() :].lstrip().startswith("{"):
                for inner in _INSIDE.findall(line[key.end() :]):
                    _note(found, path + _parts(inner), number)
    return found


def _note(found: dict[tuple[str, ...], int], path: tuple[str, ...], number: int) -> None:
    for length in range(1, len(path) + 1):
        found.setdefault(path[:length], number)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Lines that begin a statement; what goes on inside a long text or a list of several lines is left out."""
    until, depth = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if until:
            _, ended, line = line.partition(until)
            if not ended:
                continue
            until = ""
        elif depth == 0:
            yield number, line
        plain = line
        for mark in _LONG:
            before, begun, rest = plain.partition(mark)
            if begun and mark not in rest:
                until, plain = mark, before
        plain = _STRING.sub("", plain).partition("#")[0]
        if not _HEAD.match(line):
            depth = max(0, depth + plain.count("[") - plain.count("]"))


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))
