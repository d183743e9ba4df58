from __future__ import annotations

import time

import numpy as np
import pytest

from clip_deploy.errors import ConfigError, InputError
from clip_deploy.inputs.texts import CLEANERS, MAX_CHARACTERS, TextTokenizer
from clip_deploy.spec import Tokens
from tests.factories import word_tokenizer


def _tokenizer() -> TextTokenizer:
    return TextTokenizer(*word_tokenizer(8))


def test_ids_have_the_models_shape_and_type():
    ids = _tokenizer()(["a photo of a cat", ""])
    assert ids.dtype == np.int32
    assert ids.tolist() == [[1, 4, 5, 6, 4, 7, 2, 0], [1, 2, 0, 0, 0, 0, 0, 0]]


def test_no_texts_give_an_empty_batch():
    assert _tokenizer()([]).shape[0] == 0


def test_truncation_keeps_the_end_token():
    assert _tokenizer()(["cat " * 50])[0].tolist() == [1, 7, 7, 7, 7, 7, 7, 2]


@pytest.mark.parametrize(
    ("kind", "text", "cleaned"),
    [
        ("lower", "  A  PHOTO\n\tof Tom &amp;amp; Jerry ", "a photo of tom & jerry"),
        ("lower", "cafÃ© â€œquotedâ€\x9d", 'café "quoted"'),
        ("whitespace", " A  Photo ", "A Photo"),
        ("canonicalize", "A_photo, of: a CAT!", "a photo of a cat"),
        ("lower", "\ude00 cat", "\N{REPLACEMENT CHARACTER} cat"),
    ],
)
def test_texts_are_cleaned_as_open_clip_cleans_them(kind: str, text: str, cleaned: str):
    assert CLEANERS[kind](text) == cleaned


@pytest.mark.parametrize("text", [b"cat", None, 7, ["cat"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InputError, match="must be a string"):
        _tokenizer()([text])


def test_a_text_at_the_limit_is_read_and_one_beyond_is_refused():
    assert _tokenizer()(["c" * MAX_CHARACTERS]).shape == (1, 8)
    with pytest.raises(InputError, match="4,097 characters"):
        _tokenizer()(["c" * (MAX_CHARACTERS + 1)])


@pytest.mark.parametrize(
    "hostile",
    [
        "&amp;" * (MAX_CHARACTERS // 5),
        "&" + "amp;" * (MAX_CHARACTERS // 4 - 1),
        "x" * MAX_CHARACTERS,
        "Ã" * MAX_CHARACTERS,
        "&" * MAX_CHARACTERS,
        "\n" * MAX_CHARACTERS,
    ],
)
def test_hostile_texts_within_the_limit_are_cheap(hostile: str):
    start = time.process_time()
    _tokenizer()([hostile])
    assert time.process_time() - start < 0.3


def test_an_unknown_way_of_cleaning_is_refused():
    data, tokens = word_tokenizer()
    with pytest.raises(ConfigError, match="'rot13'"):
        TextTokenizer(data, Tokens(8, 0, "rot13", tokens.sha256))


def test_a_tokenizer_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="does not load"):
        TextTokenizer("{}", word_tokenizer()[1])


def test_a_tokenizer_of_another_length_is_refused():
    data, tokens = word_tokenizer(8)
    with pytest.raises(ConfigError, match="gives 8 ids, the model reads 16"):
        TextTokenizer(data, Tokens(16, 0, "lower", tokens.sha256))(["cat"])


def test_a_zeroed_token_is_zero_afterwards():
    data, tokens = word_tokenizer(8)
    assert TextTokenizer(data, Tokens(8, 0, "lower", tokens.sha256, zeroed_id=2))(["cat"])[
        0
    ].tolist() == [1, 7, 0, 0, 0, 0, 0, 0]
