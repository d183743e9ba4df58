"""Vectors of texts and images, in the shape of OpenAI's embeddings API, which NV-CLIP's callers speak, too."""

from __future__ import annotations

import asyncio
import base64
import binascii
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
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.client import Deployment
    from clip_deploy.gateway.service import Service

router = APIRouter(prefix="/v1", tags=["embeddings"])

_IMAGE = re.compile(r"data:image/[\w.+-]+;base64,")
# What looks like a way to name an image that is not this one would else be embedded as words, and nobody would notice.
_OTHER_REFERENCE = re.compile(
    r"\s*(<img\s|data:[\w.+-]*/?[\w.+-]*[;,]|https?://\S+\s*$)", re.IGNORECASE
)
# A body of more bytes than this is parsed in a thread: the loop has others to serve.
_LONG_BYTES = 64 * 1024
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

    async def work(body: bytes) -> Response:
        parse = _Parse(service.settings.max_inputs)
        if len(body) > _LONG_BYTES:
            query, items = await asyncio.to_thread(parse, body)
        else:
            query, items = parse(body)
        model = await service.deployment()
        name = _name(query, model, service.settings.names)
        vectors, tokens = await _embedded(request, items, service, model.embed_dim)
        images = sum(isinstance(item, bytes) for item in items)
        return Response(
            _written(vectors, query, name, tokens, images), media_type="application/json"
        )

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


async def _embedded(
    request: Request, items: list[str | bytes], service: Service, embed_dim: int
) -> tuple[NDArray[np.float32], int]:
    """Vectors in the order of the items, and how many tokens the texts have."""
    exchange, client = request.state.exchange, service.client
    rows = {
        Tower.IMAGE: [i for i, item in enumerate(items) if isinstance(item, bytes)],
        Tower.TEXT: [i for i, item in enumerate(items) if isinstance(item, str)],
    }
    inputs: dict[Tower, NDArray[Any]] = {}
    tokens = 0
    with exchange.stage("prepare"):
        if rows[Tower.IMAGE]:
            inputs[Tower.IMAGE] = await _pixels(service, items, rows[Tower.IMAGE])
        if rows[Tower.TEXT]:
            texts = [item for item in items if isinstance(item, str)]
            ids = await client.prepare_texts(texts)
            contract = (await client.model(Tower.TEXT)).contract
            assert contract.tokens is not None  # a text encoder's contract has it
            tokens = int((ids != contract.tokens.pad_id).sum())
            inputs[Tower.TEXT] = ids
    with exchange.stage("embed"):
        answers = await _together(
            *(client.embed(tower, rows, request_id=exchange.id) for tower, rows in inputs.items())
        )
    if len(answers) == 1:
        return answers[0], tokens
    vectors = np.empty((len(items), embed_dim), np.float32)
    for tower, answer in zip(inputs, answers):
        vectors[rows[tower]] = answer
    return vectors, tokens


async def _pixels(service: Service, items: list[Any], rows: list[int]) -> NDArray[Any]:
    """Each image prepared by itself, so that a bad one has its number."""
    if len(items) == 1:
        pixels: NDArray[Any] = await service.client.prepare_images(items)
        return pixels

    async def prepare(i: int) -> Any:
        try:
            return await service.client.prepare_images([items[i]])
        except InputError as error:
            raise InputError(f"input.{i}: {error}", remedy=error.remedy) from error

    return np.concatenate(await _together(*(prepare(i) for i in rows)))


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
    vectors: NDArray[np.float32], query: EmbeddingQuery, name: str, tokens: int, images: int
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
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "num_images": images},
        }
    )
