"""The manifest that ``build-trt`` leaves beside a plan, as far as it can be read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from clip_deploy.artifacts import ENGINE, BuiltPlan
from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.lint.model import Model


@functools.lru_cache(maxsize=1)  # every rule asks about the model at hand
def manifest(model: Model) -> BuiltPlan | ConfigError | None:
    """The manifest beside the newest served plan, why it cannot be read, or None where there is none."""
    folder = engine_folder(model)
    if folder is None:
        return None
    try:
        return BuiltPlan.read(folder)
    except ConfigError as error:
        return error


def engine_folder(model: Model) -> Path | None:
    """The version folder with that manifest."""
    folder = next(iter(reversed(model.served.values())), None)
    if model.backend != "tensorrt" or folder is None or not (folder / ENGINE).is_file():
        return None
    return folder


def is_version_compatible(model: Model) -> bool:
    """Whether later TensorRT versions may load the plan."""
    built = manifest(model)
    return isinstance(built, BuiltPlan) and bool(built.provenance.get("version_compatible"))
