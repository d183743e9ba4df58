"""Real photographs and real sentences, as open_clip itself prepares them: the inputs that everything is checked on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.errors import ExportError, extra
from clip_deploy.inputs.images import load, normalised, to_pixels

with extra("export"):
    from open_clip.transform import PreprocessCfg, image_transform_v2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.inputs.photographs import Photographs
    from clip_deploy.spec import Preprocess

# Beside the captions: what goes wrong in text towers goes wrong here first.
HARD_TEXTS = (
    "",
    "cat",
    "A PHOTO OF A CAT, IN CAPITALS!",
    "한국어로 쓴 고양이 사진 설명",
    "一只猫在沙发上睡觉",
    "👩🏿‍🚀 🚀 👍",
    "Tom &amp; Jerry &lt;3",
    "a very long description of a photograph " * 12,
)


def pixels(pictures: Photographs, preprocess: Preprocess) -> NDArray[Any]:
    """What the model reads, ``[n, 3, height, width]``, after it was found equal to open_clip's own transform.

    Raises:
        ExportError: clip-deploy's preprocessing differs from open_clip's on one of the pictures.
    """
    config = PreprocessCfg(
        size=preprocess.size,
        mean=preprocess.mean,
        std=preprocess.std,
        interpolation=preprocess.interpolation,
        resize_mode=preprocess.resize_mode,
        fill_color=preprocess.fill_color,
    )
    transform = image_transform_v2(config, is_train=False)
    rows = []
    for path in pictures.paths:
        (row,) = to_pixels([path], preprocess)
        read = normalised(row, preprocess) if preprocess.pixels == "uint8" else row
        if not np.array_equal(transform(load(path)).numpy(), read):
            raise ExportError(
                f"clip-deploy and open_clip prepare {path.name} differently",
                remedy="report your versions of Pillow, torchvision and open_clip (clip-deploy doctor)",
            )
        rows.append(row)
    return np.stack(rows)


def texts(pictures: Photographs) -> list[str]:
    """The captions, then the texts on which text towers fail first."""
    return [*(caption for caption in pictures.captions if caption), *HARD_TEXTS]


def token_ids(sentences: list[str], tokenizer: Any) -> NDArray[np.int32]:
    """int32 ``[n, context_length]`` by open_clip's own tokenizer."""
    return np.asarray(tokenizer(sentences).numpy(), dtype=np.int32)
