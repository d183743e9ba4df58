"""The page at ``/``, and a list of all addresses at ``/docs`` that needs nothing from elsewhere."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.requests import Request
from starlette.staticfiles import StaticFiles

_INDEX = "index.html"


def router(folder: Path) -> APIRouter:
    """Routes of every file of a folder, of its index.html at ``/``, and of ``/docs``."""
    routes = APIRouter(include_in_schema=False)
    routes.add_api_route("/docs", _docs, methods=["GET"], response_class=HTMLResponse)
    names = sorted(path.name for path in folder.glob("*.*")) if folder.is_dir() else []
    if _INDEX not in names:
        routes.add_api_route("/", _to_docs, methods=["GET"], response_class=RedirectResponse)
    if names:
        files = StaticFiles(directory=folder)
        for name in names:
            _add(routes, files, name)
    return routes


def _add(routes: APIRouter, files: StaticFiles, name: str) -> None:
    async def send(request: Request) -> Response:
        response = await files.get_response(name, request.scope)
        response.headers["Cache-Control"] = "no-cache"
        return response

    path = "/" if name == _INDEX else f"/{name}"
    routes.add_api_route(path, send, methods=["GET", "HEAD"], response_class=Response)


async def _to_docs() -> Response:
    return RedirectResponse("/docs")


async def _docs(request: Request) -> Response:
    """Every address with its parameters and answers, written from the OpenAPI description."""
    api = request.app.openapi()
    sections = "".join(
        _section(method, path, operation)
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
    )
    title = html.escape(f"{api['info']['title']} {api['info']['version']}")
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><h1>{title}</h1>'
        f'<p>For programs: <a href="/openapi.json">openapi.json</a></p>{sections}</html>'
    )


def _section(method: str, path: str, operation: dict[str, Any]) -> str:
    body = next(iter(operation.get("requestBody", {}).get("content", {})), "")
    query = ", ".join(row["name"] for row in operation.get("parameters", ()))
    answers = "".join(
        f"<li>{html.escape(str(status))}: {html.escape(answer['description'])}</li>"
        for status, answer in operation["responses"].items()
    )
    facts = "".join(
        f"<li>{name}: {html.escape(value)}</li>"
        for name, value in (("body", body), ("parameters", query))
        if value
    )
    return (
        f"<section><h2><code>{method.upper()} {html.escape(path)}</code></h2>"
        f"<p>{html.escape(operation.get('description', operation['summary']))}</p>"
        f"<ul>{facts}{answers}</ul></section>"
    )
