"""TensorRT: a plan that ``build-trt`` left beside the export. Nothing here imports TensorRT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.artifacts import ENGINE, BuiltPlan
from clip_deploy.contract import PREFIX
from clip_deploy.engines.backends import Backend, Made, require_auto
from clip_deploy.errors import ConfigError
from clip_deploy.files import digest_or_none

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.progress import Progress
    from clip_deploy.spec import EngineSpec

PLAN = "model.plan"


def plan_folder(exported: ExportedModel) -> Path:
    """Where an export's plan lies."""
    return exported.directory / "tensorrt"


def _plan(exported: ExportedModel, spec: EngineSpec, progress: Progress) -> Made:
    """The plan that stands there, if it was built from this graph and is whole.

    Raises:
        ConfigError: there is none, it is damaged, or it was built from another graph.
    """
    require_auto(exported, spec)
    folder = plan_folder(exported)
    remedy = f"run clip-deploy build-trt {exported.directory}"
    if not (folder / ENGINE).is_file():
        raise ConfigError(f"{exported.name} has no TensorRT plan", remedy=remedy)
    built = BuiltPlan.read(folder)
    if built.provenance.get("graph_sha256") != exported.graph.sha256:
        raise ConfigError(f"{built.path} was built from another graph", remedy=remedy)
    if digest_or_none(built.path) != built.sha256:
        raise ConfigError(f"{built.path} is not the plan that was built", remedy=remedy)
    return Made(
        {PLAN: built.path, ENGINE: folder / ENGINE},
        {PREFIX + "plan_sha256": built.sha256},
        max_batch=built.profile.most,
    )


BACKEND = Backend(
    name="tensorrt",
    summary="a TensorRT plan, built by build-trt for one GPU and one Triton release; GPU only",
    kinds={"auto": "KIND_GPU", "gpu": "KIND_GPU"},
    engines={"tensorrt": _plan},
)
