"""What a Triton backend is to us: one row of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError
from clip_deploy.progress import Progress, silent
from clip_deploy.spec import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from clip_deploy.artifacts import EngineBuild, ExportedModel


@dataclass(frozen=True, slots=True)
class Made:
    """What an engine made of an export: files by their names in the version folder, and parameters of config.pbtxt."""

    files: Mapping[str, Path]
    parameters: Mapping[str, str] = field(default_factory=dict)
    max_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run an exported graph inside Triton.

    Args:
        name: what ``--backend`` and config.pbtxt say.
        summary: one line for help texts and ``doctor``.
        kinds: instance kinds that make sense, Triton's names by ours; ``auto`` is the default.
        engines: what runs the graph inside it, by name, the default first: an export and what was asked → its files.
    """

    name: str
    summary: str
    kinds: dict[str, str]
    engines: Mapping[str, Callable[[ExportedModel, EngineSpec, Progress], Made]]

    def build(
        self,
        exported: ExportedModel,
        spec: EngineSpec | None = None,
        progress: Progress = silent,
    ) -> EngineBuild:
        """An export → the files that the backend opens.

        Raises:
            ConfigError: the backend has no such engine, or the engine no such precision.
            EngineError: what the engine makes of the graph is not right.
        """
        from clip_deploy.artifacts import EngineBuild

        spec = spec or EngineSpec()
        name = spec.name or next(iter(self.engines))
        if name not in self.engines:
            raise ConfigError(
                f"backend {self.name} has no engine {name!r}",
                remedy=f"use --engine {' or '.join(self.engines)}, or another --backend",
            )
        made = self.engines[name](exported, spec, progress)
        return EngineBuild(
            exported, self.name, made.files, self.kinds, made.max_batch, made.parameters
        )


def require_auto(exported: ExportedModel, spec: EngineSpec) -> None:
    """Raise ConfigError where another precision was asked of an engine that takes the graph's own."""
    if spec.precision not in ("auto", exported.contract.precision.value):
        raise ConfigError(
            f"precision {spec.precision} for {exported.name}, whose graph is {exported.contract.precision.value}",
            remedy="export it in that precision, or use --backend python --engine openvino",
        )
