"""Pictures from a Parquet file: its columns are read, nothing in it is executed.

``image`` holds the bytes of files (or, as in data sets of Hugging Face, structures with ``bytes`` and ``path``).
Instead of it ``path`` may name files in the Parquet file's own folder. ``caption`` and ``id`` (text or integers) are
optional, other columns are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError, InputError, extra
from clip_deploy.indexes.sources import (
    Loaded,
    Unread,
    bounded_caption,
    derived_id,
    in_words,
    read_picture,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.inputs.images import ImageLimits

_ROWS_AT_ONCE = 16
_COLUMNS = ("image", "path", "caption", "id")


@dataclass(frozen=True, slots=True)
class RowEntry:
    """One row. Its picture is ``data``, or the file ``path`` inside ``root``."""

    id: str
    source: str
    data: bytes | None
    path: str | None
    caption: str | None
    root: Path
    limits: ImageLimits

    def load(self) -> Loaded | None:
        """See ``sources.Entry.load``."""
        data = self.data
        if data is None:
            if self.path is None:
                raise InputError("the row has no picture", remedy="fill in image or path")
            data = read_picture(self.root / self.path, self.root, self.limits)
        words = in_words(Path(self.path)) if self.path else ""
        return Loaded(data, bounded_caption(words if self.caption is None else self.caption))


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """The rows of a file, a few at a time."""

    origin: str
    file: Any
    place: Path
    columns: tuple[str, ...]
    limits: ImageLimits
    gaps: tuple[Unread, ...] = ()
    strangers: tuple[str, ...] = ()

    @classmethod
    def open(cls, place: Path, origin: str, limits: ImageLimits) -> ParquetSource:
        """Read what the file says about itself.

        Raises:
            ConfigError: it is no Parquet file, or has no column of pictures.
        """
        with extra("index"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        try:
            file = pq.ParquetFile(place)
            schema = file.schema_arrow
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"{place} is no folder, and no Parquet file that can be read: {error}",
                remedy="name a folder of pictures, or a Parquet file",
            ) from error
        columns = tuple(name for name in _COLUMNS if name in schema.names)
        for name in columns:
            _require_kind(pa, place, name, schema.field(name).type)
        if "image" not in columns and "path" not in columns:
            raise ConfigError(
                f"{place} has the columns {', '.join(schema.names[:10])}: none of pictures",
                remedy="name the bytes of the files image, or their paths path",
            )
        return cls(origin, file, place, columns, limits)

    def __len__(self) -> int:
        return int(self.file.metadata.num_rows)

    def __iter__(self) -> Iterator[RowEntry]:
        number = 0
        try:
            for batch in self.file.iter_batches(_ROWS_AT_ONCE, columns=list(self.columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield self._entry(row, number)
        except (OSError, ValueError) as error:  # pyarrow's own are both
            raise ConfigError(
                f"{self.place} is damaged after row {number}: {error}",
                remedy="write the Parquet file again",
            ) from error

    def _entry(self, row: dict[str, Any], number: int) -> RowEntry:
        image: Any = row.get("image")
        data, path = image, row.get("path")
        if isinstance(image, dict):
            data, path = image.get("bytes"), image.get("path") or path
        source = path or f"row {number}"
        id = row.get("id")
        known = derived_id(self.origin, source) if id is None else str(id)
        if id is not None and path is None:
            source = known
        return RowEntry(
            known, source, data, path, row.get("caption"), self.place.parent.resolve(), self.limits
        )


def _require_kind(pa: Any, place: Path, name: str, kind: Any) -> None:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    bytes_ = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    right = {
        "image": bytes_ or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0),
        "id": text or pa.types.is_integer(kind),
    }
    if not right.get(name, text):
        raise ConfigError(
            f"the column {name} of {place} holds {kind}",
            remedy="write image as binary, path and caption as text, id as text or integers",
        )
