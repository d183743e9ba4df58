"""Triton's container releases and what each carries; what is not known for certain is None, and never guessed."""

from __future__ import annotations

import difflib
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from clip_deploy.errors import ConfigError

# The release of the embedded server. A graph that it reads, every later one reads too.
DEFAULT_RELEASE = "24.10"

IMAGE = "nvcr.io/nvidia/tritonserver:{release}-py3"

# ONNX Runtime's minor version → (highest IR version, highest opset of the default domain) that it loads. Measured on
# PyPI's wheels of each version with graphs of one node. A version between two rows reads what the lower one reads.
_ONNX_LIMITS = {
    (1, 16): (9, 19),
    (1, 17): (9, 20),
    (1, 18): (10, 21),
    (1, 21): (10, 22),
    (1, 23): (11, 23),
    (1, 24): (13, 25),
    (1, 27): (13, 26),
    (1, 32): (14, 28),
}


@dataclass(frozen=True, slots=True)
class TritonRelease:
    """One release of ``nvcr.io/nvidia/tritonserver:<name>-py3``."""

    name: str
    triton: str | None
    tensorrt: str | None
    cuda: str | None
    driver: str | None
    onnxruntime: str | None

    def onnx_limits(self) -> tuple[int, int] | None:
        """(highest IR version, highest opset) that its ONNX Runtime loads; None where that is not known."""
        if self.onnxruntime is None:
            return None
        major, minor = (int(part) for part in self.onnxruntime.split(".")[:2])
        known = [version for version in _ONNX_LIMITS if version <= (major, minor)]
        return _ONNX_LIMITS[max(known)] if known else None

    def tensorrt_bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(lowest, highest) version of TensorRT, of three numbers, that it can have; equal where it is known.

        An unknown one lies between those of its neighbours, since versions only grow from release to release.
        """
        rows = [each for each in releases().values() if each.tensorrt]
        before = [each for each in rows if each.name <= self.name]
        after = [each for each in rows if each.name >= self.name]
        return (_version(before[-1]), _version(after[0])) if before and after else None


def _version(row: TritonRelease) -> tuple[int, ...]:
    assert row.tensorrt is not None  # chosen by the caller
    return tuple(int(part) for part in row.tensorrt.split(".")[:3])


@functools.cache
def releases() -> dict[str, TritonRelease]:
    """All known releases, oldest first."""
    path = Path(__file__).with_name("triton_releases.json")
    return {
        name: TritonRelease(name, **row)
        for name, row in json.loads(path.read_text("utf-8")).items()
    }


def release(name: str) -> TritonRelease:
    """The release called ``name``, as 24.10.

    Raises:
        ConfigError: there is none, with the nearest ones.
    """
    known = releases()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or list(known)[-3:]
        raise ConfigError(
            f"Triton release {name!r} is not known", remedy=f"write it as YY.MM: {', '.join(near)}"
        )
    return known[name]


def with_tensorrt(version: tuple[int, ...]) -> list[TritonRelease]:
    """The releases that are known to carry a TensorRT of these three numbers, oldest first."""
    return [each for each in releases().values() if each.tensorrt and _version(each) == version[:3]]


def first_that_reads(ir_version: int, opset: int) -> TritonRelease | None:
    """The oldest release whose ONNX Runtime reads such a graph; None where no known one does."""
    for each in releases().values():
        limits = each.onnx_limits()
        if limits and ir_version <= limits[0] and opset <= limits[1]:
            return each
    return None
