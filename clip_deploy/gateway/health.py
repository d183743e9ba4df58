"""Whether it lives, whether it is ready, what it is made of, and what it counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request

from clip_deploy import __version__
from clip_deploy.gateway.models import IndexStatus, Ready, Status
from clip_deploy.gateway.problems import documented, of_the_index
from clip_deploy.gateway.search import described

if TYPE_CHECKING:
    from clip_deploy.gateway.service import Service

router = APIRouter(tags=["health"])


@router.get("/livez", summary="Whether it lives", response_class=Response)
async def livez() -> Response:
    """200 as long as the gateway handles requests at all."""
    return Response("ok", media_type="text/plain")


@router.get(
    "/readyz",
    summary="Whether it is ready",
    response_model=Ready,
    responses={503: {"model": Ready, "description": "It is not, for this reason"}},
)
async def readyz(request: Request) -> Response:
    """200 when Triton serves both towers of one export, and the index, if there is one, is of the same model."""
    found = await request.app.state.service.readiness()
    body = Ready(
        ready=found.ready,
        reason=str(found.problem) if found.problem else None,
        model=described(found.deployment) if found.deployment else None,
    )
    return JSONResponse(
        body.model_dump(), 200 if found.ready else 503, {"Cache-Control": "no-store"}
    )


@router.get(
    "/api/v1/status",
    summary="What it is made of",
    response_model=Status,
    responses=documented(401, 503),
)
async def status(request: Request) -> Status:
    """The model, the index and the version."""
    service: Service = request.app.state.service
    found = await service.readiness()
    index = None
    if service.has_index:
        with of_the_index():
            stats = await service.index().stats()
        index = IndexStatus(items=stats.items, place=stats.place, engine=stats.engine)
    return Status(
        ready=found.ready,
        reason=str(found.problem) if found.problem else None,
        index=index,
        model=described(found.deployment) if found.deployment else None,
        version=__version__,
    )


@router.get("/metrics", summary="What it counted", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters and histograms, for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
