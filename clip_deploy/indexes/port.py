"""What every index does, whatever engine is behind it, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from clip_deploy.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from clip_deploy.client.served import Deployment

MAX_LIMIT = 1000
MAX_TEXT_CHARACTERS = 2000
MAX_CAPTION_CHARACTERS = 4000
_MAX_ID_BYTES = 512  # Elasticsearch's own bound
_NORM_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Item:
    """One picture of an index.

    ``id`` is text of at most 512 bytes, any printable characters. ``vector`` is float32 ``[embed_dim]`` of unit length,
    ``source`` what a person calls the picture (its path in the folder it came from), ``sha256`` of the picture's bytes
    and its caption: where it is unchanged, so is everything else. ``thumbnail`` is a JPEG file. ``origin`` names the
    folder or file that it came from, so that one of them can be pruned without the others.
    """

    id: str
    vector: NDArray[np.float32]
    caption: str
    source: str
    sha256: str
    thumbnail: bytes
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """One result, best first.

    ``score`` is what results are ordered by: the cosine where only a vector was given, BM25 where only a text was, and
    the sum of 1 / (60 + rank) over both rankings where both were. A rank is None where that ranking, as far as it was
    looked at, does not hold the picture; ``cosine`` is None with ``vector_rank``.
    """

    id: str
    score: float
    caption: str
    source: str
    vector_rank: int | None
    text_rank: int | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """The model whose vectors an index holds: those of another cannot be compared with them."""

    weights_sha256: str
    embed_dim: int
    model: str

    @classmethod
    def of(cls, deployment: Deployment) -> IndexIdentity:
        """The identity of an index of a served model's vectors."""
        name = f"{deployment.model}/{deployment.pretrained}"
        return cls(deployment.weights_sha256, deployment.embed_dim, name)

    def require(self, other: IndexIdentity, place: str) -> None:
        """See that vectors of ``other`` belong into this index.

        Raises:
            ConfigError: they are another model's, or of another length.
        """
        mine = self.weights_sha256, self.embed_dim
        if mine != (other.weights_sha256, other.embed_dim):
            raise ConfigError(
                f"the index {place} holds vectors of {self}, not of {other}",
                remedy="serve the model that it was made with, or make a new index with this one",
            )

    def __str__(self) -> str:
        return f"{self.model} ({self.embed_dim} numbers, weights {self.weights_sha256[:12]})"


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What an index holds, and what it takes on disk."""

    items: int
    identity: IndexIdentity
    bytes: int
    place: str
    engine: str


class Index(Protocol):
    """A port: one row of ``engines.ENGINES`` stands behind it. Safe to share within one event loop."""

    identity: IndexIdentity

    async def search(
        self,
        *,
        vector: NDArray[np.float32] | None = None,
        text: str | None = None,
        limit: int = 12,
    ) -> list[Hit]:
        """The best pictures for a vector, for a text, or for both by reciprocal rank.

        Raises:
            ConfigError: the vector is of another length than the index's.
            InputError: the text is too long, or nothing was given.
            IndexDamaged: what is stored cannot be read.
            ServerError: the engine's server does not answer, or answers with an error.
        """

    async def thumbnail(self, id: str) -> bytes | None:
        """The JPEG file of a picture; None where the index does not have it."""

    async def stats(self) -> IndexStats:
        """What the index holds now."""

    async def digests(self, origin: str | None = None) -> dict[str, str]:
        """Id → SHA-256 of every item, or of those of one origin."""

    async def add(self, items: Sequence[Item]) -> None:
        """Store items; those whose id is there are replaced. Searches see all of them or none."""

    async def remove(self, ids: Collection[str]) -> None:
        """Take items out; ids that are not there are nothing to do."""

    async def compact(self) -> None:
        """Make what was added fast to search, and let go of what was replaced. Takes a while; searches go on."""

    async def close(self) -> None:
        """Let go of files and connections."""


def require_query(
    identity: IndexIdentity, vector: NDArray[np.float32] | None, text: str | None, limit: int
) -> None:
    """See that a query can be answered; see ``Index.search``."""
    if vector is None and text is None:
        raise InputError("nothing to search for", remedy="give a vector, a text, or both")
    if not 1 <= limit <= MAX_LIMIT:
        raise InputError(f"a limit of {limit}", remedy=f"ask for 1 to {MAX_LIMIT} results")
    if text is not None and len(text) > MAX_TEXT_CHARACTERS:
        raise InputError(
            f"a search text of {len(text):,} characters",
            remedy=f"say it in at most {MAX_TEXT_CHARACTERS:,}",
        )
    if vector is not None:
        _require_vector(identity, vector, "the query's vector")


def require_items(identity: IndexIdentity, items: Sequence[Item]) -> None:
    """See that items can be stored.

    Raises:
        ConfigError: a vector, an id or a caption cannot be; nothing was stored.
    """
    if len({item.id for item in items}) < len(items):
        raise ConfigError("an id occurs twice among the items", remedy="give each its own id")
    for item in items:
        if not item.id.isprintable() or not 0 < len(_utf8(item.id)) <= _MAX_ID_BYTES:
            raise ConfigError(
                f"{item.id!r} cannot be an id",
                remedy=f"use 1 to {_MAX_ID_BYTES} bytes of printable characters",
            )
        if len(item.caption) > MAX_CAPTION_CHARACTERS:
            raise ConfigError(
                f"the caption of {item.source} has {len(item.caption):,} characters",
                remedy=f"shorten it to {MAX_CAPTION_CHARACTERS:,}",
            )
        _utf8(item.caption + item.source)
        _require_vector(identity, item.vector, f"the vector of {item.source}")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{text!r} is not text: it holds half of a character", remedy="write it as UTF-8"
        ) from None


def _require_vector(identity: IndexIdentity, vector: NDArray[np.float32], what: str) -> None:
    if vector.shape != (identity.embed_dim,) or vector.dtype != np.float32:
        raise ConfigError(
            f"{what} is {vector.dtype} {list(vector.shape)}; the index holds vectors of {identity}",
            remedy="use the model that the index was made with",
        )
    if not abs(float(np.linalg.norm(vector)) - 1) <= _NORM_TOLERANCE:  # NaN fails too
        raise ConfigError(
            f"{what} has not length 1", remedy="store and ask with what the client gives"
        )
