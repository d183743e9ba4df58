"""The API of a shop, with a light endpoint beside the image search, in the old design and in the new one.

    python benchmarks/shop.py old MODEL PORT          the web process holds the model
    python benchmarks/shop.py new HOST:PORT PORT      the web process asks Triton

``GET /api/v1/products`` → a page of products; ``POST /search`` with a picture as body → its embedding.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request


@contextlib.asynccontextmanager
async def _old(app: FastAPI) -> AsyncIterator[None]:
    import open_clip
    import torch
    from PIL import Image

    model, _, preprocess = open_clip.create_model_and_transforms(sys.argv[2])
    model.eval()

    async def embedding(data: bytes) -> list[float]:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        with torch.inference_mode():
            vector = model.encode_image(preprocess(picture).unsqueeze(0))
        return torch.nn.functional.normalize(vector, dim=-1)[0].tolist()

    app.state.embedding = embedding
    yield


@contextlib.asynccontextmanager
async def _new(app: FastAPI) -> AsyncIterator[None]:
    from clip_deploy.client import AsyncTritonInferenceClient

    async with AsyncTritonInferenceClient(sys.argv[2]) as client:
        app.state.embedding = client.request_embedding
        yield


app = FastAPI(lifespan=_old if sys.argv[1] == "old" else _new)


@app.get("/api/v1/products")
async def products() -> list[dict[str, object]]:
    return [
        {"id": number, "name": f"product {number}", "price": number * 1.5} for number in range(50)
    ]


@app.post("/search")
async def search(request: Request) -> list[float]:
    vector: list[float] = await app.state.embedding(await request.body())
    return vector


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), log_level="error")
