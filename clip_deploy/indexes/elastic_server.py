"""A server of Elasticsearch: its address, its key, and its failures in words."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from elastic_transport import (
    ConnectionError as NoConnection,
)
from elastic_transport import (
    ConnectionTimeout,
    SerializationError,
    TlsError,
    TransportError,
)
from elastic_transport.client_utils import DEFAULT
from elasticsearch import ApiError, AsyncElasticsearch, UnsupportedProductError
from elasticsearch.helpers import ScanError

from clip_deploy.errors import (
    ConfigError,
    ServerBusy,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

API_KEY = "CLIP_DEPLOY_ES_API_KEY"
CA_FILE = "CLIP_DEPLOY_ES_CA_FILE"
_TIMEOUT_S = 10.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True)
class ElasticServer:
    """A client and the name of the one index that it is used for."""

    place: str
    name: str
    client: AsyncElasticsearch

    @classmethod
    def at(cls, place: str) -> ElasticServer:
        """The server and the index of ``https://host:9200/NAME``; nothing is asked yet.

        The API key is taken from the environment (``API_KEY``), and so is the file of certificates that vouch for the
        server where those of the system do not (``CA_FILE``).

        Raises:
            ConfigError: the address is none, or would show the key to the network.
        """
        url, name = _address(place)
        key, authority = os.environ.get(API_KEY), os.environ.get(CA_FILE)
        if key and url.scheme == "http" and not _is_loopback(url.hostname or ""):
            raise ConfigError(
                f"{API_KEY} would travel to {url.hostname} for everybody to read",
                remedy="use https://, or unset it",
            )
        if authority and not os.path.isfile(authority):  # noqa: PTH113
            raise ConfigError(f"{CA_FILE} names no file: {authority}", remedy="correct or unset it")
        path = url.path.rpartition("/")[0]
        client = AsyncElasticsearch(
            f"{url.scheme}://{url.netloc}{path}",
            api_key=key or None,
            ca_certs=authority if authority and url.scheme == "https" else DEFAULT,
            request_timeout=_TIMEOUT_S,
            max_retries=2,
        )
        return cls(place, name, client)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """The client's failures in words."""
        try:
            yield
        except (ApiError, TransportError, ScanError) as error:
            raise self._failure(error) from error
        except (KeyError, TypeError) as error:
            raise ServerError(
                f"{self.place} answered in a way that Elasticsearch 8 does not: {error!r}",
                remedy="check what listens at that address",
            ) from error

    def _failure(self, error: ApiError | TransportError | ScanError) -> ServerError | ConfigError:
        status = error.status_code if isinstance(error, ApiError) else None
        if isinstance(error, UnsupportedProductError):
            return ConfigError(
                f"what answers at {self.place} is not Elasticsearch",
                remedy="check the address; compatible servers of other makers are not supported",
            )
        if status in (401, 403):
            return ConfigError(
                f"{self.place} refuses the access: {_reason(error)}",
                remedy=f"set {API_KEY} to a key that may read and write the index",
            )
        if status == 404:
            return ConfigError(
                f"there is no index {self.place}", remedy="make one: clip-deploy index add"
            )
        if status == 429:
            return ServerBusy(f"{self.place} is busy: {_reason(error)}", remedy="try again later")
        if isinstance(error, ConnectionTimeout):
            return ServerTimeout(
                f"no answer from {self.place} in time",
                remedy="see whether the server is overloaded",
            )
        if isinstance(error, TlsError):
            return ServerUnavailable(
                f"the certificate of {self.place} is not trusted: {error.message}",
                remedy=f"set {CA_FILE} to the file of the authority that issued it (http_ca.crt)",
            )
        if isinstance(error, NoConnection):
            return ServerUnavailable(
                f"no server answers at {self.place}: {error.message}",
                remedy="start Elasticsearch, or check the address",
            )
        what = "an answer that cannot be read" if isinstance(error, SerializationError) else ""
        return ServerError(f"{self.place}: {what or _reason(error)}", remedy="see the server's log")


def _reason(error: Exception) -> str:
    body = getattr(error, "body", None)
    found = body.get("error") if isinstance(body, dict) else None
    if isinstance(found, dict):
        return str(found.get("reason") or found.get("type") or found)
    return str(found or error)


def _address(place: str) -> tuple[SplitResult, str]:
    remedy = "write https://host:9200/NAME, the name in small letters, digits, and . _ -"
    try:
        url = urlsplit(place)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{place!r} is no address: {error}", remedy=remedy) from error
    if url.username or url.password:
        raise ConfigError(
            "a name and a password do not belong into an address, which is shown and logged",
            remedy=f"leave them out, and set {API_KEY}",
        )
    name = url.path.rpartition("/")[2]
    if not (url.hostname and port and _NAME.fullmatch(name)) or url.query or url.fragment:
        raise ConfigError(f"{place!r} names no server and index", remedy=remedy)
    return url, name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
