"""``clip-deploy render-deploy``: a model repository → the files that run it for good."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import TritonRelease
from clip_deploy.cli.output import say, warn

if TYPE_CHECKING:
    from clip_deploy.operations import Gateway, Written


def render_deploy(
    repository: Annotated[
        Path, typer.Option(metavar="DIR", help="The model repository; mounted, never copied.")
    ] = Path("model_repository"),
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the files go, as a folder of their own.")
    ] = Path("deploy"),
    target: Annotated[str, typer.Option(metavar="compose", help="What runs it.")] = "compose",
    name: Annotated[
        str, typer.Option(help="The project's name; two deployments on one machine need two.")
    ] = "clip-deploy",
    triton_release: TritonRelease = "26.05",
    image: Annotated[
        Optional[str],
        typer.Option(help="Another image than NVIDIA's of that release: a mirror's, or your own."),
    ] = None,
    digest: Annotated[
        Optional[str], typer.Option(metavar="sha256:…", help="Pins the image.")
    ] = None,
    gpus: Annotated[
        str, typer.Option(metavar="all|none|0,1", help="The GPUs that Triton gets.")
    ] = "all",
    host: Annotated[
        str,
        typer.Option(
            help="The address that ports are published on. Anything but loopback opens them to the network."
        ),
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(help="Where Triton's HTTP is published.", min=1, max=65535)
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option(help="Where Triton's gRPC is published.", min=1, max=65535)
    ] = 8001,
    metrics_port: Annotated[
        int, typer.Option(help="Where Triton's metrics are published.", min=1, max=65535)
    ] = 8002,
    memory: Annotated[
        Optional[str],
        typer.Option(
            metavar="SIZE",
            help="The limit of Triton's container, as 8g; four times the models and 4 GiB by default.",
        ),
    ] = None,
    shm_size: Annotated[str, typer.Option(metavar="SIZE", help="Its shared memory.")] = "1g",
    user: Annotated[
        str,
        typer.Option(
            metavar="UID:GID", help="Who runs Triton, and must be able to read the models."
        ),
    ] = "1000:1000",
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Let models be loaded and unloaded over Triton's ports while it runs: explicit model control.",
        ),
    ] = False,
    argument: Annotated[
        Optional[list[str]],
        typer.Option(metavar="TEXT", help="One more option for tritonserver; may be repeated."),
    ] = None,
    gateway: Annotated[
        bool, typer.Option("--gateway/--no-gateway", help="The web side, too, or Triton alone.")
    ] = True,
    gateway_port: Annotated[
        int, typer.Option(help="Where the gateway is published.", min=1, max=65535)
    ] = 8080,
    gateway_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="The limit of the gateway's container.")
    ] = "2g",
    index: Annotated[
        Optional[str],
        typer.Option(
            metavar="PLACE",
            help="What the gateway searches: a folder, or http://HOST:9200/NAME of Elasticsearch. Without it: embeddings only.",
        ),
    ] = None,
    token_file: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="Bearer tokens for the gateway, one per line."),
    ] = None,
    allow_host: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME",
            help="A name that the gateway is reached by, besides localhost; may be repeated.",
        ),
    ] = None,
    threshold: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME=NUMBER",
            help="What an alert compares with, as queue_ms=50; may be repeated. docs/operations.md has all.",
        ),
    ] = None,
    templates: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR",
            help="Your own templates; a file there replaces the shipped one of the same name.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that were changed by hand.")
    ] = False,
) -> None:
    """Render what runs a model repository for good: containers with health checks, metrics, alerts and a dashboard.

    Lints the repository first. Files that a person changed since they were rendered are not overwritten.
    """
    from clip_deploy import operations
    from clip_deploy.cli.serving import servable
    from clip_deploy.errors import ConfigError
    from clip_deploy.operations import Settings

    if target != "compose":
        raise ConfigError(f"target {target!r} is unknown", remedy="use compose")
    found, _ = servable(repository, "container", triton_release)
    settings = Settings(
        repository=found,
        name=name,
        release=triton_release,
        image=image or "",
        digest=digest or "",
        gpus=gpus,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        memory=memory or "",
        shm_size=shm_size,
        user=user,
        reload=reload,
        arguments=tuple(argument or ()),
        gateway=_gateway(gateway, gateway_port, index, token_file, allow_host, gateway_memory),
        thresholds=_numbers(threshold or []),
    )
    files = operations.render(settings, out, templates=templates)
    _tell(operations.write(files, out, force=force))
    if private := settings.unreadable():
        warn(f"user {user} cannot read {private}: chmod -R o+rX {repository}")
    say(f"next: cd {out} && docker compose up --detach --wait")


def _gateway(
    wanted: bool,
    port: int,
    index: str | None,
    token_file: Path | None,
    hosts: list[str] | None,
    memory: str,
) -> Gateway | None:
    from clip_deploy.errors import ConfigError
    from clip_deploy.operations import Gateway

    if not wanted:
        if index or token_file or hosts:
            raise ConfigError(
                "--index, --token-file and --allow-host are the gateway's, and there is none",
                remedy="drop --no-gateway, or them",
            )
        return None
    return Gateway(port, index, token_file, tuple(name.lower() for name in hosts or ()), memory)


def _numbers(pairs: list[str]) -> dict[str, float]:
    from clip_deploy.errors import ConfigError

    found = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"--threshold {pair!r} is not NAME=NUMBER", remedy="write it as queue_ms=50"
            ) from None
    return found


def _tell(done: Written) -> None:
    for path in done.written:
        typer.echo(path)
    for path in done.unchanged:
        say(f"{path} is as it was")
    for path in done.removed:
        say(f"{path} is no longer part of it: removed")
    for path in done.kept:
        warn(f"{path} is no longer part of it, and was changed by hand: kept")
