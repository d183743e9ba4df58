"""Sentences → token ids, equal one by one to open_clip's, from a tokenizer that is plain data."""

from __future__ import annotations

import html
import string
from typing import TYPE_CHECKING

import ftfy
import numpy as np
from tokenizers import Tokenizer

from clip_deploy.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from clip_deploy.spec import Tokens

# A model reads the first few dozen tokens and ignores the rest, while cleaning costs time that grows with the
# square of a hostile text (80,000 characters of nested "&amp;" take ftfy 16 seconds; 4,096 take 0.08).
MAX_CHARACTERS = 4096

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _repaired(text: str) -> str:
    """Mojibake mended and HTML entities decoded twice: captions scraped from the web are escaped twice."""
    return html.unescape(html.unescape(ftfy.fix_text(text))).strip()


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _canonical(text: str) -> str:
    return _collapsed(text.replace("_", " ").translate(_NO_PUNCTUATION).lower())


# Keys are open_clip's own names for its cleaning functions, so a manifest and a model config say the same word.
CLEANERS: dict[str, Callable[[str], str]] = {
    "lower": lambda text: _collapsed(_repaired(text)).lower(),
    "whitespace": lambda text: _collapsed(_repaired(text)),
    "canonicalize": lambda text: _canonical(_repaired(text)),
}


class TextTokenizer:
    """Turns sentences into the ids one text encoder was trained on.

    Args:
        data: the text of a ``tokenizer.json`` (Hugging Face ``tokenizers``), which truncates, adds the start and end
            tokens and pads; only the cleaning before it is code.
        tokens: how this model reads text: context length, cleaning, pad id.
    """

    def __init__(self, data: str, tokens: Tokens) -> None:
        if tokens.clean not in CLEANERS:
            raise ConfigError(
                f"the model cleans its texts by {tokens.clean!r}, which this version does not know",
                remedy="upgrade clip-deploy on this machine to the version that exported the model",
            )
        try:
            self._tokenizer = Tokenizer.from_str(data)
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(
                f"the tokenizer of this model does not load: {error}",
                remedy="export the text tower again",
            ) from error
        self._clean = CLEANERS[tokens.clean]
        self._tokens = tokens

    def __call__(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """Token ids, int32 ``[len(texts), context_length]``.

        Raises:
            InputError: a text is not a string, or longer than ``MAX_CHARACTERS``.
        """
        cleaned = [self._clean(_checked(text)) for text in texts]
        length = self._tokens.context_length
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(cleaned)]
        if any(len(row) != length for row in rows):
            raise ConfigError(
                f"the tokenizer gives {len(rows[0])} ids, the model reads {length}",
                remedy="export the text tower again: its tokenizer.json and its manifest do not belong together",
            )
        ids = np.asarray(rows, dtype=np.int32).reshape(len(rows), length)
        if self._tokens.zeroed_id is not None:
            ids[ids == self._tokens.zeroed_id] = 0
        return ids


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise InputError(
            f"a text must be a string, not {type(text).__name__}",
            remedy="pass str, decoded from its bytes",
        )
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"a text has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}",
            remedy="cut it: a CLIP text encoder reads the first few dozen words and ignores the rest",
        )
    return text
