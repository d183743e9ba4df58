"""One record per request: its id, how long each stage took, how it ended; written as a line and counted."""

from __future__ import annotations

import json
import re
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO

from starlette.requests import ClientDisconnect

from clip_deploy.gateway.problems import REASONS, log_bug, problem_of, response_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from clip_deploy.gateway.metrics import Metrics

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
UNMATCHED = "unmatched"
# Sent with every response. The page needs its own files and pictures, and nothing else.
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' blob: data:; base-uri 'none'; form-action 'self'; "
        b"frame-ancestors 'none'; object-src 'none'",
    ),
)


@dataclass(slots=True)
class Exchange:
    """A request on its way: filled by whoever handles it."""

    id: str
    began_s: float = field(default_factory=time.perf_counter)
    stages_ms: dict[str, float] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    refused: str = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a part of the work; parts of one name add up."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            spent_ms = (time.perf_counter() - began_s) * 1000
            self.stages_ms[name] = round(self.stages_ms.get(name, 0) + spent_ms, 2)

    def elapsed_ms(self) -> float:
        return round((time.perf_counter() - self.began_s) * 1000, 2)

    def timings_ms(self) -> dict[str, float]:
        return {**self.stages_ms, "total": self.elapsed_ms()}


class Journal:
    """Middleware around everything: gives each request its id, and keeps what became of it.

    Args:
        app: what it surrounds.
        metrics: is told of every request.
        log: gets one line of JSON for each; None writes none.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log: TextIO | None) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(_request_id(scope))
        scope.setdefault("state", {})["exchange"] = exchange

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = [*message.get("headers", ()), *_HEADERS]
                message["headers"] = [*headers, (b"x-request-id", exchange.id.encode())]
            else:
                exchange.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, count)
        except ClientDisconnect:
            exchange.refused = "gone"
        except Exception as error:
            log_bug(f"request {exchange.id}", error)
            exchange.refused = "bug"
            if not exchange.status:
                await response_to(problem_of(error), exchange.id)(scope, receive, count)
        finally:
            self._close(scope, exchange)

    def _close(self, scope: Scope, exchange: Exchange) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        self._metrics.observe(route, scope["method"], exchange)
        if self._log is not None:
            self._log.write(json.dumps(_line(route, scope["method"], exchange)) + "\n")
            self._log.flush()


def _line(route: str, method: str, exchange: Exchange) -> dict[str, Any]:
    row: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "request_id": exchange.id,
        "method": method,
        "route": route,
        "status": exchange.status or REASONS["gone"][0],
        "ms": exchange.elapsed_ms(),
        "stages_ms": exchange.stages_ms,
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
    }
    return row | ({"refused": exchange.refused} if exchange.refused else {})


def _request_id(scope: Scope) -> str:
    """The caller's own, if it can be written to a log as it is."""
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return sent.decode() if _SANE_ID.fullmatch(sent) else uuid.uuid4().hex
