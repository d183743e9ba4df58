"""The GPU that TensorRT will build on, asked of NVIDIA's driver library itself; nothing heavy is imported."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

# CUdevice_attribute.
_MAJOR, _MINOR = 75, 76


def device() -> dict[str, str] | None:
    """Name, compute capability and driver of CUDA's device 0; None without a driver or a GPU.

    CUDA numbers devices as it likes and hides some; nvidia-smi's first row may be another one.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, handle = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
        return None
    if cuda.cuDeviceGet(ctypes.byref(handle), 0) != 0:
        return None
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), handle)
    version = _number(cuda.cuDriverGetVersion)
    facts = {
        "gpu": name.value.decode("utf-8", "replace"),
        "compute_capability": f"{_attribute(cuda, _MAJOR, handle)}.{_attribute(cuda, _MINOR, handle)}",
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
    }
    return facts | ({"driver": driver} if (driver := _driver()) else {})


def _attribute(cuda: Any, which: int, handle: ctypes.c_int) -> int:
    return _number(lambda out: cuda.cuDeviceGetAttribute(out, which, handle))


def _number(ask: Any) -> int:
    value = ctypes.c_int()
    ask(ctypes.byref(value))
    return value.value


def _driver() -> str:
    """The driver's own version, which is that of all GPUs; empty where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = done.stdout.decode("utf-8", "replace").split()
    return words[0] if done.returncode == 0 and words and words[0][0].isdigit() else ""
