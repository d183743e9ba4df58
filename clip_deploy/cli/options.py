"""Options that several commands share, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

JsonFile = Annotated[
    Optional[Path],
    typer.Option("--json", metavar="FILE", help="Also write the result as JSON (- for stdout)."),
]
JunitFile = Annotated[
    Optional[Path],
    typer.Option(
        "--junit", metavar="FILE", help="Also write the result as JUnit XML (- for stdout)."
    ),
]
Images = Annotated[
    Optional[Path],
    typer.Option(
        "--images",
        metavar="DIR",
        help="Your own photographs, with captions.json (file name → caption) where you have one.",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        help="Address to listen on. Anything but loopback opens the server to the network.",
    ),
]
HttpPort = Annotated[
    int, typer.Option("--http-port", help="HTTP port; 0 picks a free one.", min=0, max=65535)
]
GrpcPort = Annotated[
    int, typer.Option("--grpc-port", help="gRPC port; 0 picks a free one.", min=0, max=65535)
]
MetricsPort = Annotated[
    int, typer.Option("--metrics-port", help="Metrics port; 0 picks a free one.", min=0, max=65535)
]
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        metavar="embedded|container",
        help="What to start, unless --url names one.",
    ),
]
TritonRelease = Annotated[
    str, typer.Option("--triton-release", metavar="YY.MM", help="The container's release.")
]
LogFile = Annotated[
    Optional[Path],
    typer.Option(
        "--log", metavar="FILE", help="Where the server's log goes; the cache folder by default."
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long loading may take.", min=1)
]


def numbers(text: str, option: str) -> tuple[float, ...]:
    """``0.5,0.5,0.5`` → numbers.

    Raises:
        ConfigError: it is something else.
    """
    from clip_deploy.errors import ConfigError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is not a list of numbers", remedy="separate them by commas"
        ) from None
