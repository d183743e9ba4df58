"""Neighbours from the index in a folder, held against comparing everything in numpy, in one run.

    python benchmarks/index.py [--vectors 100000] [--dim 512] [--json FILE]

Vectors are random (no structure at all: the worst that can be) and clustered (2,000 centres, as pictures of things
are). Each is searched before the cells are built (LanceDB compares everything) and after. The peer is numpy's matrix
product over the same vectors in memory, which holds nothing else: no captions, no disk. Bars: recall@10 of 1 where
everything is compared and 0.95 on clustered vectors in cells. Times are ratios, printed without bars.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import Figure, figure, report

from clip_deploy.indexes import Index, IndexIdentity, Item, open_index

QUESTIONS = 100
BEST = 10


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def vectors(kind: str, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """What is stored, and what is asked."""
    numbers = np.random.default_rng(0)

    def noise(rows: int) -> np.ndarray:
        return unit(numbers.standard_normal((rows, dim)))

    if kind == "random":
        return noise(count), noise(QUESTIONS)
    centres = noise(2000)[numbers.integers(0, 2000, count)]
    stored = unit(centres + 0.9 * noise(count))
    return stored, unit(stored[numbers.integers(0, count, QUESTIONS)] + 0.5 * noise(QUESTIONS))


def exact(stored: np.ndarray, asked: np.ndarray) -> set[int]:
    cosines = stored @ asked
    best = np.argpartition(-cosines, BEST)[:BEST]
    return set(best[np.argsort(-cosines[best])].tolist())


async def fill(place: Path, stored: np.ndarray) -> Index:
    identity = IndexIdentity("0" * 64, stored.shape[1], "benchmark/random")
    index = await open_index(str(place), create=identity)
    for start in range(0, len(stored), 5000):
        await index.add(
            [
                Item(str(start + n), row, f"picture {(start + n) % 977}", "", "", b"")
                for n, row in enumerate(stored[start : start + 5000])
            ]
        )
    return index


async def measured(index: Index, stored: np.ndarray, asked: np.ndarray) -> tuple[float, list, list]:
    """Recall, and the seconds of each search and of its peer, taken in turn."""
    found, times, peers = 0, [], []
    await index.search(vector=asked[0], limit=BEST)
    for row in asked:
        began = time.perf_counter()
        right = exact(stored, row)
        between = time.perf_counter()
        hits = await index.search(vector=row, limit=BEST)
        times.append(time.perf_counter() - between)
        peers.append(between - began)
        found += len(right & {int(hit.id) for hit in hits})
    return found / BEST / len(asked), times, peers


async def run(arguments: argparse.Namespace) -> list[Figure]:
    figures = []
    for kind in ("random", "clustered"):
        stored, asked = vectors(kind, arguments.vectors, arguments.dim)
        with tempfile.TemporaryDirectory() as folder:
            index = await fill(Path(folder) / "index", stored)
            for state in ("everything compared", "in cells"):
                recall, times, peers = await measured(index, stored, asked)
                bar = (
                    1.0 if state == "everything compared" else 0.95 if kind == "clustered" else 0.0
                )
                name = f"{kind}, {state}"
                parts = {"vectors": float(len(stored)), "dim": float(stored.shape[1])}
                figures.append(figure(f"recall@10, {name}", [recall], bar, False, parts))
                ratios = [a / b for a, b in zip(times, peers)]
                parts = {
                    "index_ms": 1000 * statistics.median(times),
                    "numpy_ms": 1000 * statistics.median(peers),
                }
                figures.append(figure(f"time ÷ numpy, {name}", ratios, math.inf, True, parts))
                await index.compact()
            await index.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    return report(asyncio.run(run(arguments)), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
