"""How commands talk: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console, RenderableType
    from rich.status import Status

    from clip_deploy.errors import ClipDeployError


def complain(error: ClipDeployError) -> None:
    """The two lines of a failure: what, and how to fix it."""
    console = _console(stderr=True)
    console.print(f"[bold red]error:[/] {escaped(str(error))}", soft_wrap=True, highlight=False)
    console.print(f"[bold]fix:[/] {escaped(error.remedy)}", soft_wrap=True, highlight=False)


def warn(note: str) -> None:
    """One line that is not a failure, and should be read."""
    _console(stderr=True).print(
        f"[bold yellow]warning:[/] {escaped(note)}", soft_wrap=True, highlight=False
    )


def say(text: str) -> None:
    """One line for a person, beside the result."""
    _console(stderr=True).print(escaped(text), soft_wrap=True, highlight=False)


def show(result: RenderableType, *, beside: Path | None = None) -> None:
    """A result for a person, on stdout; on stderr where ``beside`` says that a program reads stdout (``-``)."""
    _console(stderr=str(beside) == "-").print(result)


def plain(result: RenderableType) -> str:
    """A result for a person, as text for a file."""
    from io import StringIO

    from rich.console import Console

    file = StringIO()
    Console(file=file, width=120).print(result)
    return file.getvalue()


def write(text: str, place: Path | None) -> None:
    """A result for a program: to a file, or to stdout for ``-``; None writes nothing."""
    if place is None:
        return
    if str(place) == "-":
        sys.stdout.write(text)
        return
    from clip_deploy.errors import ConfigError
    from clip_deploy.files import replacing, storage

    with storage(place, ConfigError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as temporary:
            temporary.write_text(text, "utf-8")


def write_json(value: Any, place: Path | None) -> None:
    """``write`` for JSON."""
    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n", place)


class Steps:
    """Shows long work step by step: a spinner while one runs, a line with its time when it is done.

    A context manager, and the ``progress`` function that work is given.
    """

    def __init__(self) -> None:
        self._console = _console(stderr=True)
        self._status: Status | None = None
        self._step = ""
        self._began = 0.0

    def __enter__(self) -> Steps:
        return self

    def __call__(self, step: str) -> None:
        self._close("[green]✓[/]")
        self._step, self._began = step, time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(escaped(step))
            self._status.start()

    def moved(self, done: int, total: int) -> None:
        """How far the step is, in bytes; a terminal shows it, a log does not."""
        if self._status is not None and total:
            share = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {done / total:.0%}"
            self._status.update(escaped(f"{self._step}: {share}"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("[red]✗[/]" if error else "[green]✓[/]")

    def _close(self, mark: str) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._step:
            seconds = time.monotonic() - self._began
            self._console.print(
                f"{mark} {escaped(self._step)} [dim]{seconds:.1f} s[/]",
                soft_wrap=True,
                highlight=False,
            )
            self._step = ""


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def escaped(text: str) -> str:
    """Text that rich prints as it is."""
    from rich.markup import escape

    return escape(text)
