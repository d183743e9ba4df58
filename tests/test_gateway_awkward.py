"""Awkward pictures and texts through the gateway: the vector of what a person sees, or a refusal by name; never a 500."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from clip_deploy.errors import InputError
from clip_deploy.inputs.images import to_pixels
from clip_deploy.resources import photographs_dir
from clip_deploy.spec import Preprocess
from tests.factories import CLIP_PREPROCESS
from tests.gateway_parts import FakeClient, FakeIndex, data_uri, gateway, image_form, vectors

CASES = Path(__file__).parent / "cases" / "embedding"
FILES = sorted((CASES / "images").iterdir())
MODES = {
    "shortest": CLIP_PREPROCESS,
    "squash": Preprocess((256, 256), (0.5,) * 3, (0.5,) * 3, "squash", "bicubic"),
}
EMBED = "/v1/embeddings"


class _Seeing(FakeClient):
    """Its vectors are made of the pixels that a real client would send; test_images.py says which are right."""

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess = preprocess

    async def prepare_images(self, images):
        return to_pixels(images, self.preprocess)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_file_is_embedded_as_a_person_sees_it_or_refused_by_name(file: Path, mode: str):
    data = file.read_bytes()
    try:
        expected = vectors(to_pixels([data], MODES[mode]))[0]
    except InputError as error:
        expected, refusal = None, error
    index = FakeIndex()
    with gateway(_Seeing(MODES[mode]), index) as g:
        embedded = g.post(EMBED, json={"input": data_uri(data)})
        found = g.post("/api/v1/search/image", **image_form(data))
    if expected is None:
        for answer in (embedded, found):
            assert answer.status_code == 422, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["remedy"] == refusal.remedy
        assert not index.asked
        return
    assert np.allclose(embedded.json()["data"][0]["embedding"], expected, atol=1e-6)
    assert np.allclose(index.asked[0]["vector"], expected, atol=1e-6)
    assert found.status_code == 200


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_files_give_a_vector_or_a_refusal_and_never_a_500():
    chance = random.Random(7)
    originals = [file.read_bytes() for file in FILES if 0 < file.stat().st_size < 60_000]
    with gateway(_Seeing(CLIP_PREPROCESS), FakeIndex()) as g:
        for _ in range(120):
            data = bytearray(chance.choice(originals))
            for _ in range(chance.randint(1, 8)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if chance.random() < 0.3:
                del data[chance.randrange(len(data)) :]
            answer = g.post("/api/v1/search/image", **image_form(bytes(data)))
            assert answer.status_code in (200, 422), answer.text
            assert answer.status_code == 200 or answer.json()["remedy"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"input": ' + b"9" * 100_000 + b"}",
        b'{"input": "' + b"x" * 20_000 + b'"}',
        b'{"input": "\\ud800"}',
        json.dumps({"input": "&amp;" * 20_000}).encode(),
        json.dumps({"input": [""]}).encode(),
        json.dumps({"input": [["nested"]]}).encode(),
        json.dumps({"input": "data:image/png;base64,"}).encode(),
        json.dumps({"input": "data:image/png;base64," + "A" * 9}).encode(),
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bodies_made_to_hurt_are_refused_by_name(body: bytes):
    with gateway() as g:
        answer = g.post(EMBED, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["remedy"]


def test_a_picture_beside_other_fields_is_still_that_picture():
    cat = (photographs_dir() / "cat.jpg").read_bytes()
    index = FakeIndex()
    with gateway(_Seeing(CLIP_PREPROCESS), index) as g:
        answer = g.post(
            "/api/v1/search/image",
            files={"file": ("a.png", cat, "text/plain")},
            data={"note": "the name and the type are wrong, the bytes are right"},
        )
    assert answer.status_code == 200, answer.text
    assert np.allclose(index.asked[0]["vector"], vectors(to_pixels([cat], CLIP_PREPROCESS))[0])
