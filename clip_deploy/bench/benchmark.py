"""Every load on every subject, in turn and several times: drift of the machine falls on all of them alike."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from clip_deploy.bench.machine import describe
from clip_deploy.bench.measuring import measure
from clip_deploy.bench.reports import BenchReport, LoadResult
from clip_deploy.client import Connection
from clip_deploy.contract import PREFIX
from clip_deploy.triton_schema import model_config_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clip_deploy.bench.figures import Load, Run
    from clip_deploy.bench.reports import Settings
    from clip_deploy.bench.subject import BenchSubject

# A parameter longer than this is data, not a setting.
_LONGEST_SETTING = 120


@dataclass(frozen=True, slots=True)
class Step:
    """Which measurement this is: a subject (by its place), a load, and a repeat, counted from 0."""

    subject: int
    load: Load
    repeat: int


if TYPE_CHECKING:
    Show = Callable[[Step, str | Run], None]


def _unseen(step: Step, news: str | Run) -> None:
    """Nobody is watching."""


def benchmark(
    subjects: Sequence[BenchSubject],
    loads: Sequence[Load],
    settings: Settings,
    *,
    show: Show = _unseen,
) -> list[BenchReport]:
    """Measure all loads on all subjects; one report for each subject.

    Subjects take turns under each load, and all loads come before any is repeated.

    Args:
        show: is told how each measurement goes, twice a second, and its result.

    Raises:
        ServerError: a server died, or gives no answers.
    """
    runs: dict[tuple[int, Load], list[Run]] = {}
    for repeat in range(settings.repeats):
        for load in loads:
            for place, subject in enumerate(subjects):
                step = Step(place, load, repeat)
                run = measure(
                    subject,
                    load,
                    duration_s=settings.duration_s,
                    warmup_s=settings.warmup_s,
                    seed=settings.seed + repeat,
                    progress=lambda text, step=step: show(step, text),  # type: ignore[misc]
                )
                show(step, run)
                runs.setdefault((place, load), []).append(run)
    created, machine = datetime.now(timezone.utc).isoformat(timespec="seconds"), describe()
    return [
        BenchReport(
            created,
            machine,
            facts(subject),
            settings,
            tuple(LoadResult(load, tuple(runs[place, load])) for load in loads),
        )
        for place, subject in enumerate(subjects)
    ]


def facts(subject: BenchSubject) -> Mapping[str, str]:
    """What is served, from the server's own words, in the order in which a person wants to read it."""
    target = subject.target
    contract = target.served.contract
    with Connection(subject.url) as connection:
        server = connection.server()
        config = connection.config(target.name, target.version)
    batching = config.dynamic_batching
    kinds = model_config_pb2.ModelInstanceGroup.Kind
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    own = [
        f"{key} {value}"
        for key, value in sorted(parameters.items())
        if not key.startswith(PREFIX) and len(value) <= _LONGEST_SETTING
    ]
    delay = f"{batching.max_queue_delay_microseconds / 1000:g} ms"
    return {
        "model": contract.model,
        "tower": contract.tower.value,
        "weights": contract.pretrained,
        "precision": contract.precision.value,
        "input": f"{contract.input.dtype} {list(contract.input.shape)}",
        "backend": config.backend or config.platform,
        "max batch": str(config.max_batch_size),
        "queue delay": delay if config.HasField("dynamic_batching") else "no dynamic batching",
        "instances": ", ".join(
            f"{group.count} × {kinds.Name(group.kind).removeprefix('KIND_')}"
            for group in config.instance_group
        ),
        "parameters": ", ".join(own) or "none",
        "server": f"Triton {server.version}",
    }
