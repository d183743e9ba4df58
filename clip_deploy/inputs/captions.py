"""Captions of pictures, from a JSON or a CSV file."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def read_captions(path: Path) -> dict[str, str]:
    """File name → caption.

    JSON: an object, or a list of ``{"file": …, "caption": …}``. CSV: columns that the first row calls ``file`` and
    ``caption``.

    Raises:
        ConfigError: it is something else.
    """
    table = path.suffix.lower() == ".csv"
    remedy = (
        "write a first row with file and caption, separated by commas"
        if table
        else "write a JSON object: file name → caption"
    )
    try:
        if table:
            with path.open(encoding="utf-8-sig", newline="") as file:
                data = list(csv.DictReader(file, strict=True))
        else:
            data = json.loads(path.read_text("utf-8"))
        captions = (
            {row["file"]: row["caption"] for row in data} if isinstance(data, list) else dict(data)
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as captions: {error!r}", remedy=remedy) from error
    if not all(isinstance(text, str) for pair in captions.items() for text in pair):
        raise ConfigError(f"{path} holds a caption that is not a text", remedy=remedy)
    return captions
