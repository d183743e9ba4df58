"""A folder of photographs, with captions where it has them: the user's, or the ten that ship with the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError
from clip_deploy.inputs.captions import read_captions
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
    captions = read_captions(folder / CAPTIONS) if (folder / CAPTIONS).exists() else {}
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
