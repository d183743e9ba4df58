"""Object storage as a destination: S3, Google Cloud Storage and Azure through fsspec, whose only home this is.

Addresses are those that tritonserver's ``--model-repository`` takes. Credentials come from where each library looks for
them: the environment, its own files, the machine's role. Nothing of them is read or kept here.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError, MissingDependency, PublishError, extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from clip_deploy.publishing.stores import Moved

_BLOCK_BYTES = 16 * 2**20
_CLOCK_S = 1.1


@dataclass(frozen=True, slots=True)
class Service:
    """A kind of object storage: fsspec's name of it, the package that speaks to it, and how Triton writes its address.

    ``pattern`` names the groups ``root``, the bucket and the path in it, and what goes to the library by ``options``.
    """

    name: str
    protocol: str
    package: str
    pattern: str
    example: str
    options: Callable[[dict[str, str]], dict[str, Any]] = field(default=lambda found: {})


def _endpoint(found: dict[str, str]) -> dict[str, Any]:
    return {"endpoint_url": found["endpoint"]} if found["endpoint"] else {}


def _account(found: dict[str, str]) -> dict[str, Any]:
    return {"account_name": found["account"].partition(".")[0]}


_ROOT = r"(?P<root>[^/?#@:]+(?:/[^?#]*)?)"
SERVICES: dict[str, Service] = {
    "s3": Service(
        *("S3", "s3", "s3fs"),
        rf"(?:(?P<endpoint>https?://[^/@]+)/)?{_ROOT}",
        "s3://BUCKET/PATH, or s3://https://HOST:PORT/BUCKET/PATH",
        _endpoint,
    ),
    "gs": Service("Google Cloud Storage", "gcs", "gcsfs", _ROOT, "gs://BUCKET/PATH"),
    "as": Service(
        *("Azure storage", "abfs", "adlfs"),
        rf"(?P<account>[a-z0-9.]+)/{_ROOT}",
        "as://ACCOUNT/CONTAINER/PATH",
        _account,
    ),
}

# The name of an exception's class, of any library → what it says to a person. The first row that fits.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"NoCredentials|PartialCredentials|CredentialRetrieval|DefaultCredentialsError|TokenRetrieval|ProfileNotFound",
        "there are no credentials for {service}",
        "give them as {package} takes them, by the environment or its own files: docs/publishing.md says how",
    ),
    (
        r"PermissionError|ClientAuthentication|Forbidden|Unauthorized",
        "{service} refuses: {what}",
        "check the credentials, and that they may list, read, write and delete under {place}",
    ),
    (
        r"FileNotFoundError|NoSuchBucket|ResourceNotFound|ContainerNotFound",
        "{place} is not there: {what}",
        "make the bucket first, and check its name",
    ),
    (
        r"EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionError|ClientConnector|ServerDisconnected|"
        r"ServiceRequestError|ClientOSError|ClientPayload|TimeoutError|ConnectionClosed|ProxyConnection|IncompleteRead",
        "the connection to {place} failed: {what}",
        "check the address and the network, then run the same command again: what is already up is recognised",
    ),
    (
        r"OSError|ClientError|HttpError|HttpResponseError|BotoCoreError|GoogleAPI|AzureError",
        "{service} answers with an error: {what}",
        "run the same command again: what is already up is recognised",
    ),
)


def open_objects(address: str) -> Objects:
    """The destination behind an address such as ``s3://bucket/models``.

    Raises:
        ConfigError: the address is not one.
        MissingDependency: the package that speaks to this storage is not installed.
    """
    scheme, _, rest = address.partition("://")
    service = SERVICES.get(scheme)
    if service is None:
        known = ", ".join(row.example for row in SERVICES.values())
        raise ConfigError(
            f"there is no storage {scheme}:// that Triton serves from",
            remedy=f"name a folder, {known}",
        )
    found = re.fullmatch(service.pattern, rest.rstrip("/"))
    if found is None:
        raise ConfigError(f"{address} is no address", remedy=f"write it as {service.example}")
    named = {name: value or "" for name, value in found.groupdict().items()}
    with extra("publish"):
        import fsspec
    try:
        kind = fsspec.get_filesystem_class(service.protocol)
    except (ImportError, ValueError) as error:
        raise MissingDependency(
            f"{service.name} needs the package {service.package}, which does not import: {error}",
            remedy=f"pip install {service.package}",
        ) from error
    with translated(service, address):
        # Listings are never remembered: another machine may publish meanwhile.
        system = kind(use_listings_cache=False, skip_instance_cache=True, **service.options(named))
    return Objects(system, named["root"], address, service)


class Objects:
    """A path in object storage."""

    def __init__(self, system: Any, root: str, place: str, service: Service) -> None:
        self.place = place
        self._system, self._root, self._service = system, root.rstrip("/"), service

    def folders(self) -> list[str]:
        return sorted(name for name, row in self._listed("").items() if row["type"] == "directory")

    def files(self, prefix: str = "") -> dict[str, int]:
        if not prefix:
            rows = self._listed("").items()
            return {name: int(row["size"]) for name, row in rows if row["type"] == "file"}
        with self._translated():
            self._system.invalidate_cache()
            found = self._system.find(self._at(prefix), detail=True)
        return {self._key(path): int(row["size"]) for path, row in found.items()}

    def read(self, key: str, most_bytes: int = 64 * 2**20) -> bytes | None:
        try:
            with self._translated(missing_is_failure=False):
                data = self._system.cat_file(self._at(key), start=0, end=most_bytes)
        except FileNotFoundError:
            return None
        return bytes(data)

    def write(self, key: str, data: bytes) -> None:
        with self._translated():
            self._system.pipe_file(self._at(key), data)

    def replace(self, files: Mapping[str, bytes]) -> None:
        """One after the other; where one fails, those before it are put back, if the storage still answers."""
        before = {key: self.read(key) for key in files}
        done = []
        try:
            for key, data in files.items():
                done.append(key)
                self.write(key, data)
            # The time of an object is told in whole seconds, and by it Triton sees that a config was replaced: no two
            # replacements may share one.
            time.sleep(_CLOCK_S)
        except BaseException:
            for key in reversed(done):
                if (old := before[key]) is not None:
                    self.write(key, old)
            raise

    def create(self, key: str, data: bytes) -> bool:
        """The storage itself decides who is first: it writes on the condition that nothing is there."""
        try:
            with self._translated():
                self._system.pipe_file(self._at(key), data, mode="create")
        except FileExistsError:
            return False
        except PublishError:
            # Libraries tell "it is there" in many ways; what is there tells it in one.
            if (found := self.read(key)) is None:
                raise
            return found == data
        return True

    def put(self, source: Path, key: str, moved: Moved) -> None:
        from fsspec.callbacks import Callback

        class Told(Callback):  # type: ignore[misc]
            """fsspec's way to tell how far it is, made ours."""

            def relative_update(self, inc: int = 1) -> None:
                moved(inc)

        with self._translated():
            self._system.put_file(str(source), self._at(key), callback=Told())

    def digest(self, key: str) -> str:
        total = hashlib.sha256()
        with (
            self._translated(),
            self._system.open(self._at(key), "rb", block_size=_BLOCK_BYTES) as file,
        ):
            while block := file.read(_BLOCK_BYTES):
                total.update(block)
        return total.hexdigest()

    def copy(self, key: str, to: str) -> None:
        with self._translated():
            self._system.cp_file(self._at(key), self._at(to))

    def remove(self, prefix: str) -> None:
        with self._translated():
            self._system.invalidate_cache()
            if self._system.exists(self._at(prefix)):
                self._system.rm(self._at(prefix), recursive=True)

    def settle(self, key: str) -> None:
        pass  # an upload that was answered is kept

    def require_room(self, size_bytes: int) -> None:
        pass

    def _listed(self, prefix: str) -> dict[str, Any]:
        with self._translated(missing_is_failure=False):
            self._system.invalidate_cache()
            try:
                rows = self._system.ls(self._at(prefix), detail=True)
            except FileNotFoundError:
                return {}  # a path in a bucket is there when something lies under it
        names = {self._key(row["name"]): row for row in rows}
        return {name: row for name, row in names.items() if name}

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _key(self, path: str) -> str:
        return path.strip("/").removeprefix(self._root.strip("/")).strip("/")

    @contextmanager
    def _translated(self, *, missing_is_failure: bool = True) -> Iterator[None]:
        with translated(self._service, self.place, missing_is_failure=missing_is_failure):
            yield


@contextmanager
def translated(service: Service, place: str, *, missing_is_failure: bool = True) -> Iterator[None]:
    """Failures of a storage's library in words; each library has its own classes, told apart by their names.

    ``FileExistsError`` passes, and ``FileNotFoundError`` where a missing file is no failure.
    """
    try:
        yield
    except (FileExistsError, PublishError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not missing_is_failure:
            raise
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        row = next((row for row in _FAILURES if re.search(row[0], kinds)), None)
        if row is None:
            raise
        words = {
            "service": service.name,
            "package": service.package,
            "place": place,
            "what": " ".join(str(error).split())[:200] or type(error).__name__,
        }
        raise PublishError(row[1].format(**words), remedy=row[2].format(**words)) from error
