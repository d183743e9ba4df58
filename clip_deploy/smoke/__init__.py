"""A running model held against its reference: the right server, the right models, and every answer right."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from clip_deploy.errors import ClipDeployError
from clip_deploy.inputs.photographs import photographs
from clip_deploy.progress import Progress, silent
from clip_deploy.report import Check, Report, Status
from clip_deploy.smoke.checks import CLOSING_CHECKS, MODEL_CHECKS, SERVER_CHECKS
from clip_deploy.smoke.subject import Subject, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from clip_deploy.artifacts import ModelRepository
    from clip_deploy.client import TritonInferenceClient
    from clip_deploy.smoke.checks import ModelCheck
    from clip_deploy.smoke.outcome import Outcome
    from clip_deploy.smoke.subject import Target


def smoke_test(
    client: TritonInferenceClient,
    *,
    repository: ModelRepository | None = None,
    identity: str | None = None,
    concurrency: int = 100,
    images: Path | None = None,
    metrics: str | None = None,
    progress: Progress = silent,
) -> Report:
    """Run every check against a server and report all of them, whatever fails.

    Args:
        client: connected to the server.
        repository: what the server should be serving; without it nothing can be compared with torch.
        identity: the ``--id`` that the server was started with.
        concurrency: how many requests to send at once.
        images: a folder of the user's own photographs, with ``captions.json`` where it has one.
        metrics: ``host:port`` of the server's Prometheus metrics, where they are known.

    Raises:
        ServerError: nobody answers, or no encoder of ours is on the server.
    """
    server = client.connection.server()
    subject = Subject(
        client=client,
        repository=repository,
        identity=identity,
        concurrency=concurrency,
        pictures=photographs(images) if images else None,
        targets=targets_of(client, repository),
        metrics=metrics,
    )
    run = _Runner(progress)
    checks = [run(name, partial(check, subject)) for name, check in SERVER_CHECKS]
    checks += _of_models(run, subject, MODEL_CHECKS)
    checks += [
        run(name, partial(check, subject), "both encoders") for name, check in CLOSING_CHECKS
    ]
    facts = {"server": f"Triton {server.version} at {client.connection.url}"}
    facts |= {target.name: target.summary for target in subject.targets}
    return Report("smoke test", facts, tuple(checks))


def hold(
    client: TritonInferenceClient,
    targets: Sequence[Target],
    checks: Sequence[ModelCheck],
    *,
    concurrency: int = 1,
    progress: Progress = silent,
) -> Report:
    """Hold encoders that the caller chose, of any version and name, against their references; nothing else is asked.

    Args:
        targets: see ``subject.pinned``.
        checks: rows of ``MODEL_CHECKS``.
    """
    subject = Subject(client, None, None, concurrency, None, tuple(targets))
    facts = {target.name: target.summary for target in targets}
    return Report("smoke test", facts, tuple(_of_models(_Runner(progress), subject, checks)))


def _of_models(run: _Runner, subject: Subject, rows: Sequence[ModelCheck]) -> list[Check]:
    return [
        run(name, partial(check, subject, target), target.name)
        for target in subject.targets
        for name, check, towers in rows
        if target.tower in towers
    ]


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs one check; a failure that it raises is a row like any other, and the next check runs all the same."""

    progress: Progress

    def __call__(self, name: str, check: Callable[[], Outcome], model: str = "") -> Check:
        self.progress(f"{model}: {name}" if model else name)
        start = time.monotonic()
        try:
            outcome = check()
        except ClipDeployError as error:
            return Check(
                name,
                Status.FAILED,
                str(error),
                model,
                error.remedy,
                seconds=time.monotonic() - start,
            )
        seconds = time.monotonic() - start
        return Check(
            name, outcome.status, outcome.figure, model, outcome.remedy, outcome.data, seconds
        )
