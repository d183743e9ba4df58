"""What is to be published: the version of each model that a repository serves, file by file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clip_deploy.artifacts import MANIFEST, ExportedModel, engine_digests
from clip_deploy.errors import CheckFailed, ConfigError
from clip_deploy.files import digest
from clip_deploy.lint import Severity, lint
from clip_deploy.lint import target as make_target
from clip_deploy.publishing.configs import weights_of
from clip_deploy.publishing.records import Stamp
from clip_deploy.repository.assembly import CONFIG, read, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.artifacts import RepositoryModel
    from clip_deploy.lint import Target
    from clip_deploy.progress import Progress
    from clip_deploy.triton_schema import ModelConfig


@dataclass(frozen=True, slots=True)
class Source:
    """One model to publish.

    Args:
        folder: the version's.
        config: the text of config.pbtxt.
        files: what lies in the version's folder, by its path there.
        companions: what lies beside it in the model's folder, by its path there.
        promised: digests that the manifests beside a model name; what differs is damaged.
    """

    name: str
    backend: str
    folder: Path
    config: str
    weights: str
    files: dict[str, Path]
    companions: dict[str, Path]
    promised: dict[str, str]
    is_ensemble: bool = False
    _stamps: dict[Path, Stamp] = field(default_factory=dict, repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())

    def stamp(self, path: Path) -> Stamp:
        """Digest and length of one of its files, read once.

        Raises:
            ConfigError: it is not what the model's manifest says.
        """
        if path not in self._stamps:
            found = Stamp(digest([path]), path.stat().st_size)
            name = path.relative_to(self.folder).as_posix() if path in self.files.values() else ""
            if self.promised.get(name, found.sha256) != found.sha256:
                raise ConfigError(
                    f"{path} is not what was exported", remedy="render the model again"
                )
            self._stamps[path] = found
        return self._stamps[path]

    def stamps(self, paths: dict[str, Path]) -> dict[str, Stamp]:
        return {name: self.stamp(path) for name, path in sorted(paths.items())}


def read_sources(repository: Path, target: Target | None, progress: Progress) -> list[Source]:
    """Judge a repository, and take from it what is to be published.

    Args:
        target: what it will run on; None takes a machine with a GPU where a model asks for one.

    Raises:
        ConfigError: it is none, or serves several versions of a model.
        CheckFailed: the linter found an error.
    """
    found = read(repository)
    configs = {model.name: read_config(repository / model.name) for model in found.models}
    progress(f"lint of {repository}")
    report = lint([repository], target or _target(configs))
    if not report.ok():
        first = next(each for each in report.findings if each.severity is Severity.ERROR)
        raise CheckFailed(
            f"{repository} would not be served rightly: {first.code} {first.message} ({report.summary()})",
            remedy=f"clip-deploy lint {repository} shows all of it",
        )
    return [_source(repository / model.name, model, configs[model.name]) for model in found.models]


def _source(folder: Path, model: RepositoryModel, config: ModelConfig) -> Source:
    is_ensemble = config.platform == "ensemble"
    for step in config.ensemble_scheduling.step:
        if step.model_version > 0:
            raise ConfigError(
                f"{folder / CONFIG} asks for version {step.model_version} of {step.model_name}",
                remedy="write model_version: -1; versions get new numbers where they are published",
            )
    if len(model.served) > 1:
        raise ConfigError(
            f"{folder} serves versions {', '.join(map(str, model.served))}; one at a time is published",
            remedy="render it with --version-policy latest:1, or specific:N",
        )
    version = folder / str(model.served[0] if model.served else 1)
    text = (folder / CONFIG).read_text("utf-8") if (folder / CONFIG).is_file() else ""
    if not config.name:
        raise ConfigError(
            f"{folder} has no {CONFIG} that names the model",
            remedy="write one; a polling server would make up another",
        )
    files = _files(version)
    if not files:
        raise ConfigError(
            f"{version} holds no files",
            remedy="render the model again; an ensemble needs one, too: object storage has no empty folders",
        )
    promised = ExportedModel.read(version).files if (version / MANIFEST).is_file() else {}
    return Source(
        name=model.name,
        backend=config.backend or config.platform,
        folder=version,
        config=text,
        weights=weights_of(text, folder / CONFIG),
        files=files,
        companions={
            name: path
            for name, path in _files(folder).items()
            if name != CONFIG and not name.partition("/")[0].isdecimal()
        },
        promised=dict(promised) | engine_digests(version),
        is_ensemble=is_ensemble,
    )


def _files(folder: Path) -> dict[str, Path]:
    """Files below a folder by their path in it, hidden ones and Python's own left out."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in found.items()
        if not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    }


def _target(configs: dict[str, ModelConfig]) -> Target:
    """The machine that the models ask for; what they do not ask for is not held against them."""
    needs_gpu = any(
        config.backend == "tensorrt"
        or config.platform == "tensorrt_plan"
        or any(group.kind == group.KIND_GPU for group in config.instance_group)
        for config in configs.values()
    )
    return make_target("gpu" if needs_gpu else "auto")
