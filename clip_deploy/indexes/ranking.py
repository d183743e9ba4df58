"""Two rankings become one, by reciprocal rank; ties go by id, so that the same question has the same answer."""

from __future__ import annotations

from dataclasses import dataclass

from clip_deploy.indexes.port import Hit

# What a rank counts: 1 / (60 + rank), as in the paper of reciprocal rank fusion (Cormack and others, 2009), and as
# LanceDB's own reranker has it.
RANK_CONSTANT = 60
# How far down each ranking is looked at when two are fused.
WINDOW = 100


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of one ranking; ``score`` is a cosine or BM25's."""

    id: str
    caption: str
    source: str
    score: float


def window(limit: int, *, both: bool) -> int:
    """How many candidates of each ranking are needed for ``limit`` results."""
    return max(limit, WINDOW) if both else limit


def ranked(
    nearest: list[Candidate] | None, matching: list[Candidate] | None, limit: int
) -> list[Hit]:
    """The best of a ranking by cosine, of one by BM25, or of both; None is a ranking that was not asked for."""
    rankings = [sorted(rows or (), key=_best_first) for rows in (nearest, matching)]
    by_vector, by_text = ({row.id: i for i, row in enumerate(rows, 1)} for rows in rankings)
    cosines = {row.id: row.score for row in nearest or ()}
    hits = []
    for row in {row.id: row for rows in rankings for row in rows}.values():
        ranks = by_vector.get(row.id), by_text.get(row.id)
        fused = sum(1 / (RANK_CONSTANT + rank) for rank in ranks if rank is not None)
        score = row.score if nearest is None or matching is None else fused
        hits.append(Hit(row.id, score, row.caption, row.source, *ranks, cosines.get(row.id)))
    return sorted(hits, key=_best_first)[:limit]


def _best_first(row: Candidate | Hit) -> tuple[float, str]:
    return -row.score, row.id
