"""What this machine has of everything clip-deploy can use, one row each, with the command that gets the rest."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import MissingDependency
from clip_deploy.resources import cache_dir
from clip_deploy.servers import install, libpython

if TYPE_CHECKING:
    from collections.abc import Callable

_ENOUGH_DISK_GB = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for. ``detail`` is its version or place, or what is wrong with it."""

    name: str
    found: bool
    detail: str
    purpose: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Row:
    """One thing to look for: ``look`` gives its version or place, None when it is absent, or says what is wrong."""

    name: str
    purpose: str
    remedy: str
    look: Callable[[], str | None]


def examine() -> list[Finding]:
    """Look for every row of the table; nothing heavy is imported."""
    return [_finding(row) for row in _ROWS]


def _finding(row: _Row) -> Finding:
    try:
        detail = row.look()
    except MissingDependency as error:
        return Finding(row.name, False, str(error), row.purpose, error.remedy)
    return Finding(row.name, detail is not None, detail or "missing", row.purpose, row.remedy)


def _packages(*names: str) -> Callable[[], str | None]:
    """Versions of packages, or None unless all are installed."""

    def look() -> str | None:
        try:
            return ", ".join(f"{name} {version(name)}" for name in names)
        except PackageNotFoundError:
            return None

    return look


def _output(*command: str) -> str | None:
    """The first line that a program prints, or None where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _python() -> str | None:
    return f"{platform.python_version()} at {sys.executable}"


def _libpython() -> str | None:
    if not libpython.available():
        return None
    return str(next(iter(libpython.folders()), "known to the system's loader"))


def _embedded() -> str | None:
    return f"Triton {install.TRITON_VERSION} in {install.installed().root}"


def _gpu(field: str) -> Callable[[], str | None]:
    return lambda: _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")


def _cuda() -> str | None:
    """The CUDA version that the driver supports; nvidia-smi prints it in its header only."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    words = done.stdout.partition("CUDA Version:")[2].split()
    return words[0] if words else None


def _disk() -> str | None:
    place = next(p for p in (cache_dir(), *cache_dir().parents) if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    if free < _ENOUGH_DISK_GB:
        raise MissingDependency(f"{free:.1f} GB free", remedy=f"make room on the disk of {place}")
    return f"{free:.0f} GB free at {place}"


def _docker() -> str | None:
    return _output("docker", "version", "--format", "{{.Server.Version}}")


_GPU_DRIVER = "install NVIDIA's driver; without a GPU everything but TensorRT works"
_ROWS = (
    _Row("Python", "everything", "use Python 3.10 to 3.13", _python),
    _Row(
        "export",
        "clip-deploy export",
        "pip install 'clip-deploy[export]'",
        _packages("torch", "open_clip_torch", "onnx", "onnxscript", "onnxruntime"),
    ),
    _Row(
        "client",
        "clip_deploy.client, smoke-test",
        "pip install clip-deploy",
        _packages("tritonclient", "pillow", "tokenizers", "ftfy"),
    ),
    _Row(
        "model runtime",
        "models in the embedded server",
        "pip install 'clip-deploy[server]'",
        _packages("onnxruntime", "numpy"),
    ),
    _Row(
        "OpenVINO",
        "render-config --engine openvino, and its models",
        "pip install 'clip-deploy[openvino]'",
        _packages("openvino"),
    ),
    _Row("libpython", "the embedded server", "run clip-deploy server install", _libpython),
    _Row("embedded server", "serve, smoke-test", "run clip-deploy server install", _embedded),
    _Row("GPU", "TensorRT, GPU instances", _GPU_DRIVER, _gpu("name")),
    _Row("driver", "GPU instances", _GPU_DRIVER, _gpu("driver_version")),
    _Row("CUDA", "GPU instances", _GPU_DRIVER, _cuda),
    _Row(
        "TensorRT",
        "FP16 engines",
        "pip install 'clip-deploy[gpu]'",
        _packages("tensorrt", "polygraphy"),
    ),
    _Row(
        "TensorRT check",
        "build-trt --check",
        "pip install 'clip-deploy[trt-check]'",
        _packages("tensorrt-rtx-cu12"),
    ),
    _Row(
        "Docker",
        "serve --launcher container",
        "install Docker Engine, or use --launcher embedded",
        _docker,
    ),
    _Row("disk", "exports and the server", "make room", _disk),
)
