"""Items, vectors and an embedder for the tests of indexes; no server in them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from clip_deploy.indexes import IndexIdentity, Item
from clip_deploy.spec import Tower

DIM = 32
IDENTITY = IndexIdentity("a" * 64, DIM, "tiny/random")
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def vector(seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)
    return made / np.linalg.norm(made)


def item(id: str, seed: int, caption: str = "", **changes: Any) -> Item:
    values = {
        "source": f"{id}.jpg",
        "sha256": f"digest of {id}",
        "thumbnail": b"jpeg of " + id.encode(),
    }
    return Item(id, vector(seed), caption, **(values | changes))


CAPTIONS = (
    "a cat on a mat",
    "a dog",
    "고양이 사진",
    "the Café cats",
    "a brick wall",
    "猫の写真",
    "",
    "cat cat cat",
    "running horses",
)
ITEMS = [item(f"i{seed}", seed, caption) for seed, caption in enumerate(CAPTIONS)]


class Embedder:
    """A vector made of each picture's pixels; counts, takes its time, and fails as it is told."""

    def __init__(self, fail: Any = None, *, takes_s: float = 0) -> None:
        self._takes_s = takes_s
        self.embedded = 0
        self.at_once = self.most_at_once = 0
        self._fail = fail

    async def prepare_images(self, images: Any) -> np.ndarray:
        return np.stack(
            [np.asarray(image.convert("RGB").resize((8, 8)), np.float32) for image in images]
        )

    async def embed(self, tower: Tower, inputs: np.ndarray) -> np.ndarray:
        assert tower is Tower.IMAGE
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self._takes_s)
            if self._fail is not None:
                self._fail(self)
            self.embedded += len(inputs)
            return np.stack([vector(int(rows.sum())) for rows in inputs])
        finally:
            self.at_once -= 1
