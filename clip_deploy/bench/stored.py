"""What ``bench`` and ``capacity`` wrote as JSON, read back by whoever builds on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SCHEMA = 1
_Parsed = TypeVar("_Parsed")


def read_stored(
    path: Path,
    kinds: tuple[str, ...],
    parse: Callable[[Mapping[str, Any]], _Parsed],
    *,
    remedy: str,
) -> _Parsed:
    """What ``parse`` makes of a file of one of these kinds.

    Raises:
        ConfigError: the file is missing, damaged, of another kind, or of another version.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", remedy=remedy) from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in kinds:
        what = f"a {kind}, not a {' or '.join(kinds)}" if kind else "no benchmark"
        raise ConfigError(f"{path} holds {what}", remedy=remedy)
    if data.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} has schema {data.get('schema')}; this version reads {SCHEMA}", remedy=remedy
        )
    try:
        return parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}", remedy=remedy) from error
