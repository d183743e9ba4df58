"""One deployment on its way: what its steps share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy import repository as repositories
from clip_deploy.artifacts import MANIFEST, ExportedModel, exported_models
from clip_deploy.deploy.state import Digests, State
from clip_deploy.errors import ConfigError
from clip_deploy.files import storage, write_json
from clip_deploy.progress import Progress, silent
from clip_deploy.repository.assembly import COMPILED, CONFIG
from clip_deploy.repository.rendering import WARMUP_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.deploy.nouns import Deployment

REPORTS = "reports"
LINT_SARIF, LINT_NOTES = "lint.sarif", "lint.annotations"


@dataclass(slots=True)
class Job:
    """A deployment, what is remembered of it, and who is told about it.

    Args:
        required: rungs that must not be skipped.
        force: whether a step makes everything anew.
        progress: told what is going on inside a step.
        warn: told what should be read, and is no failure.
    """

    deployment: Deployment
    state: State
    required: frozenset[str] = frozenset()
    force: bool = False
    digests: Digests = field(default_factory=Digests)
    progress: Progress = silent
    warn: Progress = silent

    @property
    def out(self) -> Path:
        return self.deployment.out

    def exports(self) -> list[ExportedModel]:
        """The exports of this deployment's towers.

        Raises:
            ConfigError: one is missing or damaged.
        """
        towers = self.deployment.encoder.towers
        return exported_models([self.out / tower.model_name for tower in towers])

    def manifests(self) -> dict[str, str]:
        """Digests of the exports' manifests, which hold those of all their files; damaged files show, too."""
        found = {}
        for model in self.exports():
            path = model.directory / MANIFEST
            found[f"{model.name}/{MANIFEST}"] = self.digests.file(path) or "gone"
            for name, sha256 in model.files.items():
                if self.digests.file(model.directory / name) != sha256:
                    found[f"{model.name}/{name}"] = "damaged"
        return found

    def served_files(self) -> Iterator[Path]:
        """All files of the repository that a server would read.

        Raises:
            ConfigError: there is no repository, or none that can be read.
        """
        repository = repositories.read(self.deployment.repository)
        for model in repository.models:
            folder = repository.path / model.name
            yield from (path for path in (folder / CONFIG,) if path.is_file())
            for part in (WARMUP_FOLDER, *map(str, model.served)):
                found = sorted(path for path in (folder / part).rglob("*") if path.is_file())
                yield from (path for path in found if COMPILED not in path.parts)

    def repository(self) -> dict[str, str]:
        """Digests of those files, by their path in the repository."""
        place = self.deployment.repository
        return {
            str(path.relative_to(place)): self.digests.file(path) or "gone"
            for path in self.served_files()
        }

    def words(self, *keys: str) -> dict[str, str]:
        """What the file says under these keys or in these tables, as JSON; what is not set is left out."""
        said = self.deployment.said
        return {
            key: json.dumps(value, ensure_ascii=False)
            for key, value in said.items()
            if value is not None and (key in keys or key.partition(".")[0] in keys)
        }

    def place(self, key: str, path: Path | None) -> dict[str, str]:
        """The digest of a file or folder that a key names."""
        return {} if path is None else {f"{key}'s files": self.digests.tree(path) or "gone"}

    def report(self, name: str) -> Path:
        """Where a report of a step lies."""
        return self.out / REPORTS / name

    def drop_reports(self, *names: str) -> None:
        """Remove reports of an earlier run, so that none is taken for that of a run which got nowhere."""
        for name in names:
            self.report(name).unlink(missing_ok=True)

    def write_report(self, name: str, value: Any) -> Path:
        """Write a report: a text as it is, all else as JSON."""
        path = self.report(name)
        with storage(path, ConfigError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, str):
                path.write_text(value, "utf-8")
            else:
                write_json(path, value)
        return path
