"""What a built plan says of itself, held against what was asked: tensors, profile, precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import EngineError
from clip_deploy.spec import LEAST_HALF_SHARE, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.spec import BatchProfile

# How an engine inspector writes FP16, in TensorRT's own and in its older words.
_HALF_WORDS = ("Half", "FP16")
_FLOAT_WORDS = ("Float", "FP32", *_HALF_WORDS)
# A plan whose weights are FP16 has about half of the FP32 weights' bytes; one of FP32 has all of them.
_HALF_SIZE = 0.75
# From this many layers with floats on, their types tell what a plan computes in.
_TELLING = 10


@dataclass(frozen=True, slots=True)
class Layers:
    """How many layers of a plan read or write floats, and how many of these FP16.

    Layers without floats (shapes, token ids) do not count; none at all where the plan does not tell its types.
    """

    floats: int = 0
    halves: int = 0

    @classmethod
    def read(cls, text: str) -> Layers:
        """From an engine inspector's JSON."""
        data: Any = json.loads(text)
        rows = data.get("Layers", []) if isinstance(data, dict) else data
        texts = [json.dumps(row) for row in rows if isinstance(row, dict)]
        floats = [text for text in texts if any(word in text for word in _FLOAT_WORDS)]
        halves = [text for text in floats if any(word in text for word in _HALF_WORDS)]
        return cls(len(floats), len(halves))

    @property
    def half_share(self) -> float | None:
        return self.halves / self.floats if self.floats else None


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What was read back from a plan; None where it could not be asked.

    Args:
        tensors: name → (``input`` or ``output``, Triton's dtype, shape with -1 for the batch).
        profile: name of each input → its smallest, best and largest shape.
        layers: what they compute in.
    """

    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]] | None
    profile: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] | None
    layers: Layers


def require(
    facts: PlanFacts, exported: ExportedModel, profile: BatchProfile, size_bytes: int
) -> None:
    """Raise EngineError unless the plan is what was asked for."""
    contract = exported.contract
    wanted = {
        contract.input.name: ("input", contract.input.dtype, (-1, *contract.input.shape)),
        contract.output.name: ("output", contract.output.dtype, (-1, *contract.output.shape)),
    }
    faults = []
    if facts.tensors is not None and dict(facts.tensors) != wanted:
        faults.append(f"its tensors are {dict(facts.tensors)}, and not {wanted}")
    shape = contract.input.shape
    shapes = tuple((size, *shape) for size in (profile.least, profile.best, profile.most))
    found = facts.profile.get(contract.input.name) if facts.profile is not None else shapes
    if found != shapes:
        faults.append(f"its profile is {found}, and not {shapes}")
    if contract.precision is Precision.FP16 and _is_single(facts, exported, size_bytes):
        layers = facts.layers
        told = f"{layers.halves} of {layers.floats} layers compute in it, {size_bytes:,} bytes"
        faults.append(f"FP16 was asked for, and {told}")
    if faults:
        raise EngineError(
            f"the plan of {exported.name} is not what was asked for: {'; '.join(faults)}",
            remedy="nothing was kept; report the TensorRT version and the model's name",
        )


def _is_single(facts: PlanFacts, exported: ExportedModel, size_bytes: int) -> bool:
    """Whether an FP16 graph became an FP32 plan.

    A network may be fused into a few layers that name their FP32 ends alone; then the size of the weights decides. An
    FP16 graph's file has half of the FP32 bytes.
    """
    share = facts.layers.half_share
    if share is not None and facts.layers.floats >= _TELLING:
        return share < LEAST_HALF_SHARE
    return size_bytes > _HALF_SIZE * 2 * exported.graph.size_bytes
