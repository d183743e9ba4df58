"""Files that are rendered again and again, beside hands that may have changed them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_deploy import __version__
from clip_deploy.errors import ConfigError
from clip_deploy.files import digest_or_none, replacing, storage, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RECORD = ".rendered.json"


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the files: written or the same as before; removed, because they are no longer part of it; kept,
    because they are no longer part of it and somebody changed them."""

    written: tuple[Path, ...]
    unchanged: tuple[Path, ...]
    removed: tuple[Path, ...]
    kept: tuple[Path, ...]


def write(files: Mapping[str, str], out: Path, *, force: bool = False) -> Written:
    """Put the files into ``out``, all or, where a person changed one, none.

    ``.rendered.json`` there keeps the digests of what was rendered last: what differs from it was changed by hand.

    Raises:
        ConfigError: a file was changed by hand and ``force`` is not given; or the place cannot be written to.
    """
    with storage(out, ConfigError):
        record = _record(out)
        new = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
        found = {name: digest_or_none(out / name) for name in (*record, *new)}
        changed = [name for name in new if found[name] not in (None, new[name], record.get(name))]
        if changed and not force:
            raise ConfigError(
                f"{', '.join(str(out / name) for name in changed)}: not as it was rendered, somebody changed it",
                remedy="put changes into compose.override.yaml or a template (--templates); --force drops them here",
            )
        return _write(files, out, record, new, found)


def _write(
    files: Mapping[str, str],
    out: Path,
    record: Mapping[str, str],
    new: Mapping[str, str],
    found: Mapping[str, str | None],
) -> Written:
    written = [name for name in new if found[name] != new[name]]
    for name in written:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(out / name) as temporary:
            temporary.write_text(files[name], "utf-8")
    gone = [name for name in record if name not in new and found[name] is not None]
    removed = [name for name in gone if found[name] == record[name]]
    for name in removed:
        (out / name).unlink()
    write_json(out / RECORD, {"version": __version__, "sha256": dict(new)})
    return Written(
        *(
            tuple(out / name for name in names)
            for names in (
                written,
                [name for name in new if name not in written],
                removed,
                [name for name in gone if name not in removed],
            )
        )
    )


def _record(out: Path) -> dict[str, str]:
    path = out / RECORD
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text("utf-8"))["sha256"]
        # Names from a file are paths to delete: only those that lie inside are believed.
        return {
            name: str(value)
            for name, value in rows.items()
            if (out / name).resolve().is_relative_to(out.resolve())
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}", remedy="delete it, and render with --force"
        ) from error
