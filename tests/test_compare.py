from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clip_deploy.compare import (
    Reference,
    agreement,
    cosine,
    rank_agreement,
    row_influence,
    spread,
    worst,
)
from clip_deploy.errors import ConfigError
from clip_deploy.spec import Tolerance, Tower
from tests.factories import unit

LIMITS = Tolerance(cosine=0.999, max_error=1e-3, independence=1e-5)
ROWS = unit(np.random.default_rng(0).standard_normal((6, 16)))


def test_equal_embeddings_agree():
    assert agreement(ROWS, ROWS).faults(LIMITS) == []


@pytest.mark.parametrize(
    ("got", "complaint"),
    [
        (unit(ROWS + 0.1), "cosine"),
        (ROWS * 1.01, "norm"),
        (ROWS[:3], "cosine nan"),
        (np.where(np.arange(16) == 3, np.nan, ROWS).astype(np.float32), "cosine nan"),
        (np.zeros_like(ROWS), "cosine nan"),
        (ROWS[::-1].copy(), "cosine"),
    ],
    ids=["shifted", "longer", "fewer", "nan", "zero", "swapped"],
)
def test_every_kind_of_disagreement_is_a_fault(got: np.ndarray, complaint: str):
    assert any(complaint in fault for fault in agreement(got, ROWS).faults(LIMITS))


def test_one_bad_part_spoils_the_whole():
    assert worst([agreement(ROWS, ROWS), agreement(ROWS * np.float32("nan"), ROWS)]).faults(LIMITS)


def test_cosine_is_per_row():
    assert cosine(ROWS, -ROWS) == pytest.approx(-np.ones(6))


def test_spread_is_zero_when_all_rows_are_equal():
    assert spread(np.repeat(ROWS[:1], 4, axis=0)) == 0
    assert spread(ROWS) > 0.1


def test_rows_that_are_independent_have_no_influence():
    assert row_influence(lambda rows: rows * 2, ROWS, 5) == 0


@pytest.mark.parametrize("batch", [2, 5, 32])
@pytest.mark.parametrize(
    "mixing",
    [
        lambda rows: rows - rows.mean(axis=0),  # a batch norm left in training mode
        lambda rows: (
            np.repeat(rows[:1], len(rows), axis=0) if len(rows) > 1 else rows + 1
        ),  # only row 0 is right
        lambda rows: rows + 0.01 * len(rows),  # another kernel for another batch size
    ],
)
def test_rows_that_influence_one_another_are_found(mixing, batch: int):
    assert row_influence(mixing, ROWS, batch) > 1e-3


def test_a_reference_comes_back_as_it_was_saved(tmp_path: Path):
    saved = Reference(np.arange(12, dtype=np.int32).reshape(2, 6), ROWS[:2], ("", "한국어"), ())
    saved.save(tmp_path / "reference.npz", Tower.TEXT)
    read = Reference.read(tmp_path / "reference.npz", Tower.TEXT)
    assert np.array_equal(read.inputs, saved.inputs)
    assert np.array_equal(read.outputs, saved.outputs)
    assert (read.labels, read.captions) == (saved.labels, saved.captions)


def test_a_reference_is_never_unpickled(tmp_path: Path):
    np.savez(tmp_path / "reference.npz", input_ids=np.array([object()], dtype=object))
    with pytest.raises(ConfigError, match="cannot be read"):
        Reference.read(tmp_path / "reference.npz", Tower.TEXT)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut off"])
def test_a_damaged_reference_says_so(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "reference.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        Reference.read(tmp_path / "reference.npz", Tower.IMAGE)


def test_rank_agreement_counts_results_that_are_truly_worse_and_forgives_ties():
    random = np.random.default_rng(0)
    keys = random.standard_normal((50, 16)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    queries = keys + 0.1
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    assert rank_agreement(queries, queries, keys) == 1.0
    assert rank_agreement(keys, keys) == 1.0
    noisy = queries + random.standard_normal(queries.shape).astype(np.float32) * 1e-5
    assert rank_agreement(noisy, queries, keys) == 1.0
    shuffled = queries[random.permutation(50)]
    assert rank_agreement(shuffled, queries, keys) < 0.5
    same = np.repeat(keys[:1], 6, axis=0)
    assert rank_agreement(same + 1e-4, same, k=3) == 1.0  # all equal: any order is right
