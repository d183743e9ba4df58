"""Rendered models → a model repository: complete before they are visible, a new version each time."""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from clip_deploy.artifacts import MANIFEST, REFERENCE, TOKENIZER, ModelRepository, RepositoryModel
from clip_deploy.compare import Reference
from clip_deploy.errors import ConfigError
from clip_deploy.files import digest, digest_or_none, replacing, storage
from clip_deploy.repository.rendering import WARMUP_FOLDER, parse_config, render, warmup_samples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.artifacts import EngineBuild
    from clip_deploy.spec import ServingSpec
    from clip_deploy.triton_schema import ModelConfig

CONFIG = "config.pbtxt"
FIRST = "1"
# What Python leaves beside a model that it has run.
COMPILED = "__pycache__"


def assemble(
    build: EngineBuild, serving: ServingSpec, repository: Path, *, templates: Path | None = None
) -> RepositoryModel:
    """Add one model to a repository: ``<repository>/<model>/<next version>/…`` and ``config.pbtxt``.

    The version appears under its number only when all its files are there; the config is replaced last. Beside the
    engine lie the manifest, the reference and the tokenizer: they travel with the model, and Triton ignores them.

    Raises:
        ConfigError: contradictory choices, a damaged export, a full disk, or a place that cannot be written to.
    """
    build.exported.require_whole()
    config = render(build, serving, templates=templates)  # judged before anything is written
    model = repository / build.name
    with storage(repository, ConfigError):
        repository.mkdir(parents=True, exist_ok=True)
        with _staging(repository) as staging:
            _fill_version(build, staging / FIRST)
            samples = {sample.file for sample in warmup_samples(build, serving)}
            _fill_warmup(build, samples, staging / WARMUP_FOLDER)
            (staging / CONFIG).write_text(config, "utf-8")
            version = _publish(staging, model)
    return RepositoryModel(build.name, build.backend, versions_in(model), (version,))


def unchanged(
    build: EngineBuild, serving: ServingSpec, repository: Path, *, templates: Path | None = None
) -> RepositoryModel | None:
    """The model as it stands in a repository, where ``assemble`` would only repeat it; None where it would not.

    Raises:
        ConfigError: contradictory choices.
    """
    text = render(build, serving, templates=templates)  # judged, whatever is there
    folder = repository / build.name
    versions = versions_in(folder) if folder.is_dir() else ()
    config = folder / CONFIG
    if not versions or not config.is_file():
        return None
    newest = folder / str(versions[-1])
    wanted = _version_files(build)
    samples = {sample.file for sample in warmup_samples(build, serving)}
    is_same = (
        config.read_text("utf-8", "replace") == text
        and {path.name for path in newest.iterdir()} - {COMPILED} == set(wanted)
        and all(digest_or_none(newest / name) == digest([path]) for name, path in wanted.items())
        and all((folder / WARMUP_FOLDER / name).is_file() for name in samples)
    )
    return _model(folder) if is_same else None


def read(path: Path) -> ModelRepository:
    """The models of a repository on disk, ours or anybody's.

    Raises:
        ConfigError: there is no repository, or one of its configs cannot be read.
    """
    if not path.is_dir():
        raise ConfigError(
            f"there is no model repository at {path}", remedy="run clip-deploy render-config first"
        )
    folders = sorted(
        folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )
    models = tuple(_model(folder) for folder in folders)
    if not models:
        raise ConfigError(
            f"the model repository {path} is empty", remedy="run clip-deploy render-config first"
        )
    return ModelRepository(path, models)


def read_config(folder: Path) -> ModelConfig:
    """The config of one model's folder; empty where there is none and Triton completes it itself."""
    path = folder / CONFIG
    if not path.is_file():
        return parse_config("", path)
    try:
        return parse_config(path.read_text("utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", remedy="write it in UTF-8") from error


def versions_in(model: Path) -> tuple[int, ...]:
    """Version numbers on disk, ascending; a folder whose name begins with a zero is no version to Triton either."""
    names = [folder.name for folder in model.iterdir() if folder.is_dir()]
    return tuple(sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]*", name)))


def _model(folder: Path) -> RepositoryModel:
    config = read_config(folder)
    versions = versions_in(folder)
    if not versions and config.platform != "ensemble":
        raise ConfigError(
            f"{folder} holds no version of the model", remedy="put its files into a folder named 1"
        )
    policy = config.version_policy
    served = versions[-max(policy.latest.num_versions, 1) :]
    if policy.HasField("all"):
        served = versions
    elif policy.HasField("specific"):
        served = tuple(v for v in versions if v in policy.specific.versions)
        if not served:
            raise ConfigError(
                f"{folder / CONFIG} serves versions {list(policy.specific.versions)}, none of which is there",
                remedy=f"serve one of {list(versions)}",
            )
    backend = config.backend or config.platform.removesuffix("_onnx").removesuffix("_plan")
    return RepositoryModel(folder.name, backend, versions, served)


@contextmanager
def _staging(repository: Path) -> Iterator[Path]:
    """A folder, laid out as a model's, on the repository's file system and where no polling server looks."""
    beside = repository.resolve().parent
    same_device = beside.stat().st_dev == repository.stat().st_dev
    place = beside if same_device else repository
    staging = Path(
        tempfile.mkdtemp(prefix=f".{repository.resolve().name}.", suffix=".tmp", dir=place)
    )
    staging.chmod(0o755)  # Triton may run as another user
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _version_files(build: EngineBuild) -> dict[str, Path]:
    """Where each file of a version comes from, by its name there."""
    directory = build.exported.directory
    extras = {
        name: directory / name
        for name in (MANIFEST, REFERENCE, TOKENIZER)
        if (directory / name).is_file()
    }
    return extras | dict(build.files)


def _fill_version(build: EngineBuild, folder: Path) -> None:
    folder.mkdir()
    for name, source in _version_files(build).items():
        shutil.copyfile(source, folder / name)


def _fill_warmup(build: EngineBuild, files: set[str], folder: Path) -> None:
    folder.mkdir()
    if files:
        directory, tower = build.exported.directory, build.exported.contract.tower
        row = Reference.read(directory / REFERENCE, tower).inputs[0].tobytes()
        for name in files:
            (folder / name).write_bytes(row)


def _publish(staging: Path, model: Path) -> int:
    """Move a staged model to where Triton looks; returns its version's number."""
    if not model.exists():
        try:
            staging.rename(model)
        except OSError:
            if not model.exists():  # otherwise another writer was first
                raise
        else:
            return int(FIRST)
    (model / WARMUP_FOLDER).mkdir(exist_ok=True)
    for sample in (staging / WARMUP_FOLDER).iterdir():
        sample.replace(model / WARMUP_FOLDER / sample.name)
    version = _claimed(staging / FIRST, model)
    with replacing(model / CONFIG) as temporary:
        shutil.copyfile(staging / CONFIG, temporary)
    return version


def _claimed(folder: Path, model: Path) -> int:
    """Rename ``folder`` to the next free version; two writers never get the same number."""
    version = max(versions_in(model), default=0) + 1
    while True:
        try:
            folder.rename(model / str(version))
        except OSError:
            if not (model / str(version)).exists():
                raise
            version += 1
        else:
            return version
