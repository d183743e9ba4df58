"""How long work tells its caller where it is: a function that takes the name of each step as it begins."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(step: str) -> None:
    """Nobody is watching."""
