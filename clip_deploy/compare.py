"""Embeddings held against a reference: what "the same" means, in one place, for graphs and for servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.errors import ConfigError
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from clip_deploy.spec import Tolerance

    Encode = Callable[[NDArray[Any]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How embeddings agree with the reference: the worst row's cosine, the worst component, the worst norm."""

    rows: int
    min_cosine: float
    max_error: float
    norm_error: float

    def faults(self, limits: Tolerance) -> list[str]:
        """What is out of tolerance, each with figure and limit; NaN never passes."""
        checks = (
            (
                self.min_cosine >= limits.cosine,
                f"cosine {self.min_cosine:.6f} is below {limits.cosine}",
            ),
            (
                self.max_error <= limits.max_error,
                f"an error of {self.max_error:.1e} is above {limits.max_error:.0e}",
            ),
            (self.norm_error <= limits.norm, f"a norm differs from 1 by {self.norm_error:.1e}"),
        )
        return [complaint for holds, complaint in checks if not holds]

    def __str__(self) -> str:
        return f"cosine ≥ {self.min_cosine:.6f}, error ≤ {self.max_error:.1e}"


def agreement(got: NDArray[np.float32], expected: NDArray[np.float32]) -> Agreement:
    """Compare embeddings ``[n, embed_dim]`` with the reference ``[n, embed_dim]``.

    A wrong shape or a value that is not finite counts as total disagreement (NaN), which no tolerance accepts.
    """
    if got.shape != expected.shape or not np.isfinite(got).all():
        return Agreement(len(expected), float("nan"), float("nan"), float("nan"))
    return Agreement(
        rows=len(expected),
        min_cosine=float(np.min(cosine(got, expected))),
        max_error=float(np.abs(got - expected).max()),
        norm_error=norm_error(got),
    )


def worst(parts: Iterable[Agreement]) -> Agreement:
    """All parts as one; NaN wins."""
    parts = list(parts)
    return Agreement(
        rows=sum(part.rows for part in parts),
        min_cosine=float(np.min([part.min_cosine for part in parts])),
        max_error=float(np.max([part.max_error for part in parts])),
        norm_error=float(np.max([part.norm_error for part in parts])),
    )


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """Row by row, ``[n]``; NaN where a row is zero."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(
            (left * right).sum(1) / (np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1))
        )


def norm_error(embeddings: NDArray[np.float32]) -> float:
    """The largest distance of a row's length from 1."""
    return float(np.abs(np.linalg.norm(embeddings.astype(np.float64), axis=1) - 1).max())


def row_influence(encode: Encode, inputs: NDArray[Any], batch: int) -> float:
    """The largest change of one row's embedding that company makes: alone, inside a full batch of others, repeated.

    Needs no reference. ``inputs`` ``[n, …]`` with n ≥ 2; ``batch`` is the size of the full batch.
    """
    row, middle = inputs[:1], batch // 2
    crowd = inputs[np.resize(np.arange(1, len(inputs)), batch)]
    crowd[middle] = row[0]
    alone = encode(row)[0]
    among, repeated = encode(crowd)[middle], encode(np.repeat(row, batch, axis=0))
    return float(max(np.abs(among - alone).max(), np.abs(repeated - alone).max()))


def spread(embeddings: NDArray[np.float32]) -> float:
    """How far the two most different rows lie apart in the component where they differ most: 0 when all are equal."""
    return float((embeddings.max(axis=0) - embeddings.min(axis=0)).max())


# Scores that differ by less than this are a tie to a search: two FP16 answers may differ by as much.
RANK_MARGIN = 2e-3


def rank_agreement(
    got: NDArray[np.float32],
    expected: NDArray[np.float32],
    keys: NDArray[np.float32] | None = None,
    k: int = 5,
) -> float:
    """The share of search results that are right: the ``k`` nearest keys of each query, against the reference.

    A result counts as right when its score in the reference reaches that of the reference's k-th result, less
    ``RANK_MARGIN``: with near-equal scores any order is right, and a real error is not hidden.

    Args:
        got: queries ``[n, embed_dim]`` as they are now.
        expected: the same queries in the reference.
        keys: what is searched, ``[m, embed_dim]``; None searches the other queries themselves.
    """
    own = keys is None
    scores = got @ (got if keys is None else keys).T
    truth = expected @ (expected if keys is None else keys).T
    if own:
        np.fill_diagonal(scores, -np.inf)
        np.fill_diagonal(truth, -np.inf)
    k = min(k, truth.shape[1] - own)
    nearest = np.argsort(-scores, axis=1)[:, :k]
    bar = np.sort(truth, axis=1)[:, -k][:, None]
    right = np.take_along_axis(truth, nearest, axis=1) >= bar - RANK_MARGIN
    return float(right.mean())


def rank_shares(
    got: NDArray[np.float32],
    expected: NDArray[np.float32],
    rival: NDArray[np.float32] | None,
    tower: Tower,
) -> dict[str, float | None]:
    """``rank_agreement`` of searches among a tower's own embeddings and in the other tower's, by ``image→text``.

    None stands for a search that could not be made, because the other tower is out of reach.
    """
    other = Tower.TEXT if tower is Tower.IMAGE else Tower.IMAGE
    return {
        f"{tower.value}→{tower.value}": rank_agreement(got, expected),
        f"{tower.value}→{other.value}": None
        if rival is None
        else rank_agreement(got, expected, rival),
    }


# How far the embeddings of different inputs lie apart at least, in some component; trained models have 0.3.
LEAST_SPREAD = 1e-3


@dataclass(frozen=True, slots=True)
class Examination:
    """What came of holding an encoder against a reference: figures by name, and what is out of tolerance."""

    figures: dict[str, Any]
    faults: tuple[str, ...]


def examine(
    encode: Encode,
    inputs: NDArray[Any],
    expected: NDArray[np.float32],
    limits: Tolerance,
    max_batch: int,
) -> Examination:
    """Hold an encoder against a reference: right, finite, of unit length, at every batch size, row by row independent.

    Args:
        encode: inputs ``[batch, …]`` → embeddings ``[batch, embed_dim]``.
        inputs: the reference inputs ``[n, …]``, n ≥ 2, not all equal.
        expected: the reference's answers ``[n, embed_dim]``, each computed alone.
        limits: what is still right.
        max_batch: the largest batch to try.
    """
    sizes = sorted({1, 2, 3, max_batch} & set(range(1, max_batch + 1)))
    result = worst(
        agreement(encode(inputs[rows]), expected[rows])
        for size in sizes
        for rows in _batches(len(inputs), size)
    )
    influence, variety = row_influence(encode, inputs, max_batch), spread(expected)
    faults = result.faults(limits)
    if not influence <= limits.independence:
        faults.append(f"rows of a batch change one another by {influence:.1e}")
    if not variety > LEAST_SPREAD:
        faults.append("different inputs give the same embedding")
    elif not result.max_error < variety / 4:
        faults.append(
            f"its errors ({result.max_error:.1e}) are like its differences ({variety:.1e})"
        )
    figures = {
        "batches": sizes,
        "rows": result.rows,
        "min_cosine": result.min_cosine,
        "max_error": result.max_error,
        "norm_error": result.norm_error,
        "row_influence": influence,
        "spread": variety,
    }
    return Examination(figures, tuple(faults))


def _batches(count: int, size: int) -> list[NDArray[np.intp]]:
    """Row numbers in batches of ``size`` that visit every row at least once; short lists are repeated to fill one."""
    rows = np.resize(np.arange(count), -(-count // size) * size)
    return list(rows.reshape(-1, size))


@dataclass(frozen=True, slots=True)
class Reference:
    """Real inputs and torch's FP32 answers, as they travel beside a graph in ``reference.npz``.

    Args:
        inputs: float32 ``[n, 3, height, width]`` or int32 ``[n, context_length]``.
        outputs: torch's embeddings, float32 ``[n, embed_dim]``, each computed alone.
        labels: file names of the photographs, or the texts themselves.
        captions: of photographs, a caption each ("" where there is none); empty for texts.
    """

    inputs: NDArray[Any]
    outputs: NDArray[np.float32]
    labels: tuple[str, ...]
    captions: tuple[str, ...] = ()

    def save(self, path: Path, tower: Tower) -> None:
        arrays: dict[str, Any] = {
            tower.input_name: self.inputs,
            tower.output_name: self.outputs,
            "labels": np.asarray(self.labels, dtype=np.str_),
            "captions": np.asarray(self.captions, dtype=np.str_),
        }
        np.savez(path, **arrays)

    @classmethod
    def read(cls, path: Path, tower: Tower) -> Reference:
        """Read it back; nothing in the file is unpickled.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
                return cls(
                    inputs=data[tower.input_name],
                    outputs=data[tower.output_name],
                    labels=tuple(map(str, data["labels"])),
                    captions=tuple(map(str, data["captions"])),
                )
        except Exception as error:  # zipfile, zlib and numpy raise their own kinds on damaged files
            raise ConfigError(
                f"{path} cannot be read: {error}", remedy="export the model again"
            ) from error
