"""Failures a user can act on, each with a remedy and an exit code.

The tree::

    ClipDeployError
    ├── ConfigError          2   asked for something contradictory, unknown or missing
    │   └── InputError       2   an image or a text that cannot be embedded
    ├── MissingDependency    3   an extra, a driver or a server binary is absent or broken
    ├── ExportError          4   did not load, did not trace, or out of tolerance
    ├── EngineError          5   the engine did not build, or is not what was asked for
    ├── ServerError          6   Triton did not start, died, refused a model, or answered with an error
    │   ├── ServerUnavailable 6  nobody answers at that address, or the connection broke
    │   │   └── ServerBusy   6   the server's queue is full
    │   ├── ServerTimeout    6   no answer before the deadline
    │   └── ModelChanged     6   the server now serves other weights than it did
    ├── CheckFailed          7   lint, smoke test or benchmark bar: it answered, wrongly
    ├── IndexDamaged         8   an index of pictures whose files cannot be read
    └── PublishError         9   the destination cannot be written to, or does not hold what was recorded there
        └── DestinationBusy  9   somebody else is at work there

Anything else that escapes is a bug and keeps its traceback (exit code 1).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator


class ClipDeployError(Exception):
    """A failure the user can act on; ``remedy`` says how, as a command or a change to make."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class ConfigError(ClipDeployError):
    """Asked for something contradictory, unknown or missing."""

    exit_code = 2


class InputError(ConfigError):
    """An image or a text that cannot be embedded: damaged, hostile, or not one at all."""


class MissingDependency(ClipDeployError):
    """An extra, a driver or a server binary is absent or broken."""

    exit_code = 3


class ExportError(ClipDeployError):
    """The model did not load, did not trace, or its graph is out of tolerance."""

    exit_code = 4


class EngineError(ClipDeployError):
    """The engine did not build, or is not what was asked for."""

    exit_code = 5


class ServerError(ClipDeployError):
    """Triton did not start, died, refused a model, or answered with an error."""

    exit_code = 6


class ServerUnavailable(ServerError):
    """Nobody answers at that address, or the connection broke: the same request may succeed later."""


class ServerBusy(ServerUnavailable):
    """The server refused the request because its queue is full: it would be worse if everybody asked again at once."""


class ServerTimeout(ServerError):
    """No answer before the deadline."""


class ModelChanged(ServerError):
    """The server now serves other weights than this client began with: its vectors do not compare with earlier ones."""


class CheckFailed(ClipDeployError):
    """A lint, smoke test or benchmark bar that the subject answered wrongly."""

    exit_code = 7


class IndexDamaged(ClipDeployError):
    """An index of pictures whose files cannot be read, or are not all there."""

    exit_code = 8


class PublishError(ClipDeployError):
    """The destination cannot be written to, or does not hold what was recorded there; what served before serves on."""

    exit_code = 9


class DestinationBusy(PublishError):
    """Somebody else is at work at the destination, or was, and left the lock."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Guard imports that belong to the optional extra ``name``.

    Raises:
        MissingDependency: a library is absent (or is installed but broken), with the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        state = (
            "is not installed"
            if isinstance(error, ModuleNotFoundError)
            else f"does not import: {error}"
        )
        raise MissingDependency(
            f"{error.name or 'a library'} {state}", remedy=f"pip install 'clip-deploy[{name}]'"
        ) from error
