"""Search by an image or by words."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.requests import Request

from clip_deploy.gateway import bodies
from clip_deploy.gateway.models import (
    DEFAULT_RESULTS,
    MOST_RESULTS,
    Model,
    Result,
    SearchAnswer,
    TextQuery,
)
from clip_deploy.gateway.problems import Problem, documented, misshapen, of_the_index
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.client import Deployment
    from clip_deploy.gateway.pressure import Turn
    from clip_deploy.gateway.service import Service

router = APIRouter(prefix="/api/v1", tags=["search"])

# Room for the longest text with every letter escaped.
_MOST_TEXT_BYTES = 128 * 1024
_ERRORS = documented(401, 404, 408, 413, 422, 500, 502, 503, 504)
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
_ID = {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]}
_WORDS = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": TextQuery.model_json_schema()}},
    }
}


@router.post(
    "/search/image",
    response_model=SearchAnswer,
    summary="Pictures like this one",
    responses=_ERRORS,
    openapi_extra=_FORM,
)
async def search_image(
    request: Request, limit: Annotated[int, Query(ge=1, le=MOST_RESULTS)] = DEFAULT_RESULTS
) -> Response:
    """The pictures of the index that are most like the uploaded one, best first."""
    service: Service = request.app.state.service
    service.index()

    async def work(body: bytes, turn: Turn) -> Response:
        picture = bodies.uploaded(body, request.headers.get("content-type", ""))
        model = await service.deployment()
        vector = await embedded(request, Tower.IMAGE, [picture])
        return await _found(request, model, {"vector": vector[0], "limit": limit})

    return await service.answer(request, work)


@router.post(
    "/search/text",
    response_model=SearchAnswer,
    summary="Pictures of what the words say",
    responses=_ERRORS,
    openapi_extra=_WORDS,
)
async def search_text(request: Request) -> Response:
    """The pictures of the index that fit the words best, by their vectors, their captions, or both."""
    service: Service = request.app.state.service
    service.index()

    async def work(body: bytes, turn: Turn) -> Response:
        try:
            query = TextQuery.model_validate_json(body)
        except ValidationError as error:
            raise misshapen(error.errors()) from None
        model = await service.deployment()
        asked: dict[str, Any] = {"limit": query.limit}
        if query.mode != "vector":
            asked["text"] = query.text
        if query.mode != "text":
            asked["vector"] = (await embedded(request, Tower.TEXT, [query.text]))[0]
        return await _found(request, model, asked)

    return await service.answer(request, work, most_bytes=_MOST_TEXT_BYTES)


@router.get(
    "/images/{id:path}",
    summary="The thumbnail of a result",
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {}}}, **documented(401, 404, 503)},
    openapi_extra=_ID,
)
async def thumbnail(request: Request) -> Response:
    """A small JPEG of a picture in the index."""
    service: Service = request.app.state.service
    id = request.path_params["id"]
    with of_the_index():
        data = await service.index().thumbnail(id)
    if data is None:
        raise Problem("not-found", f"the index has no {id!r}", remedy="search again")
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, max-age=300"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="image/jpeg", headers=headers)


async def embedded(request: Request, tower: Tower, items: list[Any]) -> NDArray[Any]:
    """Vectors of pictures or of texts, with both steps timed."""
    service: Service = request.app.state.service
    exchange = request.state.exchange
    with exchange.stage("prepare"):
        prepare = (
            service.client.prepare_images if tower is Tower.IMAGE else service.client.prepare_texts
        )
        inputs = await prepare(items)
    with exchange.stage("embed"):
        vectors: NDArray[Any] = await service.client.embed(tower, inputs, request_id=exchange.id)
    return vectors


async def _found(request: Request, model: Deployment, asked: dict[str, Any]) -> Response:
    service: Service = request.app.state.service
    exchange = request.state.exchange
    with exchange.stage("search"), of_the_index():
        hits = await service.index().search(**asked)
    answer = SearchAnswer(
        results=[
            Result(
                id=hit.id,
                score=hit.score,
                caption=hit.caption,
                source=hit.source,
                thumbnail=f"/api/v1/images/{quote(hit.id)}",
                cosine=hit.cosine,
                vector_rank=hit.vector_rank,
                text_rank=hit.text_rank,
            )
            for hit in hits
        ],
        model=described(model),
        timings_ms=exchange.timings_ms(),
        request_id=exchange.id,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def described(model: Deployment) -> Model:
    """A deployment as answers name it."""
    return Model(
        name=model.model,
        pretrained=model.pretrained,
        trained=model.trained,
        weights_sha256=model.weights_sha256,
    )
