"""Where pictures come from: a folder of files, or a Parquet file. Nothing outside of either is read."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from clip_deploy.errors import ConfigError, InputError
from clip_deploy.indexes.port import MAX_CAPTION_CHARACTERS
from clip_deploy.inputs.captions import read_captions
from clip_deploy.inputs.gallery import HEAD_BYTES, SUFFIXES, begins_like_a_picture
from clip_deploy.inputs.images import LIMITS
from clip_deploy.inputs.photographs import CAPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.inputs.images import ImageLimits


@dataclass(frozen=True, slots=True)
class Unread:
    """A file or a row that could not be read, and why."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A picture's file, whole, and what it shows in words."""

    data: bytes
    caption: str

    def digest(self) -> str:
        """SHA-256, in hex, of the file and the caption: when neither changed, nothing has to be done."""
        return hashlib.sha256(self.data + b"\0" + self.caption.encode()).hexdigest()


class Entry(Protocol):
    """One picture before it is read."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str: ...

    def load(self) -> Loaded | None:
        """Read it; None where it is no picture and nobody would think so.

        Raises:
            InputError: it cannot be read.
        """


class Source(Protocol):
    """Pictures, one after the other.

    ``origin`` names where they are from. ``gaps`` are folders that could not be looked into: what is missing from them
    must not be taken for gone. ``strangers`` are names with a caption and without a picture.
    """

    @property
    def origin(self) -> str: ...

    @property
    def gaps(self) -> tuple[Unread, ...]: ...

    @property
    def strangers(self) -> tuple[str, ...]: ...

    def __len__(self) -> int:
        """How many entries there are."""

    def __iter__(self) -> Iterator[Entry]: ...


def open_source(
    place: Path,
    *,
    captions: Path | None = None,
    origin: str | None = None,
    limits: ImageLimits = LIMITS,
) -> Source:
    """The pictures of a folder or of a Parquet file.

    Args:
        place: the folder, or the file.
        captions: a file of captions, for a folder; by default its captions.json, where it has one.
        origin: what the place is called; its path by default.
        limits: what one picture may cost.

    Raises:
        ConfigError: there is nothing, or something else.
    """
    origin = origin or _text(str(place.resolve()))
    if place.is_dir():
        beside = place / CAPTIONS
        path = captions or (beside if beside.is_file() else None)
        return _list_folder(place, origin, read_captions(path) if path else {}, limits)
    if not place.is_file():
        raise ConfigError(f"there is no {place}", remedy="name a folder or a Parquet file")
    if captions is not None:
        raise ConfigError(
            "--captions is for a folder", remedy="put a column named caption into the Parquet file"
        )
    from clip_deploy.indexes.parquet import ParquetSource

    return ParquetSource.open(place, origin, limits)


def derived_id(origin: str, source: str) -> str:
    """The id of a picture that has none of its own: the same for the same place and name."""
    return hashlib.sha256(f"{origin}\0{source}".encode()).hexdigest()[:32]


def read_picture(path: Path, root: Path, limits: ImageLimits) -> bytes:
    """The bytes of a file inside ``root``, at most one more than allowed.

    Raises:
        InputError: it is not there, not a file, or outside.
    """
    try:
        found = path.resolve(strict=True)
        if not found.is_relative_to(root):
            raise InputError("it is a link out of the folder", remedy="copy the file into it")
        if not stat.S_ISREG(found.stat().st_mode):
            raise InputError("it is not a file", remedy="name a file")
        with found.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; zeros in a name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"it cannot be read: {why}", remedy="check the file") from error


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a folder. Beside it may lie its caption, under the same name with .txt."""

    path: Path
    root: Path
    id: str
    source: str
    caption: str | None
    limits: ImageLimits

    def load(self) -> Loaded | None:
        """See ``Entry.load``."""
        expected = self.path.suffix.lower() in SUFFIXES
        try:
            data = read_picture(self.path, self.root, self.limits)
        except InputError:
            if not expected:
                return None
            raise
        if not expected and not begins_like_a_picture(data[:HEAD_BYTES]):
            return None
        return Loaded(data, self._caption())

    def _caption(self) -> str:
        if self.caption is not None:
            return bounded_caption(self.caption)
        beside = self.path.with_suffix(".txt")
        if beside == self.path or not beside.is_file():
            return bounded_caption(in_words(Path(self.source)))
        try:
            with beside.open("rb") as file:
                return bounded_caption(file.read(4 * MAX_CAPTION_CHARACTERS + 1).decode().strip())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"its caption {beside.name} cannot be read: {error}", remedy="write it as UTF-8"
            ) from error


@dataclass(frozen=True, slots=True)
class FolderSource:
    """The files of a folder and of its folders, by name. Hidden ones are left out, links to folders not followed."""

    origin: str
    entries: tuple[FileEntry, ...]
    gaps: tuple[Unread, ...]
    strangers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self.entries)


def _list_folder(
    place: Path, origin: str, captions: dict[str, str], limits: ImageLimits
) -> FolderSource:
    root = place.resolve()
    entries, gaps, used = [], [], set()

    def missed(error: OSError) -> None:
        gaps.append(Unread(_text(str(error.filename)), f"not looked into: {error.strerror}"))

    for folder, folders, names in os.walk(root, onerror=missed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder) / name
            source = _text(path.relative_to(root).as_posix())
            key = next((key for key in (source, _text(name)) if key in captions), None)
            used.add(key)
            entries.append(
                FileEntry(
                    path,
                    root,
                    derived_id(origin, source),
                    source,
                    None if key is None else captions[key],
                    limits,
                )
            )
    strangers = tuple(sorted(set(captions) - used))
    return FolderSource(origin, tuple(entries), tuple(gaps), strangers)


def in_words(path: Path) -> str:
    """A file's name as a caption: ``red-shoes_02.jpg`` → ``red shoes 02``."""
    return " ".join(path.stem.replace("-", " ").replace("_", " ").split())


def bounded_caption(text: str) -> str:
    """The caption, if it is one.

    Raises:
        InputError: it is too long, or not text.
    """
    if len(text) > MAX_CAPTION_CHARACTERS:
        raise InputError(
            f"its caption is longer than {MAX_CAPTION_CHARACTERS:,} characters",
            remedy="shorten it",
        )
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError("its caption holds half of a character", remedy="write it as UTF-8")
    return text


def _text(name: str) -> str:
    """A name from the file system as text; bytes that are not UTF-8 are spelled out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
