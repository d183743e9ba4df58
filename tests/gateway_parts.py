"""Stand-ins for Triton's client and for an index, and a gateway around them without a socket."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from types import SimpleNamespace

import httpx
import numpy as np
from fastapi import FastAPI
from PIL import Image

from clip_deploy.errors import InputError
from clip_deploy.gateway import GatewaySettings, create_app
from clip_deploy.indexes import IndexIdentity
from clip_deploy.inputs.images import load
from clip_deploy.inputs.texts import MAX_CHARACTERS
from clip_deploy.spec import TensorSpec, Tower

WEIGHTS = "a" * 64
DIM = 16


def jpeg(seed: int = 0, size: tuple[int, int] = (32, 24)) -> bytes:
    colour = tuple(np.random.default_rng(seed).integers(0, 256, 3).tolist())
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG")
    return file.getvalue()


def deployment(weights: str = WEIGHTS) -> SimpleNamespace:
    return SimpleNamespace(
        model="tiny",
        pretrained="random",
        weights_sha256=weights,
        embed_dim=DIM,
        towers=tuple(Tower),
        trained=False,
    )


class FakeClient:
    """Vectors made of the inputs; fails, waits or changes its model when told."""

    def __init__(self) -> None:
        self.serves = deployment()
        self.failure: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.looks = 0
        self.embedding = 0
        self.cancelled = 0
        self.request_ids: list[str] = []
        self.closed = False

    async def deployment(self):
        self.looks += 1
        if self.failure:
            raise self.failure
        return self.serves

    async def model(self, tower: Tower):
        tensor = TensorSpec("pixel_values", "FP32", (3, 4, 4))
        contract = SimpleNamespace(tokens=SimpleNamespace(pad_id=0), input=tensor)
        return SimpleNamespace(contract=contract)

    async def prepare_images(self, images):
        rows = [np.asarray(load(image).convert("RGB").resize((4, 4))) for image in images]
        return np.stack(rows).reshape(len(rows), -1).astype(np.float32)

    async def prepare_texts(self, texts):
        for text in texts:
            if len(text) > MAX_CHARACTERS:
                raise InputError("a text is too long", remedy="cut it")
        rows = np.zeros((len(texts), 8), np.int32)
        for row, text in zip(rows, texts):
            words = text.split()[:8]
            row[: len(words)] = [1 + sum(map(ord, word)) for word in words]
        return rows

    async def embed(self, tower: Tower, inputs, *, request_id="", timeout_s=None):
        self.request_ids.append(request_id)
        self.embedding += 1
        try:
            if self.hold:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.embedding -= 1
        if self.failure:
            raise self.failure
        return vectors(inputs)

    async def close(self):
        self.closed = True


def vectors(inputs) -> np.ndarray:
    seeds = [int(np.abs(row.astype(np.float64)).sum() * 100) for row in inputs]
    made = np.stack([np.random.default_rng(s).standard_normal(DIM) for s in seeds])
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


class FakeIndex:
    """Three pictures, found by any query; remembers what it was asked."""

    def __init__(self, weights: str = WEIGHTS) -> None:
        self.identity = IndexIdentity(weights, DIM, "tiny/random")
        self.asked: list[dict] = []
        self.failure: Exception | None = None
        self.closed = False

    async def search(self, *, vector=None, text=None, limit=12):
        if self.failure:
            raise self.failure
        self.asked.append({"vector": vector, "text": text, "limit": limit})
        return [
            SimpleNamespace(
                id=f"a folder/{i}.jpg",
                score=1 / (60 + i),
                caption=f"picture {i}",
                source=f"a folder/{i}.jpg",
                vector_rank=i if vector is not None else None,
                text_rank=i if text is not None else None,
                cosine=0.5 if vector is not None else None,
            )
            for i in range(1, 4)
        ][:limit]

    async def thumbnail(self, id):
        if self.failure:
            raise self.failure
        return jpeg(1) if id == "a folder/1.jpg" else None

    async def stats(self):
        if self.failure:
            raise self.failure
        return SimpleNamespace(
            items=3, identity=self.identity, bytes=1, place="photos.index", engine="stand-in"
        )

    async def close(self):
        self.closed = True


class Gateway:
    """A gateway without a socket, asked from a test that is no coroutine."""

    def __init__(self, app: FastAPI) -> None:
        self.app, self.log = app, io.StringIO()
        self._loop = asyncio.new_event_loop()
        self._lifespan = app.router.lifespan_context(app)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        )

    def __enter__(self) -> Gateway:
        try:
            self.run(self._lifespan.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self.http.aclose())
        self.run(asyncio.wait_for(self._lifespan.__aexit__(None, None, None), 20))
        self._loop.close()

    def run(self, work):
        return self._loop.run_until_complete(work)

    def get(self, path: str, **options) -> httpx.Response:
        return self.run(self.http.get(path, **options))

    def post(self, path: str, **options) -> httpx.Response:
        return self.run(self.http.post(path, **options))

    def lines(self) -> list[dict]:
        """The access log."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


def gateway(
    client: FakeClient | None = None, index: FakeIndex | None = None, **settings
) -> Gateway:
    """A gateway around the stand-ins."""
    log = io.StringIO()
    settings = GatewaySettings("stand-in:8001", **settings)
    made = Gateway(create_app(settings, client=client or FakeClient(), index=index, log=log))
    made.log = log
    return made


def image_form(data: bytes | None = None) -> dict:
    return {"files": {"file": ("cat.jpg", jpeg() if data is None else data, "image/jpeg")}}


def data_uri(data: bytes, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
