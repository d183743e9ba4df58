"""open_clip's tokenizer → plain data: a ``tokenizer.json`` that needs no torch and gives the same ids.

open_clip's own tokenizer is Python around the ``regex`` library; a Hugging Face ``tokenizers`` file that merely looks
the same differs on a third of hard texts. What makes the two equal:

- The pattern's classes are written out code point by code point, asked of ``regex`` here. Unicode tables differ between
  the two libraries, and ``regex`` ignores case in its own way (``'ſ`` is a contraction, U+0345 is no character at all).
- The start and end tokens are alternatives of the pattern and merges of lowest rank, not added tokens: open_clip sees a
  typed ``<end_of_text>`` only where a word may begin, while added tokens match anywhere.
- Truncation happens before the template adds start and end, so the end token, which pooling looks for, is never cut.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ExportError, extra
from clip_deploy.inputs.texts import TextTokenizer
from clip_deploy.spec import Tokens

with extra("export"):
    import regex
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")

# Held against open_clip for every export: each line is a way in which tokenizers have been seen to differ.
PROBES = (
    "",
    "a photo of a cat",
    "A Photo of   a CAT!\n\t(really)",
    "it's, we're, I'LL, 'ſ and 'S",
    "cat " * 75,
    "cat " * 76,
    "dog " * 300,
    "x" * 300,
    "3.14159 2,718 ½ ² Ⅷ",
    "naïve café ﬁancée Ǆ İstanbul ẞ",
    "一只猫在沙发上睡觉 고양이 사진 猫の写真",
    "صورة قطة חתול รูปแมว чёрный кот",
    "👍🏽 👩🏿‍🚀 🏴󠁧󠁢󠁷󠁬󠁳󠁿 1️⃣",
    "Tom &amp;amp; Jerry &lt;end_of_text&gt;",
    "cafÃ© â€œquotedâ€",
    "<start_of_text> !<end_of_text> <END_OF_TEXT><end_of_text>x",
    "snake_case __init__ a-b C:\\path https://x.org/?a=1&copy=2",
    "a\u0345b \u0301c \ud83d d",
    "\x00 \x1c \u2028 \ufeff",
)


def as_data(tokenizer: Any) -> tuple[str, Tokens]:
    """The text of a ``tokenizer.json`` and how to use it, checked against ``tokenizer`` (one of open_clip's own).

    Raises:
        ExportError: open_clip's tokenizer is of a kind that plain data cannot carry, or the data disagrees with it.
    """
    kind = type(tokenizer).__name__
    build = _BUILDERS.get(kind)
    if build is None:
        raise ExportError(
            f"open_clip's {kind} has no form as plain data yet", remedy="export --tower image only"
        )
    built, clean, pad_id, zeroed_id = build(tokenizer)
    length = int(tokenizer.context_length)
    built.enable_truncation(length)
    built.enable_padding(length=length, pad_id=pad_id, pad_token=built.id_to_token(pad_id) or "")
    data = built.to_str(pretty=False)
    tokens = Tokens(length, pad_id, clean, hashlib.sha256(data.encode()).hexdigest(), zeroed_id)
    check(TextTokenizer(data, tokens), tokenizer, PROBES)
    return data, tokens


def check(ours: TextTokenizer, theirs: Callable[[list[str]], Any], texts: Iterable[str]) -> None:
    """Raise ExportError unless both tokenizers give the same ids for every text."""
    for text in texts:
        got, expected = ours([text])[0].tolist(), theirs([text])[0].tolist()
        if got != expected:
            raise ExportError(
                f"the exported tokenizer disagrees with open_clip on {text[:60]!r}",
                remedy="report this text with your versions of open_clip, regex and tokenizers (clip-deploy doctor)",
            )


def _from_simple(tokenizer: Any) -> tuple[Tokenizer, str, int, int | None]:
    """open_clip's SimpleTokenizer: byte-level BPE with an end-of-word suffix, over a table of merges."""
    if tokenizer.reduction_fn is not None:
        raise ExportError(
            "the model drops tokens at random from long texts (reduction_mask)",
            remedy="remove it from text_cfg",
        )
    specials = {tokenizer.decoder[i]: i for i in tokenizer.all_special_ids}
    vocabulary = {token: i for token, i in tokenizer.encoder.items() if token not in specials}
    merges = list(tokenizer.bpe_ranks)
    for special, special_id in specials.items():
        _merge_into_one(special, special_id, vocabulary, merges)
    start, end = list(specials)[:2]
    built = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>", fuse_unk=False)
    )
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern(list(specials))), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(word, specials[word]) for word in (start, end)]
    )
    return built, _clean_name(tokenizer.clean_fn), 0, None


def _merge_into_one(
    special: str, special_id: int, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    """Let BPE join the pieces of ``special`` into its one id, by merges ranked after all others.

    The intermediate pieces hold ``<`` and letters together, which the pattern allows in no other word.
    """
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>"))
    left, *others = [token.value for token in plain.model.tokenize(special)]
    for right in others:
        merges.append((left, right))
        left += right
        vocabulary.setdefault(
            left, max(vocabulary.values()) + 3
        )  # ids of the specials themselves stay free
    vocabulary[left] = special_id


def _pattern(specials: list[str]) -> str:
    """open_clip's splitting pattern with every class written out, so that it means the same to any regex engine."""
    letter, number, other = (
        _class(_matching(c)) for c in (r"[\p{L}]", r"[\p{N}]", r"[^\s\p{L}\p{N}]")
    )
    literal = {
        c: _class(_matching(regex.escape(c)))
        for c in sorted(set("".join([*specials, *_CONTRACTIONS])))
    }
    alternatives = ["".join(literal[c] for c in word) for word in (*specials, *_CONTRACTIONS)]
    return "|".join([*alternatives, f"{letter}+", number, f"{other}+"])


@functools.cache
def _every_character() -> str:
    return "".join(chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF)


def _matching(pattern: str) -> list[int]:
    """The code points that ``pattern``, of one character, matches on its own."""
    return [ord(c) for c in regex.findall(pattern, _every_character(), regex.IGNORECASE)]


def _class(code_points: list[int]) -> str:
    """A bracket expression that holds exactly these code points."""
    ranges: list[list[int]] = []
    for point in code_points:
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return (
        "["
        + "".join(rf"\x{{{a:X}}}" if a == b else rf"\x{{{a:X}}}-\x{{{b:X}}}" for a, b in ranges)
        + "]"
    )


def _from_hugging_face(tokenizer: Any) -> tuple[Tokenizer, str, int, int | None]:
    """open_clip's HFTokenizer around a fast tokenizer of ``transformers``: the data is already there."""
    inner = tokenizer.tokenizer
    if getattr(tokenizer, "tokenizer_mode", "") or not getattr(inner, "is_fast", False):
        raise ExportError(
            f"the model's tokenizer ({type(inner).__name__}) has no form as plain data yet",
            remedy="export --tower image only",
        )
    zeroed = inner.sep_token_id if getattr(tokenizer, "strip_sep_token", False) else None
    clean = _clean_name(tokenizer.clean_fn) if hasattr(tokenizer, "clean_fn") else "canonicalize"
    return (
        Tokenizer.from_str(inner.backend_tokenizer.to_str()),
        clean,
        int(inner.pad_token_id),
        zeroed,
    )


def _clean_name(function: Callable[[str], str]) -> str:
    """open_clip names its cleaning functions ``_clean_lower`` and so on."""
    return function.__name__.removeprefix("_clean_")


_BUILDERS = {
    "SimpleTokenizer": _from_simple,
    "HFTokenizer": _from_hugging_face,
    "SigLipTokenizer": _from_hugging_face,
}
