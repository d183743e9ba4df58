"""What decides a step beside its files and choices: versions of packages, this code, and this machine."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clip_deploy import __version__
from clip_deploy.engines.tensorrt.device import device
from clip_deploy.files import digest, digest_json
from clip_deploy.resources import templates_dir

# What decides how a graph comes out, and what runs it.
EXPORTING = (
    *("torch", "torchvision", "open_clip_torch", "timm", "onnx", "onnxscript", "onnxruntime"),
    *("numpy", "pillow", "ftfy", "regex", "tokenizers"),
)
SERVING = ("onnxruntime", "openvino", "numpy", "tritonclient")


def versions(*packages: str) -> dict[str, str]:
    """Versions of packages; of one that is absent, ``-``."""
    return {name: _version(name) for name in packages} | code()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


@functools.cache
def code() -> dict[str, str]:
    """This clip-deploy: its version, and the digest of its sources and templates."""
    package = Path(__file__).parent.parent
    files = [*package.rglob("*.py"), *templates_dir().rglob("*.j2"), *templates_dir().rglob("*.py")]
    found = sorted({path.resolve() for path in files})
    return {"clip-deploy": __version__, "clip-deploy's code": digest(found)}


@functools.cache
def cpu() -> dict[str, str]:
    """This CPU, by its name and what it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {"CPU": "unknown"}
    rows: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            rows.setdefault(name.strip(), value.strip())
    abilities = digest_json(sorted(rows.get("flags", rows.get("Features", "")).split()))
    return {"CPU": rows.get("model name", "unnamed"), "CPU's abilities": abilities}


@functools.cache
def gpu() -> dict[str, str]:
    """This machine's first GPU, or that it has none."""
    return {name.replace("_", " "): text for name, text in (device() or {"gpu": "none"}).items()}


def has(*modules: str) -> bool:
    """Whether modules can be imported; none is."""
    return all(importlib.util.find_spec(name) is not None for name in modules)


def here() -> dict[str, str]:
    """Where the command runs, for what writes paths as seen from there."""
    return {"working folder": str(Path.cwd())}
