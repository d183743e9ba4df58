"""The machine that a benchmark ran on: figures without it mean nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clip_deploy import __version__

# Instructions that decide how fast a CPU multiplies matrices.
_TELLING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_PACKAGES = ("onnxruntime", "openvino", "numpy", "grpcio")


def describe() -> dict[str, str]:
    """Facts about this machine and what runs on it, in the order in which a person wants to read them."""
    cpu = _cpu()
    flags = set(cpu.get("flags", "").split())
    packages = [f"{name} {found}" for name in _PACKAGES if (found := _version(name))]
    return {
        "CPU": cpu.get("model name", platform.processor() or platform.machine()),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "instructions": ", ".join(name for name in _TELLING if name in flags) or "not known",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "software": ", ".join([f"clip-deploy {__version__}", *packages]),
    }


def _cpu() -> dict[str, str]:
    """What the kernel says of the first core; nothing where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
