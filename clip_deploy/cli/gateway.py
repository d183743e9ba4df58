"""``clip-deploy gateway``: images and words over HTTP, in front of a running Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clip_deploy.cli.options import Host
from clip_deploy.cli.output import say, warn


def gateway(
    triton: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Triton's gRPC address.", show_default=False)
    ],
    index: Annotated[
        Optional[str],
        typer.Option(
            metavar="PLACE",
            help="What is searched: a folder, or http://HOST:9200/NAME of Elasticsearch. Without it: embeddings only.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="HTTP port; 0 picks a free one.", min=0, max=65535)
    ] = 8080,
    token_file: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            help="Bearer tokens, one per line, of which requests must carry one; or in CLIP_DEPLOY_TOKENS, separated by spaces.",
        ),
    ] = None,
    allow_host: Annotated[
        Optional[list[str]],
        typer.Option(metavar="NAME", help="A name it is reached by; may be repeated."),
    ] = None,
    allow_origin: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="URL",
            help="A web site whose pages may ask, as https://shop.example; may be repeated.",
        ),
    ] = None,
    model_name: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME",
            help="What callers of /v1/embeddings call the model, besides its own name; may be repeated.",
        ),
    ] = None,
    decode: Annotated[
        str,
        typer.Option(
            metavar="exact|fast",
            help="open_clip's own pixels, or large JPEG files in a fraction of the time.",
        ),
    ] = "exact",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="The deadline of each call to Triton.", min=0.1)
    ] = 30.0,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests that are read and worked on at once.", min=1)
    ] = 128,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that wait for their turn; further ones get 503.", min=0)
    ] = 256,
    max_wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long they wait before they get 503.", min=0),
    ] = 2.0,
    max_upload_mb: Annotated[
        float, typer.Option(metavar="MB", help="The largest body; beyond it 413.", min=0.1)
    ] = 20.0,
    max_buffered_mb: Annotated[
        float,
        typer.Option(
            metavar="MB", help="All bodies and prepared images in memory together; beyond it 503."
        ),
    ] = 256.0,
    upload_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long a body may take to arrive.", min=0.1),
    ] = 30.0,
    log: Annotated[
        Optional[Path],
        typer.Option(
            "--log", metavar="FILE", help="Where one JSON line per request goes; stderr by default."
        ),
    ] = None,
) -> None:
    """Search and embeddings over HTTP, in front of a running Triton.

    POST /api/v1/search/image and /text, POST /v1/embeddings in OpenAI's shape, GET /livez, /readyz, /metrics, /docs;
    the search page at /. Ends with Ctrl-C or SIGTERM, after the requests in flight.
    """
    import sys
    from contextlib import ExitStack

    from clip_deploy.errors import ConfigError, extra
    from clip_deploy.files import storage

    with extra("gateway"):
        from clip_deploy.gateway import GatewaySettings
        from clip_deploy.gateway.running import run

    settings = GatewaySettings(
        triton=triton,
        index=index,
        host=host,
        port=port,
        tokens=_tokens(token_file),
        hosts=tuple(name.lower() for name in allow_host or ()),
        origins=tuple(origin.rstrip("/") for origin in allow_origin or ()),
        names=tuple(model_name or ()),
        decode=decode,
        timeout_s=timeout,
        max_in_flight=max_in_flight,
        max_waiting=max_waiting,
        max_wait_s=max_wait,
        max_upload_bytes=round(max_upload_mb * 2**20),
        max_buffered_bytes=round(max_buffered_mb * 2**20),
        upload_timeout_s=upload_timeout,
    )
    if not (settings.is_local or settings.tokens):
        warn(f"anybody who reaches {host} may ask: no tokens are set (--token-file)")
    with ExitStack() as stack:
        lines = sys.stderr
        if log is not None:
            with storage(log, ConfigError):
                lines = stack.enter_context(log.open("a", encoding="utf-8"))
        run(settings, lines, _announce)
    say("ended")


def _announce(url: str) -> None:
    typer.echo(url)
    say("ready; Ctrl-C ends it")


def _tokens(file: Path | None) -> tuple[str, ...]:
    """From a file or the environment: the command line is for everybody on the machine to read."""
    import os

    from clip_deploy.errors import ConfigError

    if file is None:
        return tuple(os.environ.get("CLIP_DEPLOY_TOKENS", "").split())
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", remedy="check the path") from error
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{file} holds no token", remedy="write one per line, or leave it out")
    return found
