from __future__ import annotations

import base64
import json
import lzma

import pytest

from clip_deploy.contract import Contract, pack, unpack
from clip_deploy.errors import ConfigError
from clip_deploy.spec import Scoring, Tokens, Tower
from tests.factories import contract


def _read(parameters: dict[str, str], like: Contract) -> Contract:
    return Contract.from_parameters(parameters, inputs=(like.input,), outputs=(like.output,))


@pytest.mark.parametrize("tower", Tower)
def test_what_is_written_into_a_config_is_what_a_client_reads(tower: Tower):
    described = contract(tower, scoring=Scoring("sigmoid", 117.33, -12.93))
    assert _read(described.to_parameters(), described) == described


@pytest.mark.parametrize("tower", Tower)
def test_a_manifest_gives_the_contract_back(tower: Tower):
    described = contract(tower)
    assert Contract.from_json(json.loads(json.dumps(described.to_json()))) == described


def test_a_zeroed_token_survives_the_way():
    described = contract(Tower.TEXT, tokens=Tokens(64, 1, "canonicalize", "c" * 64, zeroed_id=102))
    assert _read(described.to_parameters(), described).tokens.zeroed_id == 102


@pytest.mark.parametrize("key", list(contract(Tower.IMAGE).to_parameters()))
def test_a_missing_parameter_is_named_and_never_guessed(key: str):
    described = contract(Tower.IMAGE)
    parameters = described.to_parameters()
    del parameters[key]
    if (
        key == "clip_deploy.normalized"
    ):  # says that vectors have length 1, which the client checks on every answer
        assert _read(parameters, described) == described
        return
    with pytest.raises(ConfigError, match=key):
        _read(parameters, described)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contract", "99"),
        ("tower", "audio"),
        ("precision", "fp3"),
        ("mean", "0.5,x,0.5"),
        ("mean", "0.5"),
        ("image_size", "0,224"),
        ("resize_mode", "zoom"),
        ("scoring", "magic"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused(key: str, value: str):
    described = contract(Tower.IMAGE)
    with pytest.raises(ConfigError):
        _read(described.to_parameters() | {f"clip_deploy.{key}": value}, described)


def test_an_image_encoder_without_preprocessing_cannot_exist():
    with pytest.raises(ConfigError, match="preprocessing"):
        contract(Tower.IMAGE, preprocess=None)


def test_a_packed_tokenizer_comes_back_and_is_small():
    data = json.dumps({"words": [f"word{i}" for i in range(5000)]})
    packed = pack(data)
    assert unpack(packed) == data
    assert packed.isascii()
    assert len(packed) < len(data) / 2


@pytest.mark.parametrize(
    "value",
    [
        "",
        "not base64!",
        base64.b64encode(b"not lzma").decode(),
        base64.b64encode(lzma.compress(b"x" * 1000)[:-8]).decode(),
    ],
)
def test_a_damaged_tokenizer_is_refused(value: str):
    with pytest.raises(ConfigError, match="tokenizer"):
        unpack(value)


def test_a_tokenizer_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clip_deploy.contract._MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(ConfigError, match="too large"):
        unpack(pack("x" * 10_000))
