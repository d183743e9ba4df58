"""Vectors of texts and images, in the shape of OpenAI's embeddings API, which NV-CLIP's callers speak, too."""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.requests import Request

from clip_deploy.errors import InputError
from clip_deploy.gateway.models import EmbeddingAnswer, EmbeddingQuery, ModelCard, ModelCards
from clip_deploy.gateway.problems import Problem, documented, misshapen
from clip_deploy.spec import DTYPES, Tower

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from numpy.typing import NDArray

    from clip_deploy.client import Deployment
    from clip_deploy.gateway.pressure import Turn
    from clip_deploy.gateway.service import Service

router = APIRouter(prefix="/v1", tags=["embeddings"])

_IMAGE = re.compile(r"data:image/[\w.+-]+;base64,")
# What looks like a way to name an image that is not this one would else be embedded as words, and nobody would notice.
_OTHER_REFERENCE = re.compile(
    r"\s*(<img\s|data:[\w.+-]*/?[\w.+-]*[;,]|https?://\S+\s*$)", re.IGNORECASE
)
# A body of more bytes than this takes a millisecond to parse, and is parsed in a thread: the loop has others to serve.
_LONG_BYTES = 512 * 1024
_IMAGES_AT_ONCE = 32
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": EmbeddingQuery.model_json_schema()}},
    }
}


@router.post(
    "/embeddings",
    response_model=EmbeddingAnswer,
    summary="Vectors of texts and images",
    responses=documented(401, 404, 408, 413, 422, 500, 502, 503, 504),
    openapi_extra=_BODY,
)
async def embed(request: Request) -> Response:
    """One vector of unit length for each text or image, in their order. `num_images` in `usage` is NV-CLIP's."""
    service: Service = request.app.state.service

    async def work(body: bytes, turn: Turn) -> Response:
        parse = _Parse(service.settings.max_inputs)
        if len(body) > _LONG_BYTES:
            query, items = await asyncio.to_thread(parse, body)
        else:
            query, items = parse(body)
        model = await service.deployment()
        name = _name(query, model, service.settings.names)
        work = _Work(request, turn, items)
        vectors = np.empty((len(items), model.embed_dim), np.float32)
        await _together(*work.parts(vectors))
        return Response(_written(vectors, query, name, work.usage()), media_type="application/json")

    return await service.answer(request, work)


@router.get(
    "/models",
    summary="The model's names",
    response_model=ModelCards,
    responses=documented(401, 503, 504),
)
async def models(request: Request) -> ModelCards:
    """The names that `/v1/embeddings` knows the model by."""
    service: Service = request.app.state.service
    model = await service.deployment()
    return ModelCards(data=[ModelCard(id=name) for name in (model.model, *service.settings.names)])


class _Parse:
    """The body of a request → what it asks, and the texts (str) and images (bytes) in it."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, body: bytes) -> tuple[EmbeddingQuery, list[str | bytes]]:
        try:
            query = EmbeddingQuery.model_validate_json(body)
        except ValidationError as error:
            raise misshapen(error.errors()) from None
        inputs = [query.input] if isinstance(query.input, str) else query.input
        if not 1 <= len(inputs) <= self._most:
            raise Problem(
                "shape",
                f"input: {len(inputs)} texts and images",
                remedy=f"send 1 to {self._most} at once",
            )
        return query, [_item(text, i) for i, text in enumerate(inputs)]


def _item(text: str, i: int) -> str | bytes:
    found = _IMAGE.match(text)
    if found:
        try:
            return base64.b64decode(text[found.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise Problem(
                "shape", f"input.{i}: its base64 is damaged: {error}", remedy="encode it again"
            ) from None
    if not text.strip():
        raise Problem("shape", f"input.{i}: an empty text", remedy="leave it out")
    if _OTHER_REFERENCE.match(text):
        raise Problem(
            "shape",
            f"input.{i}: refers to something that is not fetched or read",
            remedy="send an image as data:image/jpeg;base64,…, or a text that is not an address alone",
        )
    return text


def _name(query: EmbeddingQuery, model: Deployment, names: tuple[str, ...]) -> str:
    known = (model.model, *names)
    if query.model is not None and query.model not in known:
        raise Problem(
            "unknown-model",
            f"{query.model!r} is not served here",
            remedy=f"ask for {' or '.join(known)}, or start the gateway with --model-name",
        )
    if query.dimensions not in (None, model.embed_dim):
        raise Problem(
            "shape",
            f"dimensions: {query.dimensions}",
            remedy=f"leave it out: this model's vectors have {model.embed_dim} values",
        )
    return query.model or model.model


class _Work:
    """The texts and images of one request, on their way to vectors.

    Images are taken a few at a time: a request of hundreds neither fills the memory with pixels nor keeps the others
    from being prepared.
    """

    def __init__(self, request: Request, turn: Turn, items: list[str | bytes]) -> None:
        self._exchange, self._turn = request.state.exchange, turn
        self._client = request.app.state.service.client
        self._images = [(i, item) for i, item in enumerate(items) if isinstance(item, bytes)]
        self._texts = [(i, item) for i, item in enumerate(items) if isinstance(item, str)]
        self._alone = len(items) == 1
        self._tokens = 0

    def usage(self) -> dict[str, int]:
        tokens = self._tokens
        return {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "num_images": len(self._images),
        }

    def parts(self, vectors: NDArray[np.float32]) -> list[Coroutine[Any, Any, None]]:
        """What is to be done: each part fills in the rows of its items."""
        parts = ((self._images, self._embed_images), (self._texts, self._embed_texts))
        return [embed(vectors) for items, embed in parts if items]

    async def _embed_images(self, vectors: NDArray[np.float32]) -> None:
        tensor = (await self._client.model(Tower.IMAGE)).contract.input
        row_bytes = math.prod(tensor.shape) * np.dtype(DTYPES[tensor.dtype]).itemsize
        for start in range(0, len(self._images), _IMAGES_AT_ONCE):
            some = self._images[start : start + _IMAGES_AT_ONCE]
            # Each is prepared by itself, and then put beside the others.
            with self._turn.holding(2 * row_bytes * len(some)):
                with self._exchange.stage("prepare"):
                    rows = await _together(*(self._prepared(i, image) for i, image in some))
                    pixels = rows[0] if len(rows) == 1 else np.concatenate(rows)
                vectors[[i for i, _ in some]] = await self._embed(Tower.IMAGE, pixels)

    async def _embed_texts(self, vectors: NDArray[np.float32]) -> None:
        with self._exchange.stage("prepare"):
            ids = await self._client.prepare_texts([text for _, text in self._texts])
        tokens = (await self._client.model(Tower.TEXT)).contract.tokens
        self._tokens = int((ids != tokens.pad_id).sum())
        vectors[[i for i, _ in self._texts]] = await self._embed(Tower.TEXT, ids)

    async def _prepared(self, i: int, image: bytes) -> Any:
        try:
            return await self._client.prepare_images([image])
        except InputError as error:
            if self._alone:
                raise
            raise InputError(f"input.{i}: {error}", remedy=error.remedy) from error

    async def _embed(self, tower: Tower, inputs: NDArray[Any]) -> Any:
        with self._exchange.stage("embed"):
            return await self._client.embed(tower, inputs, request_id=self._exchange.id)


async def _together(*works: Any) -> list[Any]:
    """The results of all; the first failure ends the others."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _written(
    vectors: NDArray[np.float32], query: EmbeddingQuery, name: str, usage: dict[str, int]
) -> bytes:
    if query.encoding_format == "base64":
        little = np.ascontiguousarray(vectors, "<f4")
        values: list[Any] = [base64.b64encode(row).decode() for row in little]
    else:
        values = vectors.tolist()
    return to_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": value}
                for i, value in enumerate(values)
            ],
            "model": name,
            "usage": usage,
        }
    )
