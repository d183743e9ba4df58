"""Words of captions and queries that say nothing about a picture; the same for every engine."""

from __future__ import annotations

STOP_WORDS = (
    *(
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
    ),
    *("no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these"),
    *("they", "this", "to", "was", "will", "with"),
)
