"""A pipeline while it runs: one line per step with its time, and below, on a terminal, what is going on inside it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

from clip_deploy.cli.output import escaped, warn
from clip_deploy.report import Status

if TYPE_CHECKING:
    from clip_deploy.deploy import StepResult

_MARKS = {Status.PASSED: "[green]✓[/]", Status.FAILED: "[red]✗[/]", Status.SKIPPED: "[yellow]–[/]"}


class LiveSteps:
    """Shows how a deployment goes, on stderr; a context manager, and the ``watch`` of ``deploy``.

    Args:
        quiet: show nothing: the table at the end says it all.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._status = self._console.status("")
        self._name = ""
        self._began = 0.0

    def __enter__(self) -> LiveSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begins(self, deployment: str, step: str, why: str) -> None:
        """A step begins, and why it has to."""
        self._name, self._began = f"{deployment}: {step}", time.monotonic()
        if self._console.is_terminal:
            self._status.start()
            self("")
        else:  # a log: say at once what will take its time
            self._line(f"[dim]…[/] {escaped(self._name)} [dim]({escaped(why)})[/]")

    def __call__(self, what: str) -> None:
        """Something begins inside it."""
        seconds = time.monotonic() - self._began
        self._status.update(f"{escaped(self._name)} [dim]{seconds:.0f} s[/] {escaped(what)}")

    def ended(self, result: StepResult) -> None:
        """A step has run, or is left out."""
        self._status.stop()
        name = escaped(f"{result.deployment}: {result.step}")
        time_ = f" [dim]{result.seconds:.1f} s[/]" if result.seconds >= 0.05 else ""
        outcome = "" if result.outcome.value == "ran" else f" {result.outcome.value}:"
        mark = _MARKS[result.outcome.status]
        self._line(f"{mark} {name}{time_}{outcome} {escaped(result.said)}")

    def warn(self, note: str) -> None:
        """Something that is no failure, and should be read."""
        warn(note)

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)
