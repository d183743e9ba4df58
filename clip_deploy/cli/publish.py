"""``clip-deploy publish`` and ``clip-deploy published``: to where servers read, and what is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import JsonFile, Timeout
from clip_deploy.cli.output import Steps, say, show, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.publishing import Holdings, Published

Destination = Annotated[
    str,
    typer.Argument(
        metavar="DEST",
        help="A folder, or object storage as tritonserver writes it: s3://BUCKET/PATH, s3://https://HOST:PORT/BUCKET/PATH, gs://BUCKET/PATH, as://ACCOUNT/CONTAINER/PATH.",
    ),
]
Reload = Annotated[
    Optional[list[str]],
    typer.Option(
        "--reload",
        metavar="HOST:PORT",
        help="gRPC address of a running server on DEST, to be switched when the new version has answered rightly on every one of them. May be repeated.",
    ),
]

published = typer.Typer(help="What a destination holds.", no_args_is_help=True)


@published.callback()
def _published() -> None:
    """What a destination holds: shown, gone back to, verified, cleared away."""


def publish(
    repository: Annotated[Path, typer.Argument(help="The model repository.")],
    destination: Destination,
    reload: Reload = None,
    target: Annotated[
        Optional[str],
        typer.Option(
            metavar="cpu|gpu|gpu:9.0|auto",
            help="What the models will run on, for the linter; by default a GPU where one asks for it.",
        ),
    ] = None,
    triton_release: Annotated[
        Optional[str],
        typer.Option(
            "--triton-release", metavar="YY.MM", help="The servers' release, for the linter."
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(help="Requests at once when a version is tried on a server.", min=1, max=2000),
    ] = 16,
    timeout: Timeout = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Publish a repository to a folder or to object storage, from which servers load it.

    Every file is there and verified before anything can see it; what served before serves until then, and whenever
    something fails. Exit code 9 when the destination is at fault, 7 when answers are wrong, 6 when a server refuses.
    """
    from clip_deploy.lint import target as make_target
    from clip_deploy.publishing import publish as run

    judged_for = make_target(target or "auto", triton_release) if target or triton_release else None
    with Steps() as steps:
        done = run(
            repository,
            destination,
            reload=tuple(reload or ()),
            target=judged_for,
            timeout_s=timeout,
            concurrency=concurrency,
            progress=steps,
            moved=steps.moved,
        )
    show(_table(done), beside=json_file)
    write_json(done.to_json(), json_file)
    if done.former is not None and done.changed:
        say(f"back: clip-deploy published rollback {done.place}")


@published.command("list")
def list_(destination: Destination, json_file: JsonFile = None) -> None:
    """Show every publication, and which one serves."""
    from clip_deploy.publishing import holdings

    found = holdings(destination)
    show(_listing(found), beside=json_file)
    write_json(found.to_json(), json_file)


@published.command("rollback")
def rollback(
    destination: Destination,
    to: Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            help="The publication; by default the newest one before that served and was not rolled back from.",
            min=1,
        ),
    ] = None,
    reload: Reload = None,
    timeout: Timeout = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Serve an earlier publication again.

    Its configs are put in place; no file is copied, and none is removed.
    """
    from clip_deploy.publishing import rollback as run

    with Steps() as steps:
        done = run(
            destination, to=to, reload=tuple(reload or ()), timeout_s=timeout, progress=steps
        )
    show(_table(done), beside=json_file)
    write_json(done.to_json(), json_file)


@published.command("prune")
def prune(
    destination: Destination,
    keep: Annotated[
        int,
        typer.Option(metavar="N", help="How many publications that can serve are kept.", min=1),
    ],
    json_file: JsonFile = None,
) -> None:
    """Remove all but the newest publications, and what cut uploads have left.

    The one that serves always stays.
    """
    from clip_deploy.publishing import prune as run

    with Steps() as steps:
        done = run(destination, keep=keep, progress=steps)
    numbers = ", ".join(map(str, done.publications)) or "none"
    show(
        f"removed publications: {numbers}; {done.freed_bytes / 1e6:,.1f} MB freed", beside=json_file
    )
    write_json(done.to_json(), json_file)


@published.command("verify")
def verify(
    destination: Destination,
    number: Annotated[
        Optional[int],
        typer.Option("--number", metavar="N", help="One publication; all by default.", min=1),
    ] = None,
) -> None:
    """Read every published file back and hold it against its record.

    Exit code 7 when one is gone or was changed.
    """
    from clip_deploy.publishing import verify as run

    with Steps() as steps:
        count = run(destination, number=number, progress=steps)
    show(f"{count} files are as they were published")


@published.command("unlock")
def unlock(destination: Destination) -> None:
    """Remove the lock of a publisher that ended without a word.

    See first that nobody is at work there.
    """
    from clip_deploy.publishing import unlock as run

    said = run(destination)
    show(f"removed: it {said}" if said else "there was no lock")


def _table(done: Published) -> RenderableType:
    from rich.table import Table

    number = done.publication.number
    before = f", before it {done.former}" if done.former not in (None, number) else ""
    what = "serves" if done.changed else "served already; nothing to do"
    table = Table(title=f"publication {number} {what}{before}", title_justify="left")
    for column in ("model", "version", "", "bytes"):
        table.add_column(column, justify="right" if column in ("version", "bytes") else "left")
    for model in done.publication.models:
        state = "switched" if model.name in done.changed else "as before"
        table.add_row(model.name, str(model.version), state, f"{model.size_bytes:,}")
    sent = f"{done.uploaded_bytes / 1e6:,.1f} MB uploaded"
    if done.found_bytes:
        sent += f", {done.found_bytes / 1e6:,.1f} MB were there and right"
    servers = f"; switched: {', '.join(done.servers)}" if done.servers else ""
    table.caption, table.caption_justify = f"{done.place}; {sent}{servers}", "left"
    return table


def _listing(found: Holdings) -> RenderableType:
    from rich.table import Table

    table = Table(title=found.place, title_justify="left")
    for column in ("", "number", "state", "began (UTC)", "by", "models", "MB"):
        table.add_column(column, justify="right" if column in ("number", "MB") else "left")
    for each in found.publications:
        serves = each.number == found.serving
        models = ", ".join(f"{model.name}:{model.version}" for model in each.models)
        size = sum(model.size_bytes for model in each.models) / 1e6
        state = "serving" if serves else each.state.value
        row = ("▶" if serves else "", str(each.number), state, each.began, each.by, models)
        table.add_row(*row, f"{size:,.1f}")
    if found.serving is None and found.publications:
        table.caption = "no publication is in place as a whole: publish again, or roll back to one"
    return table
