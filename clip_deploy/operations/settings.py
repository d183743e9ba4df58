"""What the containers of a deployment are told."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from clip_deploy.errors import ConfigError
from clip_deploy.releases import IMAGE, release
from clip_deploy.repository.assembly import read_config
from clip_deploy.servers import LAUNCHERS
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clip_deploy.artifacts import ModelRepository

_PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SIZE = re.compile(r"[1-9][0-9]*(?:\.[0-9]+)?[kmg]b?", re.IGNORECASE)
_USER = re.compile(r"[1-9][0-9]*:[1-9][0-9]*")
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gateway:
    """The web side.

    Args:
        port: where it is published.
        index: a folder, or the address of Elasticsearch; None serves embeddings only.
        token_file: bearer tokens, one per line; None lets everybody in who reaches it.
        hosts: names that it is reached by, besides loopback's.
        memory: the container's limit.
    """

    port: int = 8080
    index: str | None = None
    token_file: Path | None = None
    hosts: tuple[str, ...] = ()
    memory: str = "2g"

    def __post_init__(self) -> None:
        address = urlsplit(self.index or "")
        if self.index is not None and not self.index_is_a_folder and is_loopback(address.hostname):
            raise ConfigError(
                f"{self.index}: inside a container, {address.hostname} is the container itself",
                remedy="name the service or the machine that Elasticsearch runs on",
            )
        for option, path, there in (
            ("--index", self.index, not self.index_is_a_folder or Path(self.index or "").is_dir()),
            ("--token-file", self.token_file, not self.token_file or self.token_file.is_file()),
        ):
            if not there:
                raise ConfigError(f"{option}: there is nothing at {path}", remedy="check the path")

    @property
    def index_is_a_folder(self) -> bool:
        return self.index is not None and "://" not in self.index


@dataclass(frozen=True, slots=True)
class Settings:
    """All that is chosen for the containers.

    Args:
        repository: the models.
        name: the Compose project's; two deployments on one machine need two.
        release: of NVIDIA's image, as 26.05.
        image: another image instead, as of a mirror or with more in it.
        digest: pins the image, as sha256:….
        gpus: ``all``, ``none``, or ids as ``0,1``.
        host: the address that ports are published on; anything but loopback opens them to the network.
        http_port: Triton's HTTP, published.
        grpc_port: Triton's gRPC, published.
        metrics_port: Triton's metrics, published.
        memory: limit of Triton's container; empty takes it from the size of the models.
        shm_size: its shared memory.
        user: its user and group, by number.
        reload: lets models be loaded and unloaded while it runs, over the ports above.
        arguments: more of tritonserver's own options.
        gateway: the web side; None leaves it out.
        thresholds: what alerts compare with, where it is not the default.
    """

    repository: ModelRepository
    name: str = "clip-deploy"
    release: str = "26.05"
    image: str = ""
    digest: str = ""
    gpus: str = "all"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    memory: str = ""
    shm_size: str = "1g"
    user: str = "1000:1000"
    reload: bool = False
    arguments: tuple[str, ...] = ()
    gateway: Gateway | None = field(default_factory=Gateway)
    thresholds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_host()
        self._check_models()

    @property
    def full_image(self) -> str:
        """The image's name with its tag, and its digest where one is given."""
        if not self.image:
            release(self.release)
        image = self.image or IMAGE.format(release=self.release)
        return f"{image}@{self.digest}" if self.digest else image

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """GPUs by number; empty for all of them, and for none."""
        return () if self.gpus in ("all", "none") else tuple(self.gpus.split(","))

    @property
    def memory_limit(self) -> str:
        """What was asked for, or four times the files that are served, and 4 GiB."""
        return self.memory or f"{4 + -(-4 * _served_bytes(self.repository) // _GIB)}g"

    def unreadable(self) -> Path | None:
        """A file of the models that the container's user may not read; None where it may read all."""
        uid, gid = (int(part) for part in self.user.split(":"))
        root = self.repository.path
        for path in (root, *root.rglob("*")):
            found = path.stat()
            shift = 6 if found.st_uid == uid else 3 if found.st_gid == gid else 0
            needed = 0o5 if path.is_dir() else 0o4
            if found.st_mode >> shift & needed != needed:
                return path
        return None

    def _check_shapes(self) -> None:
        shapes = (
            (_PROJECT.fullmatch(self.name), f"{self.name!r} is no project name", "a-z 0-9 - _"),
            (
                not self.digest or _DIGEST.fullmatch(self.digest),
                f"{self.digest!r} is no digest",
                "write sha256: and 64 hexadecimal digits",
            ),
            (
                all(part.isascii() and part.isdecimal() for part in self.gpu_ids),
                f"--gpus {self.gpus!r}",
                "use all, none, or ids as 0,1",
            ),
            (
                _USER.fullmatch(self.user),
                f"user {self.user!r} is not a user and a group by number, or is root",
                "write it as 1000:1000, the user that NVIDIA's image has for this",
            ),
            *(
                (_SIZE.fullmatch(size), f"{size!r} is no size", "write it as 512m or 8g")
                for size in self._sizes()
            ),
        )
        for right, what, remedy in shapes:
            if not right:
                raise ConfigError(what, remedy=remedy)
        ports = [self.http_port, self.grpc_port, self.metrics_port]
        ports += [self.gateway.port] if self.gateway else []
        if len(set(ports)) < len(ports):
            raise ConfigError(
                f"two of the ports {', '.join(map(str, ports))} are equal",
                remedy="give each its own",
            )

    def _sizes(self) -> list[str]:
        sizes = [self.shm_size, *([self.memory] if self.memory else [])]
        return sizes + ([self.gateway.memory] if self.gateway else [])

    def _check_host(self) -> None:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"{self.host!r} is no IP address", remedy="publish on 127.0.0.1, or an address"
            ) from None
        if (
            not is_loopback(self.host)
            and self.gateway
            and not (self.gateway.token_file and self.gateway.hosts)
        ):
            raise ConfigError(
                f"the gateway would answer anybody who reaches {self.host}",
                remedy="give it --token-file and --allow-host, or publish on 127.0.0.1 behind a proxy",
            )

    def _check_models(self) -> None:
        if not self.image:
            LAUNCHERS["container"].require_backends(self.repository)
        names = {model.name for model in self.repository.models}
        if self.gateway:
            for tower in Tower:
                if tower.model_name not in names:
                    raise ConfigError(
                        f"the gateway needs {tower.model_name}, and {self.repository.path} has none",
                        remedy="render both towers of one export, or use --no-gateway",
                    )
        if self.gpus == "none" and (model := _needing_gpu(self.repository)):
            raise ConfigError(
                f"{model} asks for a GPU, and the container would have none",
                remedy="use --gpus all, or render it with --instance-kind auto or cpu",
            )


def is_loopback(host: str | None) -> bool:
    """Whether a name or an address is this machine's own, to itself."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _needing_gpu(repository: ModelRepository) -> str | None:
    for model in repository.models:
        config = read_config(repository.path / model.name)
        asked = any(group.kind == group.KIND_GPU for group in config.instance_group)
        if model.backend == "tensorrt" or asked:
            return model.name
    return None


def _served_bytes(repository: ModelRepository) -> int:
    folders = [
        repository.path / model.name / str(version)
        for model in repository.models
        for version in model.served
    ]
    return sum(
        path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()
    )
