"""Repositories to publish: two towers of small graphs that the linter reads, of the weights that a test wants."""

from __future__ import annotations

from pathlib import Path

from clip_deploy.engines import BACKENDS
from clip_deploy.repository import assemble
from clip_deploy.spec import ServingSpec, Tower
from tests.factories import exported
from tests.lint_examples import tower_graph


def repository(
    folder: Path,
    weights: str = "a",
    *,
    towers: tuple[Tower, ...] = tuple(Tower),
    delay_us: int = 5000,
) -> Path:
    """``folder/models`` with one version of each tower."""
    serving = ServingSpec(queue_delay_us=delay_us)
    for tower in towers:
        changes = {"graph": tower_graph(tower), "weights_sha256": weights * 64}
        model = exported(folder / "build", tower, **changes)
        assemble(BACKENDS["python"].build(model), serving, folder / "models")
    return folder / "models"
