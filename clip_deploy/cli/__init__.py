"""The command line: parse, call one function, print. Each command imports what it needs inside itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clip_deploy import __version__
from clip_deploy.cli.bench import bench
from clip_deploy.cli.capacity import capacity
from clip_deploy.cli.deploy import deploy, init
from clip_deploy.cli.doctor import doctor
from clip_deploy.cli.engines import build_trt, inspect
from clip_deploy.cli.export import export
from clip_deploy.cli.gateway import gateway
from clip_deploy.cli.index import index
from clip_deploy.cli.lint import lint
from clip_deploy.cli.operations import render_deploy
from clip_deploy.cli.output import complain
from clip_deploy.cli.publish import publish, published
from clip_deploy.cli.render import render_config
from clip_deploy.cli.server import serve, server
from clip_deploy.cli.smoke import smoke_test
from clip_deploy.cli.tune import tune
from clip_deploy.errors import ClipDeployError

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    help="An OpenCLIP model becomes a verified deployment on NVIDIA Triton Inference Server.",
    epilog="export → (build-trt) → render-config → lint → serve → smoke-test → publish; init and deploy do all of it. Then bench → tune → capacity, index → gateway, "
    "render-deploy. Exit codes: 2 asked wrongly, 3 something is missing, 4 export, 5 engine, 6 server, 7 a check failed, 8 a damaged index, 9 publishing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """An OpenCLIP model becomes a verified deployment on NVIDIA Triton Inference Server."""


for command in (
    *(init, deploy, export, build_trt, render_config, lint, serve, smoke_test, publish),
    *(bench, tune, capacity, gateway, render_deploy, inspect, doctor),
):
    app.command()(command)
app.add_typer(published, name="published")
app.add_typer(server, name="server")
app.add_typer(index, name="index")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Failures a user can act on become two lines, bugs keep their traceback."""
    try:
        app(args=None if argv is None else list(argv), prog_name="clip-deploy")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ClipDeployError as error:
        complain(error)
        return error.exit_code
    return 0
