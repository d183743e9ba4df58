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

    ``captions.json`` in the folder maps file names to captions; a picture without one is only looked at.

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
    if not path.exists():
        return {}
    try:
        captions = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", remedy="write a JSON object: file name → caption"
        ) from error
    if not isinstance(captions, dict) or not all(
        isinstance(caption, str) for caption in captions.values()
    ):
        raise ConfigError(
            f"{path} is not a JSON object of captions",
            remedy="write a JSON object: file name → caption",
        )
    return captions
