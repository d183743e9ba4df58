"""Files and their manifests: written whole or not at all, read back and held against their digests.

Every step leaves a folder with a ``manifest.json``; the next step reads only that. A folder is built beside its place
under a hidden name and renamed into it, so that an interrupted or failed run leaves what was there before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.contract import Contract
from clip_deploy.errors import ClipDeployError, ConfigError
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SCHEMA = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 64 * 2**20
REFERENCE = "reference.npz"
TOKENIZER = "tokenizer.json"

_STORAGE_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO"),
        *("ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY", "ENAMETOOLONG"),
    )
}


@dataclass(frozen=True, slots=True)
class GraphFile:
    """An ONNX graph on disk. ``data`` names its one external weight file, for graphs beyond 2 GB."""

    file: str
    opset: int
    ir_version: int
    sha256: str
    size_bytes: int
    data: str | None = None


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What ``export`` leaves: an ONNX graph, its contract, real inputs with torch's answers, and how well they agree.

    Args:
        directory: the folder that holds all files named here.
        key: the digest of everything that decided the export; equal keys mean there is nothing to do.
        max_batch: the largest batch that was checked, and so the largest that may be served.
        source: model, weights, activation, and the checkpoint's SHA-256 (null for random weights).
        parity: figures of the comparison with torch, by name.
        conversion: of an FP16 graph, the nodes that stay in FP32 and why; empty for FP32.
        files: SHA-256 of every file beside the manifest.
    """

    directory: Path
    key: str
    contract: Contract
    graph: GraphFile
    max_batch: int
    source: Mapping[str, Any]
    parity: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, str]
    conversion: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The Triton model's name."""
        return self.contract.tower.model_name

    @property
    def graph_files(self) -> tuple[Path, ...]:
        """The graph, and its weights where they lie outside."""
        names = (self.graph.file, self.graph.data)
        return tuple(self.directory / name for name in names if name)

    def tokenizer_data(self) -> str | None:
        """The text of ``tokenizer.json``, for a text tower."""
        return (self.directory / TOKENIZER).read_text("utf-8") if self.contract.tokens else None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "exported-model",
            "name": self.name,
            "key": self.key,
            "max_batch": self.max_batch,
            "contract": self.contract.to_json(),
            "graph": asdict(self.graph),
            "source": dict(self.source),
            "parity": dict(self.parity),
            "conversion": dict(self.conversion),
            "versions": dict(self.versions),
            "files": dict(self.files),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], directory: Path) -> ExportedModel:
        return cls(
            directory=directory,
            contract=Contract.from_json(data["contract"]),
            graph=GraphFile(**data["graph"]),
            conversion=data.get("conversion", {}),
            **{
                name: data[name]
                for name in ("key", "max_batch", "source", "parity", "versions", "files")
            },
        )

    @classmethod
    def read(cls, directory: Path) -> ExportedModel:
        """Read an export back.

        Raises:
            ConfigError: there is none, it was written by another schema, or its manifest is damaged.
        """
        path = directory / MANIFEST
        remedy = f"run clip-deploy export again with --out {directory.parent}"
        if not path.is_file():
            raise ConfigError(f"{directory} holds no exported model (no {MANIFEST})", remedy=remedy)
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise ValueError(f"{path.stat().st_size:,} bytes are no manifest")
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", remedy=remedy) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ConfigError(f"{path} does not follow schema {SCHEMA}", remedy=remedy)
        try:
            return cls.from_json(data, directory)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error!r}", remedy=remedy) from error

    def write_manifest(self) -> None:
        """Write ``manifest.json`` last, into a folder that is still being built."""
        write_json(self.directory / MANIFEST, self.to_json())

    def damaged_files(self) -> list[str]:
        """Names of files that are missing or no longer what the manifest says."""
        return [
            name
            for name, sha256 in self.files.items()
            if digest_or_none(self.directory / name) != sha256
        ]


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """What a Triton backend opens: the files of one model version, and the export they came from.

    ``files`` maps names inside the version folder to the files to copy there; ``kinds`` our names of the instance
    kinds that the backend can run as to Triton's.
    """

    exported: ExportedModel
    backend: str
    files: Mapping[str, Path]
    kinds: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.exported.name


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One model of a repository: ``versions`` on disk, ``served`` those that its version policy lets Triton load."""

    name: str
    backend: str
    versions: tuple[int, ...]
    served: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelRepository:
    """A Triton model repository on disk."""

    path: Path
    models: tuple[RepositoryModel, ...]

    @property
    def backends(self) -> frozenset[str]:
        return frozenset(model.backend for model in self.models)

    def version_folder(self, model: RepositoryModel) -> Path:
        """The folder of the newest version that is served."""
        return self.path / model.name / str(max(model.served))


def exported_models(directories: Iterable[Path]) -> list[ExportedModel]:
    """Read exports: each directory is one tower's folder, or the parent of both."""
    found = []
    for directory in directories:
        towers = [
            directory / t.model_name
            for t in Tower
            if (directory / t.model_name / MANIFEST).is_file()
        ]
        found += [ExportedModel.read(path) for path in towers or [directory]]
    names = [model.name for model in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{', '.join(repeated)} is given more than once", remedy="name each export once"
        )
    return found


def digest(paths: Iterable[Path]) -> str:
    """SHA-256, in hex, of the files' bytes one after the other; for one file, what ``sha256sum`` prints."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def digest_or_none(path: Path) -> str | None:
    """The digest of a file, or None where there is none."""
    return digest([path]) if path.is_file() else None


def digest_json(value: object) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write JSON for people: indented, UTF-8, renamed into place."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``; rename it into place when the block succeeds."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        temporary.chmod(0o644)
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def building(directory: Path, failure: type[ClipDeployError]) -> Iterator[Path]:
    """Yield a hidden folder beside ``directory``; put it in its place when the block succeeds.

    What stood there before stays until the new folder is complete. Leftovers of killed runs are removed first.

    Raises:
        failure: the disk is full, or the place cannot be written to.
    """
    with storage(directory, failure):
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        temporary = Path(
            tempfile.mkdtemp(
                prefix=f".{directory.name}.{os.getpid()}.", suffix=".tmp", dir=directory.parent
            )
        )
        temporary.chmod(0o755)
        try:
            yield temporary
            _swap(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def storage(path: Path, failure: type[ClipDeployError]) -> Iterator[None]:
    """Translate failures of the file system into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRNOS:
            raise
        free = shutil.disk_usage(_nearest(path)).free / 1e9
        raise failure(
            f"cannot write {path}: {error.strerror or error}",
            remedy=f"check the place and its permissions, and make room ({free:.1f} GB are free), then run it again",
        ) from error


def _nearest(path: Path) -> Path:
    return next(parent for parent in (path, *path.resolve().parents) if parent.exists())


def _swap(temporary: Path, directory: Path) -> None:
    if not directory.exists():
        temporary.rename(directory)
        return
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old.tmp")
    directory.rename(old)
    try:
        temporary.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Clean up after killed runs; one that died between the two renames of ``_swap`` has its folder put back."""
    for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):
        pid = leftover.name.removeprefix(f".{directory.name}.").split(".")[0]
        if not pid.isdecimal() or _alive(int(pid)):
            continue
        if leftover.name.endswith(".old.tmp") and not directory.exists():
            leftover.rename(directory)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
