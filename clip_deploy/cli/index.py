"""``clip-deploy index``: pictures into an index, and out of it again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clip_deploy.cli.options import JsonFile
from clip_deploy.cli.output import say, show, warn, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.client.served import Deployment
    from clip_deploy.indexes import Hit, Index, IndexStats
    from clip_deploy.indexes.ingestion import Ingestion

index = typer.Typer(help="An index of pictures, for search.", no_args_is_help=True)

Place = Annotated[
    str,
    typer.Option(
        "--index",
        metavar="PLACE",
        help="A folder (LanceDB), or https://host:9200/NAME (Elasticsearch 8).",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Deadline of a request.", min=0.1)
]
_MODES = ("hybrid", "vector", "text")
_LISTED = 50


@index.callback()
def _index() -> None:
    """An index of pictures: vectors, captions and thumbnails, in a folder or in Elasticsearch."""


@index.command("add")
def add(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR|PARQUET", help="A folder of pictures, or a Parquet file."),
    ],
    triton: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="gRPC address of the server that embeds them.")
    ],
    place: Place,
    captions: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            help="File name → caption, as JSON or CSV; by default captions.json in the folder. Then name.txt beside a picture, then its name.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Pictures that are written together.", min=1, max=1024)
    ] = 64,
    prune: Annotated[
        bool, typer.Option("--prune", help="Take out what is gone from the source.")
    ] = False,
    origin: Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME", help="What the source is called in the index; its path by default."
        ),
    ] = None,
    timeout: Timeout = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Embed pictures through Triton and store them.

    What is there unchanged is skipped, so that the same command goes on after an interruption. Files that cannot be read
    are listed at the end.
    """
    from clip_deploy.indexes.ingestion import ingest
    from clip_deploy.indexes.sources import open_source

    found = open_source(source, captions=captions, origin=origin)
    if found.strangers:
        warn(
            f"{len(found.strangers):,} captions are for pictures that are not there, as {found.strangers[0]}"
        )

    async def run() -> tuple[Ingestion, IndexStats]:
        from clip_deploy.client import AsyncTritonInferenceClient
        from clip_deploy.indexes import IndexIdentity, open_index

        async with AsyncTritonInferenceClient(triton, timeout_s=timeout) as client:
            deployment = await client.deployment()
            _warn_of_random_weights(deployment)
            opened = await open_index(place, create=IndexIdentity.of(deployment))
            try:
                with _Bar() as bar:
                    done = await ingest(
                        found, client, opened, batch=batch, prune=prune, watch=bar.watch
                    )
                return done, await opened.stats()
            finally:
                await opened.close()

    began = time.monotonic()
    try:
        done, stats = asyncio.run(run())
    except KeyboardInterrupt:
        say("stopped; what was embedded is stored, and the same command goes on from there")
        raise typer.Exit(130) from None
    seconds = time.monotonic() - began
    _show_added(done, stats, seconds, json_file)
    if found.gaps and prune:
        warn("nothing was pruned: not all of the source could be looked at")
    if done.unread:
        warn(f"{len(done.unread):,} of {len(found):,} files could not be read")
    write_json(done.to_json() | _described(stats) | {"seconds": round(seconds, 3)}, json_file)


@index.command("stats")
def stats(place: Place, json_file: JsonFile = None) -> None:
    """Say what an index holds, and of which model."""
    from clip_deploy.indexes import open_index

    async def run() -> IndexStats:
        opened = await open_index(place)
        try:
            return await opened.stats()
        finally:
            await opened.close()

    found = asyncio.run(run())
    show(_facts(found), beside=json_file)
    write_json(_described(found), json_file)


@index.command("search")
def search(
    query: Annotated[
        str, typer.Argument(metavar="IMAGE|TEXT", help="The path of a picture, or words.")
    ],
    place: Place,
    triton: Annotated[
        Optional[str],
        typer.Option(
            metavar="HOST:PORT", help="gRPC address of the server; not needed for --mode text."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="How many results.", min=1, max=1000)] = 12,
    mode: Annotated[
        str,
        typer.Option(
            metavar="|".join(_MODES), help="For words: by likeness, by captions, or by both."
        ),
    ] = "hybrid",
    as_text: Annotated[
        bool, typer.Option("--text", help="These are words, even if a file is called so.")
    ] = False,
    as_image: Annotated[bool, typer.Option("--image", help="This is the path of a picture.")] = (
        False
    ),
    timeout: Timeout = 30.0,
    json_file: JsonFile = None,
) -> None:
    """Find pictures that look like a picture, or that words describe."""
    picture = _is_picture(query, as_text, as_image)
    _require_mode(mode, picture, triton)

    async def run() -> tuple[list[Hit], Index]:
        from clip_deploy.indexes import open_index

        opened = await open_index(place)
        try:
            vector = None
            if triton is not None and mode != "text":
                vector = await _embedded(triton, timeout, query, picture, opened, place)
            words = None if picture or mode == "vector" else query
            return await opened.search(vector=vector, text=words, limit=limit), opened
        finally:
            await opened.close()

    hits, opened = asyncio.run(run())
    show(_hits(hits), beside=json_file)
    write_json(
        {
            "query": {"image" if picture else "text": query, "mode": "vector" if picture else mode},
            "results": [asdict(hit) for hit in hits],
            "model": asdict(opened.identity),
        },
        json_file,
    )


def _is_picture(query: str, as_text: bool, as_image: bool) -> bool:
    from clip_deploy.errors import ConfigError
    from clip_deploy.inputs.gallery import SUFFIXES

    if as_text and as_image:
        raise ConfigError("both --text and --image", remedy="say one of them, or none")
    if as_text:
        return False
    try:
        there = Path(query).is_file()
    except (OSError, ValueError):  # words too long for a path
        there = False
    if not there and (as_image or Path(query).suffix.lower() in SUFFIXES):
        raise ConfigError(
            f"there is no file {query}", remedy="check the path, or say --text if these are words"
        )
    return there


def _require_mode(mode: str, picture: bool, triton: str | None) -> None:
    from clip_deploy.errors import ConfigError

    if mode not in _MODES:
        raise ConfigError(f"--mode {mode!r} is unknown", remedy=f"use {', '.join(_MODES)}")
    if picture and mode == "text":
        raise ConfigError("a picture holds no words", remedy="leave --mode text out")
    if mode != "text" and triton is None:
        raise ConfigError(
            "--triton is missing",
            remedy="name the server that embeds the question; --mode text needs none",
        )


async def _embedded(
    triton: str, timeout_s: float, query: str, picture: bool, opened: Index, place: str
) -> Any:
    """The question's vector, by the model that the index was made with."""
    from clip_deploy.client import AsyncTritonInferenceClient
    from clip_deploy.indexes import IndexIdentity

    async with AsyncTritonInferenceClient(triton, timeout_s=timeout_s) as client:
        deployment = await client.deployment()
        opened.identity.require(IndexIdentity.of(deployment), place)
        _warn_of_random_weights(deployment)
        if picture:
            return (await client.embed_images([query]))[0]
        return (await client.embed_texts([query]))[0]


def _warn_of_random_weights(deployment: Deployment) -> None:
    if not deployment.trained:
        warn(f"{deployment.model} has random weights: what it finds alike means nothing")


def _described(stats: IndexStats) -> dict[str, Any]:
    return {
        "index": stats.place,
        "engine": stats.engine,
        "items": stats.items,
        "bytes": stats.bytes,
        "model": asdict(stats.identity),
    }


def _facts(stats: IndexStats) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for key, value in (
        ("pictures", f"{stats.items:,}"),
        ("model", str(stats.identity)),
        ("on disk", f"{stats.bytes / 1e6:,.1f} MB"),
        ("index", f"{stats.place} ({stats.engine})"),
    ):
        grid.add_row(Text(key, "dim"), Text(value))
    return grid


def _show_added(
    done: Ingestion, stats: IndexStats, seconds: float, json_file: Optional[Path]
) -> None:
    from rich.table import Table
    from rich.text import Text

    fresh = done.added + done.updated
    parts = {
        "added": done.added,
        "updated": done.updated,
        "unchanged": done.unchanged,
        "pruned": done.removed,
        "other files": done.others,
    }
    said = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
    rate = f" in {seconds:.1f} s ({fresh / seconds:,.1f} per s)" if fresh else ""
    show(Text(f"{said}{rate}; the index holds {stats.items:,} pictures"), beside=json_file)
    if done.unread:
        table = Table("not read", "why", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for row in done.unread[:_LISTED]:
            table.add_row(Text(row.source), Text(row.why))
        if len(done.unread) > _LISTED:
            table.add_row("…", f"and {len(done.unread) - _LISTED:,} more: see --json")
        show(table, beside=json_file)


def _hits(hits: list[Hit]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    if not hits:
        return Text("nothing found")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("#", "score", "cosine", "vector", "words"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("caption", overflow="fold")
    table.add_column("source", overflow="fold")
    for rank, hit in enumerate(hits, 1):
        table.add_row(
            str(rank),
            f"{hit.score:.4f}",
            "" if hit.cosine is None else f"{hit.cosine:.4f}",
            str(hit.vector_rank or ""),
            str(hit.text_rank or ""),
            Text(hit.caption),
            Text(hit.source),
        )
    return table


class _Bar:
    """How an ingestion goes, on stderr: a bar with rate and remaining time, or a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._began = self._said = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, Remaining(), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", rate="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._bar.stop()

    def watch(self, done: int, total: int) -> None:
        """See ``indexes.ingestion.Watch``."""
        now = time.monotonic()
        rate = f"{done / max(now - self._began, 1e-9):,.1f} per s"
        self._bar.update(self._task, completed=done, total=total, rate=rate)
        if not self._bar.console.is_terminal and now - self._said >= 10:
            self._said = now
            say(f"{done:,} of {total:,}, {rate}")
