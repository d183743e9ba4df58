"""Where the files that ship with the package lie: in a wheel, an editable install or a bare checkout."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from clip_deploy.errors import MissingDependency

_PACKAGE = Path(__file__).resolve().parent


@functools.cache
def templates_dir() -> Path:
    """The ``templates/`` folder: inside the package in a wheel, beside it in a checkout."""
    for candidate in (_PACKAGE / "templates", _PACKAGE.parent / "templates"):
        if (candidate / "config.pbtxt.j2").is_file():
            return candidate
    raise MissingDependency(
        "the templates are not part of this installation",
        remedy="pip install --force-reinstall clip-deploy",
    )


def photographs_dir() -> Path:
    """Ten captioned photographs in the public domain, tall, wide, square and grey: what a model is checked on."""
    return _PACKAGE / "photographs"


def cache_dir() -> Path:
    """Where downloads and logs go: ``$CLIP_DEPLOY_CACHE``, else ``clip-deploy`` in the user's cache folder."""
    if chosen := os.environ.get("CLIP_DEPLOY_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "clip-deploy"
