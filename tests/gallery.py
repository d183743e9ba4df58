"""A gateway behind a real socket, in front of stand-ins: the photographs of the package, and captions that mean harm."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import uvicorn

from clip_deploy.gateway import GatewaySettings
from clip_deploy.gateway.app import create_app
from clip_deploy.indexes import Hit, IndexIdentity
from tests.gateway_parts import DIM, WEIGHTS, FakeClient, vectors

PHOTOGRAPHS = Path(__file__).parent.parent / "clip_deploy" / "photographs"
CAPTIONS = json.loads((PHOTOGRAPHS / "captions.json").read_text("utf-8"))


class Gallery:
    """An index of the photographs by their stand-in vectors and the words of their captions.

    ``hostile`` captions, ids and sources go to pictures beyond those. ``slow_s`` says how long a text takes.
    """

    def __init__(self, hostile: tuple[str, ...] = ()) -> None:
        self.identity = IndexIdentity(WEIGHTS, DIM, "tiny/random")
        self.slow_s: dict[str, float] = {}
        self.captions = CAPTIONS | {text: text for text in hostile}
        self._files = {name: (PHOTOGRAPHS / name).read_bytes() for name in CAPTIONS}
        self._vectors: dict[str, np.ndarray] = {}

    async def search(self, *, vector=None, text=None, limit=12):
        await asyncio.sleep(self.slow_s.get(text, 0))
        if not self._vectors:
            pixels = await FakeClient().prepare_images(self._files.values())
            self._vectors = dict(zip(self._files, vectors(pixels)))
        cosines = {} if vector is None else {i: float(v @ vector) for i, v in self._vectors.items()}
        words = {
            id: len(set(text.split()) & set(caption.split()))
            for id, caption in (self.captions.items() if text else ())
        }
        by_vector = _ranks(cosines)
        by_text = _ranks({id: count for id, count in words.items() if count})
        hits = [
            Hit(
                id=id,
                score=sum(1 / (60 + ranks[id]) for ranks in (by_vector, by_text) if id in ranks),
                caption=self.captions[id],
                source=id,
                vector_rank=by_vector.get(id),
                text_rank=by_text.get(id),
                cosine=cosines.get(id),
            )
            for id in self.captions
            if id in by_vector or id in by_text
        ]
        return sorted(hits, key=lambda hit: -hit.score)[:limit]

    async def thumbnail(self, id):
        return self._files.get(id if id in CAPTIONS else "cat.jpg") if id in self.captions else None

    async def stats(self):
        return SimpleNamespace(
            items=len(self.captions),
            identity=self.identity,
            bytes=1,
            place="photos.index",
            engine="stand-in",
        )

    async def close(self):
        pass


def _ranks(scores: dict[str, float]) -> dict[str, int]:
    return {id: rank for rank, id in enumerate(sorted(scores, key=lambda id: -scores[id]), 1)}


@contextmanager
def gallery_gateway(client: FakeClient | None = None, index: Gallery | None = None, **settings):
    """The address of a gateway that listens on a free port of this machine."""
    app = create_app(
        GatewaySettings("stand-in:8001", **settings), client=client or FakeClient(), index=index
    )
    with listening(app) as url:
        yield url


@contextmanager
def listening(app):
    """The address of an ASGI application, served by a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
