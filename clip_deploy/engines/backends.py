"""What a Triton backend is to us: one row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from clip_deploy.artifacts import EngineBuild, ExportedModel


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run an exported graph inside Triton.

    Args:
        name: what ``--backend`` and config.pbtxt say.
        summary: one line for help texts and ``doctor``.
        kinds: instance kinds that make sense, Triton's names by ours; ``auto`` is the default.
        build: an export → the files that the backend opens.
        needs: Python packages that must be importable where the model runs.
    """

    name: str
    summary: str
    kinds: dict[str, str]
    build: Callable[[ExportedModel], EngineBuild]
    needs: tuple[str, ...] = ()
