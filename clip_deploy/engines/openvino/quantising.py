"""INT8 by NNCF's post-training quantisation, calibrated on the user's own inputs and judged on those held back."""

from __future__ import annotations

import contextlib
import io
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from clip_deploy.engines.openvino.building import (
    counterpart,
    encoder,
    rank_faults,
    require_right,
)
from clip_deploy.errors import ConfigError, extra
from clip_deploy.spec import TOLERANCES, Precision, Tower

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.inputs.photographs import Photographs
    from clip_deploy.progress import Progress

# Of every so many inputs one is held back from calibration and judged on afterwards.
_HELD_BACK = 4
_LEAST = 32


def quantised(
    core: Any,
    network: Any,
    exported: ExportedModel,
    pictures: Photographs,
    hint: str,
    progress: Progress,
) -> tuple[Any, dict[str, Any]]:
    """An INT8 network, and the figures on inputs that it was not calibrated on, against the FP32 network.

    Raises:
        MissingDependency: NNCF is not installed.
        ConfigError: too few pictures, or for a text tower too few captions.
        EngineError: on the inputs held back, its vectors or its searches are not the FP32 network's.
    """
    with extra("int8"), _quiet():
        import nncf
    import numpy as np

    from clip_deploy.compare import agreement, rank_shares

    inputs = _inputs(exported, pictures)
    held = np.arange(len(inputs)) % _HELD_BACK == 0
    expected = encoder(core, network, "f32")(inputs[held])
    progress(f"{exported.name}: calibrating INT8 on {int((~held).sum())} inputs")
    rows = [inputs[i : i + 1] for i in np.flatnonzero(~held)]
    # Without VNNI a CPU adds products of 8 bits in 16, which overflow unseen: weights of 7 bits fit everywhere, and a
    # network that was judged here may be served there.
    everywhere = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
    with _quiet():
        small = nncf.quantize(
            network,
            nncf.Dataset(rows),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(rows),
            advanced_parameters=everywhere,
        )
    progress(f"{exported.name}: judging it on {int(held.sum())} inputs held back")
    got = encoder(core, small, hint)(inputs[held])
    tower = exported.contract.tower
    result = agreement(got, expected)
    ranks = rank_shares(got, expected, counterpart(exported), tower)
    faults = [
        *result.faults(TOLERANCES[Precision.INT8, tower]),
        *rank_faults(ranks, Precision.INT8),
    ]
    require_right(faults, exported, Precision.INT8)
    figures = {
        "calibrated_on": len(rows),
        "held_back": int(held.sum()),
        "min_cosine": result.min_cosine,
        "max_error": result.max_error,
        "ranks": ranks,
        "nncf": version("nncf"),
    }
    return small, figures


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """NNCF draws progress bars on stdout, and torch, which it imports where there is one, warns of missing GPUs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _inputs(exported: ExportedModel, pictures: Photographs) -> NDArray[Any]:
    """The user's pictures as pixels, or their captions as token ids."""
    contract = exported.contract
    if contract.tower is Tower.IMAGE:
        _require_enough(len(pictures.paths), "photographs")
        from clip_deploy.inputs.images import to_pixels

        assert contract.preprocess is not None  # an image encoder's contract has it
        return to_pixels(pictures.paths, contract.preprocess)
    from clip_deploy.inputs.texts import TextTokenizer

    captions = sorted({caption for caption in pictures.captions if caption})
    _require_enough(len(captions), "different captions (in captions.json)")
    data = exported.tokenizer_data()
    assert data is not None  # a text encoder's export has both
    assert contract.tokens is not None
    return TextTokenizer(data, contract.tokens)(captions)


def _require_enough(count: int, what: str) -> None:
    if count < _LEAST:
        raise ConfigError(
            f"{count} {what} to calibrate INT8 on and to judge it by",
            remedy=f"give at least {_LEAST}, better 300, of the kind that will be searched",
        )
