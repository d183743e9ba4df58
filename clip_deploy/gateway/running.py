"""The gateway as a process: its socket, its HTTP server, and its end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from typing import TYPE_CHECKING, TextIO

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from clip_deploy.errors import ConfigError
from clip_deploy.gateway.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from clip_deploy.gateway.settings import GatewaySettings

_KEEP_ALIVE_S = 30
_MOST_HEADER_BYTES = 32 * 1024


def run(settings: GatewaySettings, log: TextIO | None, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are finished first.

    Args:
        settings: the gateway's.
        log: gets one line of JSON per request.
        announce: is told the address once requests are answered.

    Raises:
        ClipDeployError: the address is taken, the index does not open, or it is of another model.
    """
    app = create_app(settings, log=log)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        http=_protocol(settings.head_timeout_s),
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.timeout_s + settings.max_wait_s),
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with _listening(settings) as listener:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        try:
            _Server(config, lambda: announce(url)).run(sockets=[listener])
        except SystemExit:  # how uvicorn says that the app did not start
            if app.state.failure is None:
                raise
        if app.state.failure is not None:
            raise app.state.failure


def _protocol(timeout_s: float) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, which hangs up on a connection that begins a request and does not come to its body.

    What still arrives of a body that was refused begins no request either: it is thrown away for as long.
    """

    class BoundedHeads(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._timer = self.loop.call_later(timeout_s, self._hang_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(timeout_s, self._hang_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _hang_up(self) -> None:
            self._timer = None
            self.transport.close()

    return BoundedHeads


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is up, and whose end by a signal is an ordinary one."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce
        # What fails before the start is said once, in two lines, by whoever started it.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends it in peace, the second at once; neither is raised again afterwards."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _listening(settings: GatewaySettings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}",
            remedy="choose another --port (0 picks a free one), or end what uses it",
        ) from error
