"""clip-deploy.toml → deployments; whatever it says wrongly is named with its line, and with what was meant."""

from __future__ import annotations

import difflib
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clip_deploy.deploy.keys import KEYS, TABLES, keys_of
from clip_deploy.deploy.kinds import written
from clip_deploy.deploy.lines import lines_of
from clip_deploy.deploy.nouns import Checks, Deployment, Publishing
from clip_deploy.engines.tensorrt.building import BuildOptions
from clip_deploy.errors import ConfigError
from clip_deploy.servers import ServerOptions
from clip_deploy.spec import EncoderSpec, EngineSpec, ServingSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clip_deploy.deploy.key import Key

_Noun = TypeVar("_Noun")

FILE = "clip-deploy.toml"
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_CHECKPOINTS = (".json", ".pt", ".pth", ".bin", ".safetensors", ".npz", ".ckpt")


@dataclass(frozen=True)
class _Text:
    """What was read, to say where something stands in it. Without a path it came from Python."""

    path: Path | None = None
    text: str = ""

    @cached_property
    def lines(self) -> dict[tuple[str, ...], int]:
        return lines_of(self.text)

    @property
    def folder(self) -> Path:
        """What relative paths are relative to."""
        return self.path.parent if self.path else Path()

    def at(self, *path: str) -> str:
        """``clip-deploy.toml, line 3: `` for the start of a message."""
        line = next(
            (self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None
        )
        parts = [str(self.path)] if self.path else []
        return ", ".join([*parts, *([f"line {line}"] if line else [])]) + (": " if parts else "")


def read(path: Path) -> tuple[Deployment, ...]:
    """The deployments of a file, in its order.

    Raises:
        ConfigError: there is no such file, it is no TOML, or it says something unknown or contradictory.
    """
    try:
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} has more than 1 MB", remedy=f"name a {FILE}")
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}", remedy="clip-deploy init writes one; --file names another"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", remedy="write it in UTF-8") from error
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", remedy="correct that line") from error
    return _deployments(data, _Text(path, text))


def deployments(tables: Mapping[str, Any]) -> tuple[Deployment, ...]:
    """The same from Python: name → table → key → value, as the file has them; paths are relative to where one is.

    Raises:
        ConfigError: something in it is unknown or contradictory.
    """
    return _deployments(tables, _Text())


def chosen(found: Sequence[Deployment], names: Sequence[str]) -> tuple[Deployment, ...]:
    """The named ones, in the file's order; all, where none is named.

    Raises:
        ConfigError: one is not there.
    """
    known = [each.name for each in found]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no deployment {name!r}", remedy=_meant(name, known))
    return tuple(each for each in found if not names or each.name in names)


def _deployments(data: Mapping[str, Any], text: _Text) -> tuple[Deployment, ...]:
    if not data:
        raise ConfigError(
            f"{text.path or 'the table'} describes no deployment",
            remedy='write one, as [search.encoder] with model = "ViT-B-32"',
        )
    made = tuple(_deployment(name, tables, text) for name, tables in data.items())
    places: dict[Path, str] = {}
    for each in made:
        for place in (each.out, each.repository):
            other = places.setdefault(place.resolve(), each.name)
            if other != each.name:
                raise ConfigError(
                    f"{text.at(each.name)}deployments {other} and {each.name} share {place}",
                    remedy="give each an out and a repository of its own, or leave both out",
                )
    return made


def _deployment(name: str, tables: Any, text: _Text) -> Deployment:
    if not isinstance(tables, dict) or name in TABLES:
        hint = f"[search.{name}]" if name in TABLES else "[search.encoder]"
        raise ConfigError(
            f"{text.at(name)}{name} stands outside of any deployment",
            remedy=f"name the deployment before its table, as {hint}",
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{text.at(name)}a deployment called {name!r}",
            remedy="use letters, digits, - and _: its folder has that name",
        )
    for table, values in tables.items():
        if table not in TABLES:
            raise ConfigError(
                f"{text.at(name, table)}{name} has no table {table!r}", remedy=_meant(table, TABLES)
            )
        if not isinstance(values, dict):
            raise ConfigError(
                f"{text.at(name, table)}{name}.{table} is no table",
                remedy=f"write [{name}.{table}]",
            )
        for key, value in values.items():
            _hold(name, table, key, value, text)
    return _built(name, tables, text)


def _hold(name: str, table: str, name_of_key: str, value: object, text: _Text) -> None:
    """Raise ConfigError unless the table has such a key, and the value is one for it."""
    place = text.at(name, table, name_of_key)
    key = keys_of(table).get(name_of_key)
    if key is None:
        raise ConfigError(
            f"{place}[{name}.{table}] has no key {name_of_key!r}",
            remedy=_meant_key(name, table, name_of_key),
        )
    if not key.kind.holds(value):
        raise ConfigError(
            f"{place}{name_of_key} = {_shown(value)} is not {key.kind.said}",
            remedy=f"write it as {key.name} = {key.shown()}",
        )
    for word in (value if isinstance(value, list) else [value]) if key.choices else []:
        if word not in key.choices:
            raise ConfigError(
                f"{place}{name_of_key} = {_shown(word)} is unknown",
                remedy=_meant(str(word), key.choices),
            )
    if key.kind.is_path and "$" in str(value):
        raise ConfigError(
            f"{place}{name_of_key} = {_shown(value)} names a variable, and none is expanded here",
            remedy="write the path itself, relative to this file; secrets stay in the environment",
        )


def _built(name: str, tables: Mapping[str, Any], text: _Text) -> Deployment:
    said: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {key.owner: {} for key in KEYS}
    for key in KEYS:
        if key.table == "publish" and "publish" not in tables:
            continue
        given = tables.get(key.table, {})
        if key.is_required and key.name not in given:
            raise ConfigError(
                f"{text.at(name, key.table)}[{name}.{key.table}] has no {key.name}",
                remedy=f"add {key.name} = {key.shown()}",
            )
        default = key.default_value()
        if isinstance(default, str):
            default = default.replace("NAME", name)
        value = said[key.path] = given.get(key.name, default)
        if value is not None and (key.name in given or key.default_value() != value):
            with _placing(name, key.table, tables, text):
                fields[key.owner][key.field] = key.made(_placed(key, value, text.folder))
    options = fields["BuildOptions"]
    if fields["Deployment"].get("backend") == "tensorrt":
        options.setdefault("release", said["server.triton_release"])

    def made(kind: type[_Noun], table: str) -> _Noun:
        with _placing(name, table, tables, text):
            return kind(**fields[kind.__name__])

    parts: dict[str, Any] = {
        "encoder": made(EncoderSpec, "encoder"),
        "engine": made(EngineSpec, "engine"),
        "plan": made(BuildOptions, "plan"),
        "serving": made(ServingSpec, "serving"),
        "server": made(ServerOptions, "server"),
        "checks": made(Checks, "checks"),
        "publish": made(Publishing, "publish") if "publish" in tables else None,
    }
    with _placing(name, "", tables, text):
        source = _sources(said, text.folder)
        return Deployment(name=name, said=said, source=source, **parts, **fields["Deployment"])


def _placed(key: Key, value: Any, folder: Path) -> Any:
    """A path as seen from here, where the file has it as seen from itself; a name stays one."""
    if key.kind.is_path is True:
        return _from_here(folder, value)
    if key.kind.is_path == "maybe" and _is_path(value, folder, always=key.table == "publish"):
        return str(_from_here(folder, value))
    return value


def _is_path(value: str, folder: Path, *, always: bool) -> bool:
    if "://" in value or value.startswith(("hf-hub:", "local-dir:", "random")):
        return False
    begins = value.startswith(("./", "../", "/", "~"))
    is_file = value.endswith(_CHECKPOINTS) or (folder / value).exists()
    return always or begins or is_file


def _sources(said: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    words = [said["encoder.model"], said["encoder.pretrained"] or "random"]
    local = [word.removeprefix("local-dir:") for word in words]
    return tuple(
        _from_here(folder, word)
        for word, whole in zip(local, words)
        if word != whole or _is_path(word, folder, always=False)
    )


def _from_here(folder: Path, value: str) -> Path:
    path = (folder / Path(value).expanduser()).resolve()
    here = Path.cwd()
    return Path(os.path.relpath(path, here)) if path.is_relative_to(here) else path


@contextmanager
def _placing(name: str, table: str, tables: Mapping[str, Any], text: _Text) -> Iterator[None]:
    """Say of a failure where it stands: at the first key that it names, else at its table, else at the deployment."""
    try:
        yield
    except ConfigError as error:
        named = {key: (each, key) for each in tables for key in tables[each]}
        words = re.findall(r"[a-z_]+", _in_keys(f"{error}  {error.remedy}"))
        path = next((named[word] for word in words if word in named), (table,))
        raise ConfigError(
            f"{text.at(name, *path)}{_in_keys(str(error))}", remedy=_in_keys(error.remedy)
        ) from error


def _in_keys(remedy: str) -> str:
    """A remedy for the command line, in the words of the file: ``--max-batch 8`` is ``max_batch = 8``."""
    flags = {key.flag.partition("--")[2]: key.name for key in KEYS if "--" in key.flag}

    def name(match: re.Match[str]) -> str:
        return flags.get(match[1], match[1].replace("-", "_"))

    if "clip-deploy " in remedy:
        return remedy
    return re.sub(r"--([a-z][a-z0-9-]*)", name, remedy)


def _meant(word: str, known: Any) -> str:
    names = [str(each) for each in known]
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"use {', '.join(names)}"


def _meant_key(deployment: str, table: str, word: str) -> str:
    """The key that was meant: misspelt, written as its flag or as its field in Python, or of another table."""
    name = word.lstrip("-").replace("-", "_")
    own = keys_of(table)
    for key in own.values():
        flag = key.flag.rpartition(" ")[2].lstrip("-").replace("-", "_")
        if name in (key.name, key.field, flag.lower()):
            return f"did you mean {key.name}?"
    if elsewhere := [key for key in KEYS if name == key.name]:
        return f"{name} belongs into [{deployment}.{elsewhere[0].table}]"
    return _meant(name, own)


def _shown(value: object) -> str:
    text = written(value)
    return text if len(text) < 60 else f"{text[:57]}…"
