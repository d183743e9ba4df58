"""``# clip-deploy: ignore CD203 reason``: findings that somebody knows about, with the reason why they stay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.text import Document, Place

_COMMENT = re.compile(
    r"clip-deploy:\s*ignore\b[\s:]*(?P<codes>(?:CD\d+[\s,]*)*)(?P<reason>.*)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Suppression:
    """One comment. ``line`` is the line it speaks of; None for the whole model."""

    codes: tuple[str, ...]
    reason: str
    line: int | None
    place: Place

    def covers(self, code: str, line: int | None) -> bool:
        return code in self.codes and bool(self.reason) and (self.line is None or self.line == line)


def suppressions(document: Document) -> Iterator[Suppression]:
    """The comments of a file.

    After something on a line, a comment speaks of that line; on a line of its own, of the next line with something on
    it; above the first field, of the whole model, files and folders included.
    """
    fields = sorted({field.place.line for field in document.root.walk()})
    for comment in document.comments:
        found = _COMMENT.search(comment.text)
        if found is None:
            continue
        codes = tuple(code.upper() for code in re.findall(r"CD\d+", found["codes"], re.IGNORECASE))
        line: int | None = comment.place.line
        if comment.alone:
            is_head = not fields or comment.place.line < fields[0]
            line = (
                None
                if is_head
                else next((n for n in fields if n > comment.place.line), comment.place.line)
            )
        yield Suppression(codes, found["reason"].strip(), line, comment.place)
