"""Who may ask: the names this gateway is reached by, the origins of web pages, and bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from clip_deploy.gateway.problems import Problem, response_to

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from clip_deploy.gateway.settings import GatewaySettings

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
GUARDED = ("/api/", "/v1/")


class Guard:
    """Middleware that refuses before anything is read.

    A page elsewhere can neither read this gateway by a name of its own that it points here (``hosts``), nor make a
    browser send requests to it (``origins``).
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._origins = settings.origins
        self._hosts = settings.hosts or ((*_LOOPBACK, settings.host) if settings.is_local else ())
        self._tokens = [_digest(token) for token in settings.tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._against(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        exchange = scope["state"]["exchange"]
        exchange.refused = problem.reason
        await response_to(problem, exchange.id)(scope, receive, send)

    def _against(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if (
            host and self._hosts and name not in self._hosts
        ):  # HTTP/1.0 may have none; no browser does
            return Problem(
                "host", f"the Host is {name!r}", remedy="start the gateway with --allow-host NAME"
            )
        origin = headers.get("origin")
        if origin and origin.partition("://")[2] != host and origin not in self._origins:
            return Problem(
                "origin",
                f"the request comes from a page of {origin}",
                remedy="start the gateway with --allow-origin ORIGIN",
            )
        if self._tokens and scope["path"].startswith(GUARDED) and not self._known(headers):
            return Problem(
                "token",
                "the request carries no token that is known here",
                remedy="send Authorization: Bearer TOKEN",
            )
        return None

    def _known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = _digest(token.strip())
        # All are compared, and digests of one length: the time says nothing about any of them.
        matches = [hmac.compare_digest(sent, known) for known in self._tokens]
        return scheme.lower() == "bearer" and any(matches)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
