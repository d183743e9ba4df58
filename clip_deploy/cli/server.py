"""``clip-deploy server install`` and ``clip-deploy serve``: a real Triton, embedded or in a container."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import (
    GrpcPort,
    Host,
    HttpPort,
    LogFile,
    MetricsPort,
    Timeout,
    TritonRelease,
)
from clip_deploy.cli.output import Steps, say, show
from clip_deploy.cli.serving import servable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.servers import ServerHandle

server = typer.Typer(help="The embedded Triton server.", no_args_is_help=True)


@server.callback()
def _server() -> None:
    """The embedded Triton server: no Docker, no GPU."""


@server.command("install")
def install() -> None:
    """Fetch the embedded server into the cache.

    Pinned and verified by hash; a second call verifies every file and repairs what is damaged.
    """
    from clip_deploy.servers import install as installer

    with Steps() as steps:
        found = installer.install(steps)
    typer.echo(
        f"Triton {installer.TRITON_VERSION} (release {installer.TRITON_RELEASE}) in {found.root}"
    )


def serve(
    repository: Annotated[Path, typer.Argument(help="The model repository.")],
    launcher: Annotated[
        str,
        typer.Option(
            metavar="embedded|container", help="The embedded server, or NVIDIA's image in Docker."
        ),
    ] = "embedded",
    host: Host = "127.0.0.1",
    http_port: HttpPort = 0,
    grpc_port: GrpcPort = 0,
    metrics_port: MetricsPort = 0,
    log: LogFile = None,
    timeout: Timeout = 300.0,
    triton_release: TritonRelease = "26.05",
    gpus: Annotated[
        Optional[str], typer.Option(help="Docker's --gpus; asked of the machine by default.")
    ] = None,
    shm_size: Annotated[str, typer.Option(help="The container's shared memory.")] = "1g",
    argument: Annotated[
        Optional[list[str]],
        typer.Option(
            "--argument",
            metavar="TEXT",
            help="One more option for tritonserver itself; may be repeated.",
        ),
    ] = None,
) -> None:
    """Run Triton on a model repository until Ctrl-C.

    Returns only when every model version is ready; a server that cannot load one is explained and ended.
    """
    from clip_deploy.servers import LAUNCHERS, Ports, ServerOptions

    found, _ = servable(repository, launcher, triton_release)
    options = ServerOptions(
        host=host,
        ports=Ports(http_port, grpc_port, metrics_port),
        log=log,
        timeout_s=timeout,
        release=triton_release,
        gpus=gpus,
        shm_size=shm_size,
        arguments=tuple(argument or ()),
    )
    with Steps() as steps:
        handle = LAUNCHERS[launcher].start(found, options, steps)
    with handle:
        show(_addresses(handle))
        say("ready; Ctrl-C ends it")
        _wait(handle)


def _wait(handle: ServerHandle) -> None:
    """Until the server ends by itself, which is a failure, or somebody interrupts us, which is not."""
    import signal

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        handle.process.wait()
    except KeyboardInterrupt:
        say("stopping")
    else:
        raise handle.failure()


def _addresses(handle: ServerHandle) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    rows = {
        "gRPC": handle.grpc,
        "HTTP": f"http://{handle.http}",
        "metrics": f"http://{handle.metrics}/metrics",
    }
    for key, value in (rows | {"id": handle.identity, "log": str(handle.log)}).items():
        grid.add_row(key, value)
    return grid
