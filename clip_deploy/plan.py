"""A TensorRT plan's header: which TensorRT wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# The first four bytes, and what they mean.
_MAGIC = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """``version``: major, minor, patch, build of the library that wrote it; ``product``: TensorRT or TensorRT-RTX."""

    product: str
    version: tuple[int, int, int, int]

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.version))}"


def read_header(path: Path) -> PlanHeader | None:
    """The header, or None for a file that is no plan. Bytes 24 to 27 hold the version, as NVIDIA's samples read it."""
    with path.open("rb") as file:
        head = file.read(28)
    product = _MAGIC.get(head[:4])
    if product is None or len(head) < 28:
        return None
    major, minor, patch, build = head[24:28]
    return PlanHeader(product, (major, minor, patch, build))
