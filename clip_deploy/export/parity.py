"""A graph held against torch: right, finite, of unit length, at every batch size, row by row independent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.compare import examine, rank_shares
from clip_deploy.errors import ExportError, extra
from clip_deploy.export import half

with extra("export"):
    import onnxruntime

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from clip_deploy.compare import Encode
    from clip_deploy.spec import Tolerance, Tower


# Of the nearest neighbours on the reference set, ties apart.
LEAST_RANK_AGREEMENT = 0.99


def session(graph: Path, skipped: tuple[str, ...] = ()) -> Encode:
    """The graph in ONNX Runtime on the CPU, as a function from inputs to embeddings; ``skipped`` are optimisers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        loaded = onnxruntime.InferenceSession(
            str(graph),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(skipped) or None,
        )
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        raise ExportError(
            f"ONNX Runtime {onnxruntime.__version__} does not load the graph: {error}",
            remedy="report the model's name and your versions (clip-deploy doctor)",
        ) from error
    name = loaded.get_inputs()[0].name
    return lambda inputs: np.asarray(loaded.run(None, {name: inputs})[0])


def rehearsed(graph: Path) -> Encode:
    """An FP16 graph, rounding as a GPU rounds, as a function from inputs to embeddings.

    The file itself is opened, too, the way it is served on a CPU.
    """
    session(graph, skipped=("NchwcTransformer",))
    path = half.rehearsal(graph)
    try:
        return session(path)
    finally:
        half.forget_rehearsal(path)


def check(
    encode: Encode,
    inputs: NDArray[Any],
    expected: NDArray[np.float32],
    limits: Tolerance,
    max_batch: int,
) -> dict[str, Any]:
    """Compare an encoder with torch's answers; returns the figures for the manifest.

    Args:
        encode: inputs ``[batch, …]`` → embeddings ``[batch, embed_dim]``.
        inputs: the reference inputs ``[n, …]``, n ≥ 2, not all equal.
        expected: torch's answers ``[n, embed_dim]``, each computed alone.
        limits: what is still right.
        max_batch: the largest batch to try.

    Raises:
        ExportError: out of tolerance; the message names the figure and its limit.
    """
    result = examine(encode, inputs, expected, limits, max_batch)
    if result.faults:
        raise ExportError(
            f"the graph does not agree with torch: {'; '.join(result.faults)}",
            remedy="nothing was written; report the model's name and your versions (clip-deploy doctor)",
        )
    return result.figures


def check_ranks(
    got: NDArray[np.float32],
    expected: NDArray[np.float32],
    rival: NDArray[np.float32] | None,
    tower: Tower,
) -> dict[str, float | None]:
    """How well searches agree, among the tower's own embeddings and in torch's of the other tower.

    None stands for a search that could not be made, because the other tower's tokenizer is out of reach.

    Raises:
        ExportError: a search finds what the reference would not.
    """
    found = rank_shares(got, expected, rival, tower)
    if wrong := [
        f"{name} {share:.1%}"
        for name, share in found.items()
        if share is not None and share < LEAST_RANK_AGREEMENT
    ]:
        raise ExportError(
            f"searches with the FP16 graph find other things than with torch: {', '.join(wrong)} are right",
            remedy="export it with --precision fp32",
        )
    return found
