"""What a gateway is told: where Triton and the index are, who may ask, and how much at once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from clip_deploy.errors import ConfigError

_PAGE = Path(__file__).parent / "page"
_SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All of a gateway's settings.

    Args:
        triton: ``host:port`` of Triton's gRPC endpoint.
        index: a folder or an Elasticsearch address; None serves embeddings only.
        tokens: who sends none of these gets 401; empty lets everybody in.
        origins: other web sites whose pages may ask, as ``https://shop.example``.
        hosts: names that this gateway is reached by; empty allows loopback's own on loopback, and any elsewhere.
        names: what ``/v1/embeddings`` calls the model, besides the name of its architecture.
        decode: ``exact``, or ``fast`` for large JPEG files.
        timeout_s: the deadline of each call to Triton.
        max_in_flight: requests whose body is read and that are worked on at once; fewer while Triton is late.
        max_waiting: requests that may wait for their turn, unread; further ones are refused at once.
        max_wait_s: how long they may wait.
        max_upload_bytes: the largest body.
        max_buffered_bytes: all bodies and prepared images in memory together.
        head_timeout_s: how long the head of a request may take to arrive.
        upload_timeout_s: how long a body may take to arrive.
        max_inputs: how many texts and images one request to ``/v1/embeddings`` may carry.
        page: the folder of the page at ``/``.
    """

    triton: str
    index: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    tokens: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    decode: str = "exact"
    timeout_s: float = 30.0
    max_in_flight: int = 128
    max_waiting: int = 256
    max_wait_s: float = 2.0
    max_upload_bytes: int = 20 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    head_timeout_s: float = 10.0
    upload_timeout_s: float = 30.0
    max_inputs: int = 256
    page: Path = _PAGE

    def __post_init__(self) -> None:
        least = {
            "max_in_flight": 1,
            "max_waiting": 0,
            "max_wait_s": 0,
            "max_upload_bytes": 1024,
            "max_inputs": 1,
            "timeout_s": 0.001,
            "head_timeout_s": 0.001,
            "upload_timeout_s": 0.001,
        }
        for name, value in least.items():
            if not getattr(self, name) >= value:  # NaN fails too
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", remedy=f"use at least {value:g}"
                )
        if self.max_buffered_bytes < self.max_upload_bytes:
            raise ConfigError(
                "the bodies in memory may be smaller together than one alone",
                remedy="raise max_buffered_bytes, or lower max_upload_bytes",
            )
        for token in self.tokens:
            if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
                raise ConfigError(
                    "a token is shorter than 16 characters, or has some that no header carries",
                    remedy="make one: python3 -c 'import secrets; print(secrets.token_urlsafe())'",
                )
        for origin in self.origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise ConfigError(
                    f"{origin!r} is no origin",
                    remedy="write scheme and host, as https://shop.example",
                )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
