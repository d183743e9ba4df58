"""Pictures and texts without torch, held against open_clip's own code."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clip_deploy.errors import ExportError
from clip_deploy.inputs.images import to_pixels
from clip_deploy.inputs.texts import TextTokenizer
from clip_deploy.resources import photographs_dir
from clip_deploy.spec import Preprocess
from tests.factories import OPENAI_MEAN, OPENAI_STD

pytestmark = pytest.mark.export

CASES = Path(__file__).parent / "cases" / "embedding"
TEXTS = json.loads((CASES / "texts.json").read_text("utf-8"))
PREPROCESSES = [
    Preprocess(size, OPENAI_MEAN, OPENAI_STD, mode, interpolation, fill)
    for size in ((224, 224), (256, 256), (384, 256), (64, 160))
    for mode in ("shortest", "longest", "squash")
    for interpolation in ("bicubic", "bilinear")
    for fill in (0, 114)
    if not (fill and mode != "longest")
]


def _open_clip(preprocess: Preprocess):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    config = PreprocessCfg(
        size=preprocess.size,
        mean=preprocess.mean,
        std=preprocess.std,
        interpolation=preprocess.interpolation,
        resize_mode=preprocess.resize_mode,
        fill_color=preprocess.fill_color,
    )
    return image_transform_v2(config, is_train=False)


def _photographs() -> list[Image.Image]:
    """Tall, wide, square, odd, tiny, grey and CMYK."""
    pictures = [Image.open(path) for path in sorted(photographs_dir().glob("*.jpg"))]
    cat = Image.open(photographs_dir() / "cat.jpg")
    pictures += [
        cat.crop((0, 0, *size))
        for size in ((301, 17), (17, 299), (1, 1), (225, 224), (223, 224), (3, 200))
    ]
    pictures += [
        cat.convert("L"),
        cat.convert("CMYK"),
        cat.resize((224, 224)),
        cat.resize((447, 333)),
    ]
    return pictures


@pytest.mark.parametrize(
    "preprocess",
    PREPROCESSES,
    ids=lambda p: f"{p.resize_mode}-{p.size}-{p.interpolation}-{p.fill_color}",
)
def test_ordinary_photographs_are_bit_for_bit_open_clips(preprocess: Preprocess):
    transform = _open_clip(preprocess)
    for picture in _photographs():
        assert np.array_equal(to_pixels([picture], preprocess)[0], transform(picture).numpy()), (
            picture.size,
            picture.mode,
        )


@pytest.mark.parametrize(
    "file",
    [
        "photo_wide_rocket.jpg",
        "photo_odd_451x300.jpg",
        "photo_tall_dandelion.jpg",
        "photo_progressive.jpg",
        "cmyk_adobe_inverted.jpg",
        "zoneplate_1000x700.jpg",
        "noise_227x224.png",
    ],
)
def test_files_are_bit_for_bit_open_clips(file: str):
    preprocess = PREPROCESSES[0]
    path = CASES / "images" / file
    assert np.array_equal(
        to_pixels([path], preprocess)[0], _open_clip(preprocess)(Image.open(path)).numpy()
    )


def _tokenizers(name: str):
    """open_clip's tokenizer and ours, by a name of ``texts.json``."""
    from open_clip.tokenizer import SimpleTokenizer

    from clip_deploy.export.tokenizer import as_data

    lengths = {"PE-Core-B-16": 32, "PE-Core-bigG-14-448": 72, "coca_ViT-B-32": 76}
    architecture, _, clean = name.partition("|clean=")
    theirs = SimpleTokenizer(context_length=lengths.get(architecture, 77), clean=clean or "lower")
    return theirs, TextTokenizer(*as_data(theirs))


@pytest.mark.parametrize("name", sorted({row["tokenizer"] for row in TEXTS["rows"]}))
def test_hard_texts_have_the_measured_ids(name: str):
    _, ours = _tokenizers(name)
    rows = [row for row in TEXTS["rows"] if row["tokenizer"] == name]
    assert len(rows) == 51
    for row in rows:
        assert ours([row["text"]])[0].tolist() == row["ids"], row["id"]


@pytest.mark.parametrize("clean", ["lower", "whitespace"])
def test_random_mixtures_of_hard_pieces_have_open_clips_ids(clean: str):
    theirs, ours = _tokenizers(f"ViT-B-32|clean={clean}")
    pieces = [
        *(
            "<start_of_text>",
            "<end_of_text>",
            "<START_of_text>",
            "<start_",
            "of_text>",
            "'s",
            "'ſ",
            "'LL",
            "'re",
            "!",
            "<",
            ">",
            "_",
        ),
        *(
            " ",
            "\u0345",
            "\u212a",
            "k",
            "é",
            "\u0301",
            "一",
            "👍",
            "1",
            "½",
            "²",
            "Ⅷ",
            "cat",
            "Dog",
            "&amp;",
            "&lt;",
            "\n",
            "\u200d",
        ),
        *("ǅ", "ß", "İ", "ﬁ", "ʼ", "’", "\x00", "\ufeff", "\U0001e6c0"),
    ]
    chosen = random.Random(3)
    texts = [
        "".join(
            chosen.choice(pieces) if chosen.random() < 0.8 else _character(chosen)
            for _ in range(chosen.randint(0, 14))
        )
        for _ in range(5000)
    ]
    assert np.array_equal(ours(texts), theirs(texts).numpy())


def _character(chosen: random.Random) -> str:
    point = chosen.randrange(0x110000)
    return "" if 0xD800 <= point < 0xE000 else chr(point)


def test_every_code_point_has_open_clips_ids():
    theirs, ours = _tokenizers("ViT-B-32")
    points = [chr(p) for p in range(0x110000) if not 0xD800 <= p < 0xE000]
    step = 37
    texts = ["a".join(points[i : i + 12]) for i in range(0, len(points), 12 * step)]
    assert np.array_equal(ours(texts), theirs(texts).numpy())


def test_a_tokenizer_that_disagrees_is_refused():
    from clip_deploy.export.tokenizer import check

    theirs, ours = _tokenizers("ViT-B-32")
    with pytest.raises(ExportError, match="disagrees with open_clip on 'cat'"):
        check(ours, lambda texts: theirs(texts) + 1, ["cat"])


def test_a_tokenizer_without_a_form_as_data_is_refused():
    from clip_deploy.export.tokenizer import as_data

    with pytest.raises(ExportError, match="no form as plain data") as caught:
        as_data(object())
    assert "--tower image" in caught.value.remedy
