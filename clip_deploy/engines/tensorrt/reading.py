"""What a built plan says of itself, held against what was asked: tensors, profile, precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import EngineError
from clip_deploy.spec import Precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.spec import BatchProfile

# How an engine inspector writes FP16, in TensorRT's own and in its older words.
_HALF_WORDS = ("Half", "FP16")
_FLOAT_WORDS = ("Float", "FP32", *_HALF_WORDS)
# A plan whose weights are FP16 has about half of the FP32 weights' bytes; one of FP32 has all of them.
_HALF_SIZE = 0.75


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What was read back from a plan.

    Args:
        tensors: name → (``input`` or ``output``, Triton's dtype, shape with -1 for the batch).
        profile: name of each input → its smallest, best and largest shape.
        half_share: the share of layers with floats that read or write FP16; None where no layer tells its types.
    """

    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]]
    profile: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    half_share: float | None


def half_share(layers: str) -> float | None:
    """The share of layers that read or write FP16, from an engine inspector's JSON.

    Layers without floats (shapes, token ids) do not count. None when no layer says what it computes in.
    """
    data: Any = json.loads(layers)
    rows = data.get("Layers", []) if isinstance(data, dict) else data
    texts = [json.dumps(row) for row in rows if isinstance(row, dict)]
    floats = [text for text in texts if any(word in text for word in _FLOAT_WORDS)]
    if not floats:
        return None
    return sum(any(word in text for word in _HALF_WORDS) for text in floats) / len(floats)


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
    if dict(facts.tensors) != wanted:
        faults.append(f"its tensors are {dict(facts.tensors)}, and not {wanted}")
    shape = contract.input.shape
    shapes = tuple((size, *shape) for size in (profile.least, profile.best, profile.most))
    if (found := facts.profile.get(contract.input.name)) != shapes:
        faults.append(f"its profile is {found}, and not {shapes}")
    if contract.precision is Precision.FP16 and _is_single(facts, exported, size_bytes):
        share = "no" if facts.half_share is None else f"{facts.half_share:.0%}"
        faults.append(f"FP16 was asked for, and {share} layers compute in it")
    if faults:
        raise EngineError(
            f"the plan of {exported.name} is not what was asked for: {'; '.join(faults)}",
            remedy="nothing was kept; report the TensorRT version and the model's name",
        )


def _is_single(facts: PlanFacts, exported: ExportedModel, size_bytes: int) -> bool:
    """Whether an FP16 graph became an FP32 plan.

    Whole networks may be fused into one layer that names its FP32 ends alone; then the size of the weights decides. An
    FP16 graph's file has half of the FP32 bytes.
    """
    if facts.half_share:
        return False
    return size_bytes > _HALF_SIZE * 2 * exported.graph.size_bytes
