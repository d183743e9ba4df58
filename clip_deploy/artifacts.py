"""What each step leaves for the next one: folders with a manifest, read back and held against their digests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.contract import Contract
from clip_deploy.errors import ConfigError
from clip_deploy.files import digest_or_none, write_json
from clip_deploy.spec import BatchProfile, Tower

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 64 * 2**20
REFERENCE = "reference.npz"
TOKENIZER = "tokenizer.json"


def read_manifest(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a manifest of our schema.

    Raises:
        ConfigError: it cannot be read, is none, or follows another schema.
    """
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes are no manifest")
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", remedy=remedy) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is damaged, or does not follow schema {SCHEMA}", remedy=remedy)
    return data


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
        if not isinstance(data["max_batch"], int):
            raise TypeError(f"max_batch is {data['max_batch']!r}")
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
        data = read_manifest(path, remedy)
        try:
            return cls.from_json(data, directory)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error!r}", remedy=remedy) from error

    def write_manifest(self) -> None:
        """Write ``manifest.json`` last, into a folder that is still being built."""
        write_json(self.directory / MANIFEST, self.to_json())

    def require_whole(self) -> None:
        """Raise ConfigError where a file is no longer what was checked."""
        if damaged := self.damaged_files():
            raise ConfigError(
                f"{self.directory} is damaged: {', '.join(damaged)} is not what was checked",
                remedy="export the model again",
            )

    def damaged_files(self) -> list[str]:
        """Names of files that are missing or no longer what the manifest says."""
        return [
            name
            for name, sha256 in self.files.items()
            if digest_or_none(self.directory / name) != sha256
        ]


ENGINE = "engine.json"


def engine_digests(folder: Path) -> dict[str, str]:
    """SHA-256 by name of the files that an engine put into the place of the graph; empty where the graph is served.

    Raises:
        ConfigError: the engine's manifest is damaged.
    """
    path = folder / ENGINE
    if not path.is_file():
        return {}
    data = read_manifest(path, "render the model again")
    found = data.get("files") or {data.get("file"): data.get("sha256")}
    if not isinstance(found, dict) or not all(isinstance(v, str) for p in found.items() for v in p):
        raise ConfigError(f"{path} is damaged: it names no files", remedy="render the model again")
    return found


def engine_precision(exported: ExportedModel) -> str | None:
    """What the engine beside a served model was checked in; None where it has the graph's own precision."""
    path = exported.directory / ENGINE
    return (
        read_manifest(path, "render the model again").get("precision") if path.is_file() else None
    )


# What a plan's manifest holds, and of which kind it is.
_PLAN_FIELDS: dict[str, tuple[type, ...]] = {
    "file": (str,),
    "sha256": (str,),
    "size_bytes": (int,),
    "profile": (str,),
    "half_share": (int, float, type(None)),
    "provenance": (dict,),
}


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """What ``build-trt`` leaves beside an export: a TensorRT plan, and what was read back from it.

    Args:
        directory: the folder that holds the plan and this manifest.
        file: the plan's name.
        profile: the batch sizes that it runs.
        half_share: the share of its layers that read or write FP16; None where the plan does not tell.
        provenance: who built it on what: TensorRT, CUDA, driver, GPU, options, and the graph's digest.
    """

    directory: Path
    file: str
    sha256: str
    size_bytes: int
    profile: BatchProfile
    half_share: float | None
    provenance: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.directory / self.file

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "tensorrt-plan",
            "file": self.file,
            "sha256": self.sha256,
            "size_bytes": self.size_bytes,
            "profile": str(self.profile),
            "half_share": self.half_share,
            "provenance": dict(self.provenance),
        }

    def write(self) -> None:
        write_json(self.directory / ENGINE, self.to_json())

    @classmethod
    def read(cls, directory: Path) -> BuiltPlan:
        """Read a plan's manifest back.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        path = directory / ENGINE
        remedy = "run clip-deploy build-trt"
        if not path.is_file():
            raise ConfigError(f"{directory} holds no TensorRT plan", remedy=remedy)
        data = read_manifest(path, remedy)
        try:
            values = {name: data[name] for name in _PLAN_FIELDS}
            for name, kinds in _PLAN_FIELDS.items():
                if not isinstance(values[name], kinds):
                    raise TypeError(f"{name} is {values[name]!r}")
            if Path(values["file"]).name != values["file"]:
                raise ValueError(f"file {values['file']!r} lies elsewhere")
            profile = BatchProfile.parse(values.pop("profile"))
            return cls(directory, profile=profile, **values)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is damaged: {error!r}", remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """What a Triton backend opens: the files of one model version, and the export they came from.

    ``files`` maps names inside the version folder to the files to copy there; ``kinds`` our names of the instance
    kinds that the backend can run as to Triton's. ``max_batch`` is the largest batch that the engine runs, where that
    is less than what the export was checked at; ``parameters`` go into config.pbtxt.
    """

    exported: ExportedModel
    backend: str
    files: Mapping[str, Path]
    kinds: Mapping[str, str]
    max_batch: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def largest_batch(self) -> int:
        """The largest batch that may be served."""
        return min(self.exported.max_batch, self.max_batch or self.exported.max_batch)

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
