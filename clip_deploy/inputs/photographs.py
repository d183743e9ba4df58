"""A folder of photographs, with captions where it has them: the user's, or the ten that ship with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError
from clip_deploy.resources import photographs_dir

if TYPE_CHECKING:
    from pathlib import Path

CAPTIONS = "captions.json"
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


@dataclass(frozen=True, slots=True)
class Photographs:
    """Pictures with a caption each: ``names`` and ``captions`` in the same order as ``paths``."""

    paths: tuple[Path, ...]
    captions: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(path.name for path in self.paths)


def photographs(folder: Path | None) -> Photographs:
    """The user's photographs, or the ten that ship with the package.

    ``captions.json`` in the folder gives captions to file names; a picture without one is only looked at.

    Raises:
        ConfigError: fewer than two pictures, or captions that do not belong to them.
    """
    folder = folder or photographs_dir()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", remedy="check the path of --images")
    captions = _captions(folder / CAPTIONS)
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if len(paths) < 2:
        raise ConfigError(
            f"{folder} holds {len(paths)} pictures",
            remedy="put two or more JPEG, PNG or WebP files there",
        )
    if strangers := sorted(set(captions) - {path.name for path in paths}):
        raise ConfigError(
            f"{folder / CAPTIONS} names {strangers[0]}, which is not there",
            remedy="correct the file names",
        )
    return Photographs(tuple(paths), tuple(captions.get(path.name, "") for path in paths))


def _captions(path: Path) -> dict[str, str]:
    """File name → caption, from an object or from a list of ``{"file": …, "caption": …}``."""
    if not path.exists():
        return {}
    remedy = "write a JSON object: file name → caption"
    try:
        data = json.loads(path.read_text("utf-8"))
        captions = (
            {row["file"]: row["caption"] for row in data} if isinstance(data, list) else dict(data)
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as captions: {error!r}", remedy=remedy) from error
    if not all(isinstance(text, str) for pair in captions.items() for text in pair):
        raise ConfigError(f"{path} holds a caption that is not a text", remedy=remedy)
    return captions
