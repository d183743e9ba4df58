"""Files and texts made to hurt: pixels or a refusal in words, in little time and memory; benchmarks/awkward.py has more."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import awkward
from clip_deploy.errors import InputError
from clip_deploy.inputs.images import ImageLimits, load, to_pixels
from clip_deploy.inputs.texts import TextTokenizer
from tests.factories import CLIP_PREPROCESS, word_tokenizer

IMAGES = Path(__file__).parent / "cases" / "embedding" / "images"


@pytest.fixture(scope="module")
def worker():
    worker = awkward.Worker(memory_mb=600, seconds=20)
    yield worker
    worker.close()


@pytest.mark.processes
def test_mutations_of_valid_files_end_in_pixels_or_a_refusal(worker: awkward.Worker):
    changed = awkward.mutations(sorted(IMAGES.iterdir()), seed=11, count=60)
    verdicts = [worker.judge(str(i), data) for i, data in enumerate(changed)]
    assert [v for v in verdicts if v.wrong] == []
    assert {v.outcome for v in verdicts} == {"pixels", "refused"}


@pytest.mark.processes
def test_hostile_files_are_refused_early_and_cost_next_to_nothing(worker: awkward.Worker):
    for name, data in awkward.hostile().items():
        verdict = worker.judge(name, data)
        assert verdict.outcome == ("pixels" if name in awkward.HARMLESS else "refused"), verdict
        assert verdict.seconds < 5, verdict
        assert verdict.memory_mb < 100, verdict


@pytest.mark.processes
def test_a_process_that_dies_of_a_file_is_told_from_a_refusal(worker: awkward.Worker):
    verdict = awkward.Verdict("x", "died")
    assert verdict.wrong
    assert awkward.Verdict("x", "raised", "OSError").wrong
    assert not worker.judge("cat", IMAGES / "photo_odd_451x300.jpg").wrong


@pytest.mark.processes
def test_a_picture_with_transparency_or_depth_is_made_ordinary_in_little_memory(
    worker: awkward.Worker,
):
    """16 megapixels: 64 MB as Pillow keeps them."""
    for picture, most_mb in (
        (Image.new("RGBA", (4000, 4000)), 220),
        (Image.fromarray(np.zeros((4000, 4000), np.uint16)), 150),
    ):
        file = io.BytesIO()
        picture.save(file, "PNG")
        verdict = worker.judge(picture.mode, file.getvalue())
        assert verdict.outcome == "pixels"
        assert verdict.memory_mb < most_mb, verdict


@pytest.mark.parametrize("name", awkward.hostile_texts())
def test_no_text_keeps_anybody_waiting(name: str):
    text = awkward.hostile_texts()[name]
    tokenizer = TextTokenizer(*word_tokenizer(8))
    began = time.process_time()
    try:
        assert tokenizer([text]).shape == (1, 8)
    except InputError:
        assert "20,000" in name
    assert time.process_time() - began < 0.3


LIMITS = ImageLimits(max_bytes=20_000, max_pixels=10_000, max_aspect_ratio=10)


def _file(width: int, height: int, quality: int = 75) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 90).save(file, "JPEG", quality=quality)
    return file.getvalue()


@pytest.mark.parametrize(
    "source",
    [
        lambda data: data,
        lambda data: io.BytesIO(data),
        lambda data: Image.open(io.BytesIO(data)),
        lambda data: Image.open(io.BytesIO(data)).convert("RGB"),
        lambda data: np.asarray(Image.open(io.BytesIO(data))),
    ],
    ids=["bytes", "file", "opened", "decoded", "array"],
)
def test_limits_hold_for_every_kind_of_source(source):
    assert load(source(_file(100, 100)), LIMITS).size == (100, 100)
    with pytest.raises(InputError, match="101 × 100 pixels is too large"):
        load(source(_file(101, 100)), LIMITS)
    with pytest.raises(InputError, match="a strip of 110 × 10"):
        load(source(_file(110, 10)), LIMITS)


def test_an_opened_file_is_held_to_the_limit_in_bytes(tmp_path: Path):
    path = tmp_path / "padded.jpg"
    path.write_bytes(_file(50, 50) + bytes(20_000))
    with Image.open(path) as opened:
        for source in (path, opened):
            with pytest.raises(InputError, match="larger than"):
                load(source, LIMITS)


def test_an_opened_file_that_could_start_other_programs_is_not_read(monkeypatch):
    drawing = Image.open(IMAGES / "cmyk_adobe_inverted.jpg")
    monkeypatch.setattr(drawing, "format", "EPS")
    with pytest.raises(InputError, match="format EPS") as caught:
        load(drawing)
    assert "load() first" in caught.value.remedy
    drawing.load()
    assert load(drawing).mode == "CMYK"


def test_fast_decoding_leaves_the_callers_picture_alone():
    data = _file(2000, 2000)
    theirs = Image.open(io.BytesIO(data))
    to_pixels([theirs], CLIP_PREPROCESS, decode="fast")
    assert theirs.size == (2000, 2000)


def test_a_run_length_bitmap_is_read_though_it_is_read_byte_by_byte():
    """Its decoder is written in Python and asks for a byte at a time."""
    rows = b"".join(bytes((1, x % 2)) * 1 for x in range(400)) + b"\0\0"
    palette = bytes((0, 0, 0, 0, 255, 255, 255, 0)) + bytes(254 * 4)
    body = rows * 100 + b"\0\1"
    head = (40).to_bytes(4, "little") + (400).to_bytes(4, "little") + (100).to_bytes(4, "little")
    head += (1).to_bytes(2, "little") + (8).to_bytes(2, "little") + (1).to_bytes(4, "little")
    head += len(body).to_bytes(4, "little") + bytes(16)
    start = 14 + 40 + len(palette)
    data = (
        b"BM" + (start + len(body)).to_bytes(4, "little") + bytes(4) + start.to_bytes(4, "little")
    )
    picture = np.asarray(load(data + head + palette + body))
    assert picture.shape[:2] == (100, 400)
    assert picture[0, :4, 0].tolist() == [0, 255, 0, 255]
