"""Pictures: a person's view of awkward files, refusals of hostile ones; parity with open_clip is in test_parity.py."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clip_deploy.errors import ConfigError, InputError
from clip_deploy.inputs import opening
from clip_deploy.inputs.images import (
    DECODES,
    FAST_MARGIN,
    FAST_TOLERANCE,
    ImageLimits,
    load,
    normalised,
    to_pixels,
)
from clip_deploy.inputs.photographs import photographs
from clip_deploy.inputs.texts import MAX_CHARACTERS
from clip_deploy.resources import photographs_dir
from clip_deploy.spec import Preprocess
from tests.factories import CLIP_PREPROCESS

CASES = Path(__file__).parent / "cases" / "embedding"
TRUTH = json.loads((CASES / "truth.json").read_text("utf-8"))
SQUASH = Preprocess((256, 256), (0.5,) * 3, (0.5,) * 3, "squash", "bicubic")


def _steps(pixels: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Normalised pixels back to 0..255."""
    mean, std = (np.float32(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
    return (pixels * std + mean) * 255


def _distance(got: np.ndarray, file: str) -> dict[str, float]:
    expected = np.asarray(Image.open(CASES / "pixels" / file)).astype(np.float32).transpose(2, 0, 1)
    error = np.abs(got - expected)
    quantiles = {"p99": float(np.quantile(error, 0.99)), "p999": float(np.quantile(error, 0.999))}
    return {"max": float(error.max()), "mean": float(error.mean()), **quantiles}


def _png(width: int, height: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), 128 if mode == "L" else "teal").save(out, "PNG")
    return out.getvalue()


def _png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("prefix", ["", "squash_"])
@pytest.mark.parametrize("case", TRUTH["files"], ids=lambda case: Path(case["file"]).name)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_awkward_pictures_look_as_a_person_expects(case: dict, prefix: str):
    variants, expect = case["variants"], case["expect"]
    if prefix and variants.get("squash_plain") is None:
        pytest.skip("a square picture: squashing it was not measured")
    preprocess = SQUASH if prefix else CLIP_PREPROCESS
    try:
        pixels = to_pixels([CASES / case["file"]], preprocess)[0]
    except InputError as error:
        assert expect["kind"] in ("refuse", "either"), f"refused: {error}"
        assert error.remedy
        return
    assert expect["kind"] != "refuse", "a vector, but a refusal is expected"
    assert pixels.dtype == np.float32
    assert pixels.shape == (3, *preprocess.size)
    stored = [
        variants[prefix + name]["pixels"]
        for name in expect["accept"]
        if variants.get(prefix + name, {}).get("pixels")
    ]
    tolerance = TRUTH["meta"]["tolerances"][expect["tolerance"]]
    distances = [_distance(_steps(pixels, preprocess), file) for file in stored]
    assert any(all(d[key] <= limit for key, limit in tolerance.items()) for d in distances), (
        expect["why"],
        distances,
    )


PAGE = (CASES.parents[2] / "docs" / "images.md").read_text("utf-8")


def _table() -> dict[str, str]:
    """Picture → what the page says of it: yes (as open_clip), no (otherwise), refused."""
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    return {
        name.strip("`"): cells[4].strip()
        for cells in rows
        if len(cells) == 7 and "`" in cells[5]
        for name in cells[5].split()
    }


def test_the_page_on_pictures_speaks_of_every_case():
    assert set(_table()) == {Path(case["file"]).name for case in TRUTH["files"]}


@pytest.mark.parametrize("prefix", ["", "squash_"])
@pytest.mark.parametrize("case", TRUTH["files"], ids=lambda case: Path(case["file"]).name)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_page_on_pictures_says_what_happens(case: dict, prefix: str):
    said = _table()[Path(case["file"]).name]
    preprocess = SQUASH if prefix else CLIP_PREPROCESS
    if said == "refused":
        with pytest.raises(InputError):
            to_pixels([CASES / case["file"]], preprocess)
        return
    plain = (case["variants"].get(f"{prefix}plain") or {}).get("pixels")
    if plain is None:
        pytest.skip("a square picture: squashing it was not measured")
    pixels = to_pixels([CASES / case["file"]], preprocess)[0]
    most = _distance(_steps(pixels, preprocess), plain)["max"]
    assert (most < 0.01) == (said == "yes"), most


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("64 MiB", ImageLimits().max_bytes / 2**20),
        ("89,478,485", ImageLimits().max_pixels),
        ("| 100 |", ImageLimits().max_aspect_ratio),
        ("10,000, and one per 256", opening._READS),
        ("per 256 bytes", opening._BYTES_PER_READ),
        ("| 200 |", opening._MOST_SCANS),
        ("8 MiB", opening._MOST_SLOW_BYTES / 2**20),
        ("4,096 characters", MAX_CHARACTERS),
        ("by more than 12", FAST_TOLERANCE),
    ],
)
def test_the_page_on_pictures_names_the_limits(said: str, value: float):
    assert said in " ".join(PAGE.split())
    assert f"{value:,.0f}" in said


@pytest.mark.parametrize(
    "source",
    [
        lambda p: p,
        str,
        lambda p: p.read_bytes(),
        lambda p: p.open("rb"),
        lambda p: Image.open(p),
        lambda p: np.asarray(Image.open(p)),
    ],
    ids=["path", "str", "bytes", "file", "pillow", "array"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_kind_of_source_gives_the_same_pixels(source):
    path = photographs_dir() / "cat.jpg"
    assert np.array_equal(
        to_pixels([source(path)], CLIP_PREPROCESS), to_pixels([path], CLIP_PREPROCESS)
    )


def test_no_pictures_give_an_empty_batch():
    assert to_pixels([], CLIP_PREPROCESS).shape == (0, 3, 224, 224)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (b"", "it is empty"),
        (b"%PDF-1.7 ...", "a PDF"),
        (b"\n<!doctype html><p>404", "an HTML page"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0heic", "pillow-heif"),
        (_png_header(64, 64), "damaged"),
        (Path("/nowhere/cat.jpg"), "cannot be read: No such file"),
        (Path("/"), "cannot be read: Is a directory"),
        (17, "cannot be a int"),
        (np.zeros((4, 4, 3), np.float32), "an array of float32"),
        (np.zeros((4, 4, 4), np.uint8), "an array of uint8"),
        (np.zeros((0, 4), np.uint8), "an array of uint8"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(source, complaint: str):
    with pytest.raises(InputError, match=complaint) as caught:
        to_pixels([source], CLIP_PREPROCESS)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (_png_header(30_000, 30_000), "too many pixels|too large"),
        (_png_header(9_500, 9_500), "too large"),
        (_png(1, 101), "a strip of 1 × 101"),
        (_png(2020, 20), "a strip of 2020 × 20"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_costs_too_much_is_refused_before_it_is_decoded(data: bytes, complaint: str):
    with pytest.raises(InputError, match=complaint):
        load(data)


def test_a_file_beyond_the_limit_is_refused_without_reading_it_all():
    class Endless(io.RawIOBase):
        asked = 0

        def read(self, size: int = -1) -> bytes:
            assert size > 0, "the whole stream was asked for"
            self.asked = size
            return b"x" * size

    endless = Endless()
    with pytest.raises(InputError, match="larger than 1 MB"):
        load(endless, ImageLimits(max_bytes=2**20))
    assert endless.asked == 2**20 + 1


def test_a_strip_within_the_limit_is_cropped_not_refused():
    assert to_pixels([_png(100, 1)], CLIP_PREPROCESS).shape == (1, 3, 224, 224)


@pytest.mark.parametrize(
    ("array", "mode", "white"),
    [
        (np.array([[0, 65535]], np.uint16), None, 65535),
        (np.array([[0, 255]], np.int32), "I", 255),
        (np.array([[0, 65535]], np.int32), "I", 65535),
        (np.array([[0.0, 1.0]], np.float32), "F", 1.0),
        (np.array([[0.0, 255.0]], np.float32), "F", 255.0),
    ],
)
def test_deep_grey_is_scaled_to_eight_bits(array: np.ndarray, mode: str | None, white: float):
    picture = Image.fromarray(array)
    assert mode is None or picture.mode == mode
    assert np.asarray(load(picture)).tolist() == [[0, 255]]


@pytest.mark.parametrize("values", [[[-1.0, 0.5]], [[0.0, 1e6]], [[0.0, float("nan")]]])
def test_grey_without_an_agreed_white_is_refused(values: list):
    with pytest.raises(InputError, match="no agreed white"):
        load(Image.fromarray(np.array(values, np.float32)))


def test_transparency_is_put_on_white_before_resizing():
    drawing = Image.new("RGBA", (300, 300), (0, 0, 0, 0))
    drawing.paste((255, 0, 0, 255), (100, 100, 200, 200))
    colours = np.asarray(load(drawing))
    assert colours[0, 0].tolist() == [255, 255, 255]
    assert colours[150, 150].tolist() == [255, 0, 0]


def test_a_thousand_damaged_files_give_a_picture_or_a_refusal_and_nothing_else():
    random.seed(7)
    originals = [
        p.read_bytes() for p in sorted((CASES / "images").iterdir()) if p.stat().st_size < 60_000
    ]
    for _ in range(1000):
        data = bytearray(random.choice(originals))
        for _ in range(random.randint(1, 8)):
            if data:
                data[random.randrange(len(data))] = random.randrange(256)
        data = data[: random.randint(0, len(data))] if random.random() < 0.3 else data
        try:
            pixels = to_pixels([bytes(data)], CLIP_PREPROCESS)
        except InputError:
            continue
        assert np.isfinite(pixels).all()


RAW = replace(CLIP_PREPROCESS, pixels="uint8")


def test_raw_pixels_are_the_normalised_ones_before_normalising():
    pictures = photographs(None).paths[:1]
    raw = to_pixels(pictures, RAW)
    assert raw.dtype == np.uint8
    assert raw.nbytes * 4 == to_pixels(pictures, CLIP_PREPROCESS).nbytes
    assert np.array_equal(normalised(raw[0], RAW), to_pixels(pictures, CLIP_PREPROCESS)[0])
    assert to_pixels([], RAW).dtype == np.uint8


def _mosaic(width: int, height: int, **options) -> bytes:
    """The package's photographs side by side, at their own size: a large JPEG that is sharp to the pixel."""
    page = Image.new("RGB", (width, height))
    tiles = [Image.open(path).convert("RGB") for path in photographs(None).paths]
    x = y = row = number = 0
    while y < height:
        tile = tiles[number % len(tiles)]
        page.paste(tile, (x, y))
        x, row, number = x + tile.width, max(row, tile.height), number + 1
        if x >= width:
            x, y, row = 0, y + row, 0
    file = io.BytesIO()
    page.save(file, "JPEG", quality=92, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "size", [(4000, 3000), (3000, 4000), (1200, 1000), (900, 900), (2000, 1000)]
)
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_fast_decoding_stays_within_its_tolerance(size: tuple[int, int], mode: str):
    data = _mosaic(*size)
    preprocess = replace(RAW, resize_mode=mode)
    exact, fast = (to_pixels([data], preprocess, decode=how)[0].astype(int) for how in DECODES)
    assert np.abs(fast - exact).max() <= FAST_TOLERANCE
    assert np.abs(fast - exact).mean() < 0.8
    if min(size) >= 2 * FAST_MARGIN * 224:
        assert not np.array_equal(fast, exact), "nothing was saved"


@pytest.mark.parametrize("size", [(640, 480), (895, 895), (4000, 800)])
def test_fast_decoding_leaves_pictures_alone_that_are_not_large_enough(size: tuple[int, int]):
    data = _mosaic(*size)
    exact, fast = (to_pixels([data], CLIP_PREPROCESS, decode=how) for how in DECODES)
    assert np.array_equal(exact, fast)


def test_fast_decoding_turns_pictures_upright_and_leaves_other_formats_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = _mosaic(2000, 1000, exif=exif)
    assert load(turned, least=448).size == (500, 1000)
    assert load(_png(2000, 1000), least=448).size == (2000, 1000)


def test_a_way_to_decode_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="decode 'faster' is unknown"):
        to_pixels([], CLIP_PREPROCESS, decode="faster")
