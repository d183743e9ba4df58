"""config.pbtxt with places: a lenient reader of protobuf text that remembers line and column of every field.

Triton's schema judges whether a text is right (``schema``); this reader only says where things are, so it goes on where
the real parser stops. It never fails: what it cannot understand becomes a ``Problem``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# Deep nesting is not a configuration; the schema's own depth is 6.
_MAX_DEPTH = 32

_TOKEN = re.compile(
    r"""[ \t\r\n\f\v]*(?:
    (?P<comment>\#[^\n]*)
    |(?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*')
    |(?P<other>["'][^\n]*)
    |(?P<word>[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?))
    |(?P<mark>[{}\[\]<>:,;-])
    |(?P<rest>[^ \t\r\n\f\v])|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_NEWLINE = re.compile("\n")


# What people write that is not protobuf text → what to write.
_HINTS = {
    **dict.fromkeys("\u201c\u201d\u2018\u2019", "a typographic quotation mark: use a plain one"),
    **dict.fromkeys("\u00a0\u2007\u202f", "a no-break space: use a plain one"),
    **dict.fromkeys("/*", "comments begin with #"),
    "=": "a field is written name: value",
    "(": "lists are written [ a, b ]",
    '"': "a text ends on the line where it begins",
    "'": "a text ends on the line where it begins",
    "\ufffd": "a byte that is not UTF-8",
}
_ESCAPE = re.compile(
    r"""\\(?:[abfnrtv\\?'"]|[0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"""
)


class Place(NamedTuple):
    """A place in a file: line and column, both counted from 1."""

    line: int
    column: int


_START = Place(1, 1)


class Scalar(NamedTuple):
    """One value: its text as written, and what kind of token it is (``string``, ``word`` or ``number``)."""

    text: str
    kind: str
    place: Place

    @property
    def string(self) -> str:
        """The value without quotes; escapes stay as they are, which is enough to compare names."""
        return self.text[1:-1] if self.kind == "string" else self.text


@dataclass(slots=True)
class Block:
    """A message: its fields in the order in which they were written."""

    place: Place
    fields: list[Field] = field(default_factory=list)

    def all(self, name: str) -> list[Field]:
        return [each for each in self.fields if each.name == name]

    def first(self, name: str) -> Field | None:
        return next((each for each in self.fields if each.name == name), None)

    def walk(self) -> Iterator[Field]:
        """Every field of the message and of the messages inside it."""
        for each in self.fields:
            yield each
            for value in each.values:
                if isinstance(value, Block):
                    yield from value.walk()


@dataclass(slots=True)
class Field:
    """``name: value``, ``name: [values]`` or ``name { … }``; ``end`` is the place after its last character."""

    name: str
    place: Place
    values: list[Scalar | Block] = field(default_factory=list)
    end: Place = _START

    def blocks(self) -> list[Block]:
        return [value for value in self.values if isinstance(value, Block)]

    def scalars(self) -> list[Scalar]:
        return [value for value in self.values if isinstance(value, Scalar)]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not protobuf text."""

    message: str
    place: Place


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment's text, without the ``#``; ``alone`` when nothing else stands on its line."""

    text: str
    place: Place
    alone: bool


@dataclass(slots=True)
class Document:
    """A whole file: its fields, its comments, and what could not be read."""

    text: str
    root: Block
    comments: list[Comment]
    problems: list[Problem]
    _lines: list[str] = field(default_factory=list, repr=False)

    def line(self, number: int) -> str:
        """A line as written, without its end."""
        if not self._lines:
            self._lines.extend(self.text.split("\n"))
        return self._lines[number - 1].rstrip("\r") if 0 < number <= len(self._lines) else ""

    def corrected(self, written: Field, right: str) -> str:
        """The line of a field with ``right`` in its place; empty where nothing would be left of it."""
        line, at = self.line(written.place.line), written.place.column - 1
        before, after = line[:at], line[written.end.column - 1 :]
        if not right:  # with the mark that parted it from the next
            after = re.sub(r"^\s*[,;]", "", after)
        return f"{before}{right}{after}".rstrip()

    def respelt(self, place: Place, wrong: str, right: str) -> str | None:
        """The line of ``place`` with one word for another."""
        line, at = self.line(place.line), place.column - 1
        return (
            f"{line[:at]}{right}{line[at + len(wrong) :]}" if line[at:].startswith(wrong) else None
        )


def read(text: str) -> Document:
    """Read protobuf text, as far as it can be understood."""
    reader = _Reader(text)
    root = Block(_START)
    reader.fields(root, closing=None, depth=0)
    return Document(text, root, reader.comments, reader.problems)


class _Token(NamedTuple):
    kind: str
    text: str
    place: Place


class _Reader:
    def __init__(self, text: str) -> None:
        self.comments: list[Comment] = []
        self.problems: list[Problem] = []
        self._tokens = list(self._tokenize(text))
        self._next = 0

    def _tokenize(self, text: str) -> Iterator[_Token]:
        starts = [0, *(match.end() for match in _NEWLINE.finditer(text)), len(text) + 1]
        line, last = 1, 0
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup
            if kind is None:
                continue  # spaces before the end
            at, value = match.start(kind), match.group(kind)
            while starts[line] <= at:
                line += 1
            place = Place(line, at - starts[line - 1] + 1)
            if kind == "comment":
                self.comments.append(Comment(value[1:].strip(), place, alone=last != line))
            else:
                last = line
                yield _Token("other" if kind == "rest" else kind, value, place)

    def fields(self, block: Block, closing: str | None, depth: int) -> None:
        """Read fields up to the closing mark, or to the end of the file."""
        while (token := self._peek()) is not None:
            if token.text in ("}", ">") and token.kind == "mark":
                self._next += 1
                if token.text == closing:
                    return
                self._complain(f"unexpected {token.text!r}", token)
            elif token.kind == "word":
                self._field(block, depth)
            else:
                self._next += 1
                self._complain(f"expected a field name, got {token.text[:20]!r}", token)
        if closing is not None:
            self.problems.append(
                Problem(f"a block that begins here is never closed by {closing!r}", block.place)
            )

    def _field(self, block: Block, depth: int) -> None:
        name = self._take()
        assert name is not None  # peeked by the caller
        found = Field(name.text, name.place)
        block.fields.append(found)
        has_colon = (mark := self._peek()) is not None and mark.text == ":"
        self._next += has_colon
        self._value(found, depth)
        last = self._tokens[min(self._next, len(self._tokens)) - 1]
        found.end = Place(last.place.line, last.place.column + len(last.text))
        if not has_colon and found.scalars():
            self.problems.append(Problem(f"a colon is missing after {found.name}", found.place))
        if (mark := self._peek()) is not None and mark.kind == "mark" and mark.text in ",;":
            self._next += 1

    def _value(self, found: Field, depth: int) -> None:
        token = self._peek()
        if token is None:
            self.problems.append(Problem(f"{found.name} has no value", found.place))
        elif token.kind == "mark" and token.text in "{<":
            self._next += 1
            block = Block(token.place)
            found.values.append(block)
            if depth >= _MAX_DEPTH:
                self._complain("nested too deeply", token)
                self._next = len(self._tokens)
                return
            self.fields(block, closing="}" if token.text == "{" else ">", depth=depth + 1)
        elif token.kind == "mark" and token.text == "[":
            self._next += 1
            self._list(found, token, depth)
        elif token.kind in ("string", "word", "number"):
            found.values.append(self._scalar())
        elif (
            token.text == "-"
            and (after := self._peek(1)) is not None
            and after.kind in ("number", "word")
        ):
            self._next += 2
            found.values.append(Scalar(f"-{after.text}", after.kind, token.place))
        else:
            self._complain(f"{found.name} has no value: got {token.text[:20]!r}", token)
            if token.text not in ("}", ">"):
                self._next += 1

    def _list(self, found: Field, opening: _Token, depth: int) -> None:
        """``[ a, b, … ]``; a comma belongs between two values and nowhere else."""
        expects_value = True
        while (token := self._peek()) is not None:
            if token.text == "]" and token.kind == "mark":
                self._next += 1
                if expects_value and found.values:
                    self._complain("a comma before ']'", token)
                return
            if token.text == "," and token.kind == "mark":
                if expects_value:
                    self._complain("a comma without a value before it", token)
                self._next += 1
                expects_value = True
            elif token.text in ("}", ">", ":", ";") and token.kind == "mark":
                break
            elif token.text == "[" and token.kind == "mark":
                self._complain("a list inside a list", token)
                self._next += 1
            else:
                if not expects_value:
                    self._complain("a comma is missing before this value", token)
                self._value(found, depth)
                expects_value = False
        self._complain("a list that begins here is never closed by ']'", opening)

    def _scalar(self) -> Scalar:
        """One scalar; strings that follow one another are one string."""
        token = self._take()
        assert token is not None  # peeked by the caller
        text = token.text
        while (
            token.kind == "string" and (more := self._peek()) is not None and more.kind == "string"
        ):
            self._next += 1
            text = text[:-1] + more.text[1:-1] + text[-1]
        if token.kind == "string" and "\\" in text:
            wrong = _ESCAPE.sub("", text).partition("\\")[2]
            if wrong:
                self._complain(f"there is no escape \\{wrong[0]}", token)
        return Scalar(text, token.kind, token.place)

    def _peek(self, ahead: int = 0) -> _Token | None:
        at = self._next + ahead
        return self._tokens[at] if at < len(self._tokens) else None

    def _take(self) -> _Token | None:
        token = self._peek()
        self._next += 1
        return token

    def _complain(self, message: str, token: _Token) -> None:
        hint = _HINTS.get(token.text[:1]) if token.kind == "other" else None
        self.problems.append(Problem(f"{message}; {hint}" if hint else message, token.place))
