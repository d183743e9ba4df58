"""Every failure that a caller may meet, as RFC 9457 problem details: what, why, and what to do about it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from clip_deploy import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI
    from starlette.requests import Request

MEDIA_TYPE = "application/problem+json"
_PREFIX = "urn:clip-deploy:"

# Reason → its status and title. The reason ends the problem's ``type`` and labels the metric of refused requests.
REASONS: dict[str, tuple[int, str]] = {
    "bad-request": (400, "This is no request"),
    "token": (401, "A token is needed"),
    "origin": (403, "Pages of this origin may not ask"),
    "not-found": (404, "There is nothing here"),
    "no-index": (404, "This gateway has no index"),
    "unknown-model": (404, "This model is not served"),
    "method": (405, "This address does something else"),
    "slow-upload": (408, "The body took too long"),
    "too-large": (413, "The body is too large"),
    "host": (421, "This gateway is not known by that name"),
    "shape": (422, "The request is not of the expected shape"),
    "input": (422, "The input cannot be embedded"),
    "gone": (499, "The caller has gone"),
    "bug": (500, "The gateway failed"),
    "triton-answer": (502, "Triton gave no usable answer"),
    "busy": (503, "Too many requests wait"),
    "waited": (503, "The request waited too long for its turn"),
    "memory": (503, "Too many bytes are in flight"),
    "triton-busy": (503, "Triton's queue is full"),
    "triton-unavailable": (503, "Triton does not answer"),
    "model-changed": (503, "Triton serves another model now"),
    "not-ready": (503, "The gateway is not ready"),
    "index-damaged": (503, "The index cannot be read"),
    "index-unavailable": (503, "The index does not answer"),
    "triton-timeout": (504, "There was no answer in time"),
}
# Failures of the client, most special first.
_FAILURES: tuple[tuple[type[errors.ClipDeployError], str], ...] = (
    (errors.InputError, "input"),
    (errors.ServerTimeout, "triton-timeout"),
    (errors.ServerBusy, "triton-busy"),
    (errors.ServerUnavailable, "triton-unavailable"),
    (errors.ModelChanged, "model-changed"),
    (errors.ServerError, "triton-answer"),
    (errors.ConfigError, "not-ready"),
    (errors.IndexDamaged, "index-damaged"),
)
_RETRY_AFTER_S = 2


class Problem(Exception):
    """A refusal of one request; ``remedy`` says what its sender can do."""

    def __init__(self, reason: str, detail: str, *, remedy: str, **more: Any) -> None:
        super().__init__(detail)
        self.reason, self.remedy, self.more = reason, remedy, more

    @property
    def status(self) -> int:
        return REASONS[self.reason][0]


class ProblemBody(BaseModel):
    """The body of every error."""

    type: str = Field(examples=[f"{_PREFIX}busy"])
    title: str = Field(examples=[REASONS["busy"][1]])
    status: int = Field(examples=[503])
    detail: str = Field(examples=["128 requests are worked on, and 256 wait"])
    remedy: str = Field(examples=["ask again after the seconds of Retry-After"])
    request_id: str = Field(examples=["4f1d6c0a9b7e4c55"])


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error statuses of a route, for OpenAPI."""
    return {
        status: {
            "description": " · ".join(title for code, title in REASONS.values() if code == status),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}},
        }
        for status in statuses
    }


def problem_of(error: Exception) -> Problem:
    """Any failure as a problem; one that nobody foresaw says nothing of what is inside."""
    if isinstance(error, Problem):
        return error
    for kind, reason in _FAILURES:
        if isinstance(error, kind):
            return Problem(reason, str(error), remedy=error.remedy)
    return Problem(
        "bug", "an unforeseen failure", remedy="report it with the request id; the log has the rest"
    )


@contextmanager
def of_the_index() -> Iterator[None]:
    """Around a call to the index: that *its* server does not answer says nothing about Triton."""
    try:
        yield
    except errors.ServerError as error:
        raise Problem("index-unavailable", str(error), remedy=error.remedy) from error


def response_to(problem: Problem, request_id: str) -> Response:
    """The problem as a response."""
    status, title = REASONS[problem.reason]
    body = {
        "type": _PREFIX + problem.reason,
        "title": title,
        "status": status,
        "detail": str(problem),
        "remedy": problem.remedy,
        "request_id": request_id,
        **problem.more,
    }
    headers = {"Cache-Control": "no-store"}
    if status == 503:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        headers["Connection"] = "close"
    return JSONResponse(body, status, headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Let every failure of the app, and of FastAPI itself, become a problem."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return _of_http(request, error)
        problem = problem_of(
            _of_validation(error) if isinstance(error, RequestValidationError) else error
        )
        if problem.reason == "bug":
            log_bug(f"request {request.state.exchange.id}", error)
        request.state.exchange.refused = problem.reason
        return response_to(problem, request.state.exchange.id)

    for kind in (HTTPException, RequestValidationError, Problem, errors.ClipDeployError):
        app.add_exception_handler(kind, handle)


def log_bug(what: str, error: BaseException) -> None:
    """The traceback of a failure that nobody foresaw, for whoever runs the gateway."""
    logging.getLogger(__name__).error("%s failed", what, exc_info=error)


def _of_http(request: Request, error: HTTPException) -> Response:
    """Starlette's own refusals: no such address, another method, a broken request."""
    known = {
        404: ("not-found", f"{request.url.path} is no address of this gateway", "see /docs"),
        405: ("method", f"{request.method} is not for {request.url.path}", "see /docs"),
    }
    default = ("bad-request", str(error.detail), "see /docs for the requests that are understood")
    reason, detail, remedy = known.get(error.status_code, default)
    request.state.exchange.refused = reason
    response = response_to(Problem(reason, detail, remedy=remedy), request.state.exchange.id)
    response.headers.update(error.headers or {})
    return response


def _of_validation(error: RequestValidationError) -> Problem:
    return misshapen(error.errors())


def misshapen(found: Any) -> Problem:
    """What pydantic has against a request: the places and the reasons, never the values."""
    faults = [
        {"field": ".".join(str(part) for part in row["loc"]), "message": row["msg"]}
        for row in found[:20]
    ]
    first = faults[0]
    return Problem(
        "shape",
        f"{first['field'] or 'the body'}: {first['message']}",
        remedy="see /docs for the shape of this request",
        errors=faults,
    )
