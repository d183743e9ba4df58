"""The web application, put together."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from clip_deploy import __version__
from clip_deploy.errors import ClipDeployError
from clip_deploy.gateway import embeddings, health, pages, problems, search
from clip_deploy.gateway.guard import GUARDED, Guard
from clip_deploy.gateway.journal import Journal
from clip_deploy.gateway.metrics import Metrics
from clip_deploy.gateway.pressure import Gate
from clip_deploy.gateway.service import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from clip_deploy.client import AsyncTritonInferenceClient
    from clip_deploy.gateway.settings import GatewaySettings
    from clip_deploy.indexes import Index


def create_app(
    settings: GatewaySettings,
    *,
    client: AsyncTritonInferenceClient | None = None,
    index: Index | None = None,
    log: TextIO | None = None,
) -> FastAPI:
    """The gateway as an ASGI application.

    While it starts it opens one client, and the index if there is one, and closes both when it ends; those it is
    given stay open. A start that fails for a reason that a user can act on leaves it in ``app.state.failure``.

    Args:
        settings: what it is told.
        client: instead of one for ``settings.triton``.
        index: instead of the one at ``settings.index``.
        log: gets one line of JSON per request.
    """
    gate = Gate(settings)
    metrics = Metrics(gate)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with opened(settings, gate, client, index) as service:
                app.state.service = service
                metrics.ready.set_function(lambda: service.was_ready)
                yield
        except ClipDeployError as error:
            app.state.failure = error
            raise

    app = FastAPI(
        title="clip-deploy gateway",
        version=__version__,
        description="Search by images and words; embeddings of both.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.failure = None
    app.state.metrics = metrics
    for router in (search.router, embeddings.router, health.router, pages.router(settings.page)):
        app.include_router(router)
    app.openapi = partial(_described, app, bool(settings.tokens))  # type: ignore[method-assign]
    problems.install(app)
    # From the inside out.
    app.add_middleware(Guard, settings=settings)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    app.add_middleware(Journal, metrics=metrics, log=log)
    return app


def _described(app: FastAPI, guarded: bool) -> dict[str, Any]:
    """The OpenAPI description, with the shape of problems, and with the token where one is needed."""
    if app.openapi_schema is None:
        components = FastAPI.openapi(app)["components"]
        components["schemas"]["ProblemBody"] = problems.ProblemBody.model_json_schema()
        if guarded:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, operations in FastAPI.openapi(app)["paths"].items():
                for operation in operations.values() if path.startswith(GUARDED) else ():
                    operation["security"] = [{"token": []}]
    assert app.openapi_schema is not None  # made above
    return app.openapi_schema
