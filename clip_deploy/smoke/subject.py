"""What is under test: a server, its encoders, and what is known about each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from clip_deploy.artifacts import MANIFEST, REFERENCE, ExportedModel
from clip_deploy.client.served import ServedModel
from clip_deploy.compare import Reference
from clip_deploy.errors import ConfigError, ServerError
from clip_deploy.inputs.images import to_pixels
from clip_deploy.inputs.photographs import photographs
from clip_deploy.spec import TOLERANCES, Tolerance, Tower

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from clip_deploy.artifacts import ModelRepository, RepositoryModel
    from clip_deploy.client import Connection, TritonInferenceClient
    from clip_deploy.inputs.photographs import Photographs

_Measured = TypeVar("_Measured")


@dataclass(frozen=True, slots=True)
class Target:
    """One encoder under test.

    ``inputs`` are real ones, ``[n, …]`` with n ≥ 2. ``reference`` and ``exported`` are known where the repository is
    at hand.
    """

    tower: Tower
    version: str
    served: ServedModel
    inputs: NDArray[Any]
    reference: Reference | None
    exported: ExportedModel | None

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def limits(self) -> Tolerance:
        return TOLERANCES[self.served.precision, self.tower]

    @property
    def max_batch(self) -> int:
        """The largest batch to try: what the server allows; where it does not batch, all inputs at once."""
        return self.served.max_batch or len(self.inputs)

    def ask(self, connection: Connection, rows: NDArray[Any]) -> NDArray[np.float32]:
        """One request with all rows to the version under test; the answer as it came."""
        contract = self.served.contract
        return connection.infer(
            self.name, {contract.input.name: rows}, contract.output.name, version=self.version
        )

    @property
    def summary(self) -> str:
        contract = self.served.contract
        trained = "" if contract.trained else " (its vectors mean nothing)"
        weights = f"{contract.model}, {contract.pretrained}{trained}"
        version = self.version or "(newest)"
        engine = f" in {self.served.engine}" if self.served.engine else ""
        arithmetic = f"{self.served.precision.value}{engine}"
        return f"version {version} of {weights}, {arithmetic}, max batch {self.max_batch}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A server under test.

    ``identity`` is the ``--id`` of a server that we started; ``pictures`` are the user's own; ``memo`` holds what one
    check measured and another judges.
    """

    client: TritonInferenceClient
    repository: ModelRepository | None
    identity: str | None
    concurrency: int
    pictures: Photographs | None
    targets: tuple[Target, ...]
    metrics: str | None = None
    memo: dict[Any, Any] = field(default_factory=dict)

    def ask(self, target: Target, rows: NDArray[Any]) -> NDArray[np.float32]:
        """One request with all rows to the version under test; the answer as it came."""
        return target.ask(self.client.connection, rows)

    def once(self, key: object, measure: Callable[[], _Measured]) -> _Measured:
        """What ``measure`` gave the first time it was asked under this key."""
        if key not in self.memo:
            self.memo[key] = measure()
        measured: _Measured = self.memo[key]
        return measured

    def target(self, tower: Tower) -> Target | None:
        return next((target for target in self.targets if target.tower is tower), None)


def targets_of(
    client: TritonInferenceClient, repository: ModelRepository | None
) -> tuple[Target, ...]:
    """The encoders to test: those of the repository, or those that the server has.

    Raises:
        ServerError: there is none.
    """
    if repository is not None:
        ours = {model.name: model for model in repository.models}
        towers = [tower for tower in Tower if tower.model_name in ours]
        found = tuple(
            _target(client, tower, repository, ours[tower.model_name]) for tower in towers
        )
    else:
        names = {key.rpartition(":")[0] for key in client.connection.index()}
        found = tuple(
            _target(client, tower, None, None) for tower in Tower if tower.model_name in names
        )
    if not found:
        raise ServerError(
            f"there is no {' or '.join(t.model_name for t in Tower)} to test at {client.connection.url}",
            remedy="render one with clip-deploy render-config",
        )
    return found


def _target(
    client: TritonInferenceClient,
    tower: Tower,
    repository: ModelRepository | None,
    model: RepositoryModel | None,
) -> Target:
    served = client.model(tower)
    if repository is None or model is None:
        return Target(tower, "", served, _made_inputs(served), None, None)
    folder = repository.version_folder(model)
    if not (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder} holds no {MANIFEST}", remedy="render the model with this clip-deploy"
        )
    reference = Reference.read(folder / REFERENCE, tower)
    return Target(
        tower, folder.name, served, reference.inputs, reference, ExportedModel.read(folder)
    )


def pinned(
    client: TritonInferenceClient, tower: Tower, folder: Path, *, name: str, version: str
) -> Target:
    """One version of an encoder, under whatever name a server has it, with the reference that lies in ``folder``.

    Args:
        version: its number; empty for the one that a request without a number gets.
    """
    reference = Reference.read(folder / REFERENCE, tower)
    served = ServedModel.from_config(client.connection.config(name, version))
    return Target(tower, version, served, reference.inputs, reference, ExportedModel.read(folder))


def _made_inputs(served: ServedModel) -> NDArray[Any]:
    """Real inputs where no reference is at hand: the photographs of the package, or their captions."""
    pictures = photographs(None)
    if served.contract.preprocess is not None:
        return to_pixels(pictures.paths, served.contract.preprocess)
    assert served.tokenizer is not None  # a text encoder's config has it
    return served.tokenizer(pictures.captions)
