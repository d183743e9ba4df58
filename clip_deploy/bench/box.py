"""A box: how one server is set up and what its model costs, read from a server's config or from a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.bench.curve import BatchCurve
from clip_deploy.bench.stored import read_stored
from clip_deploy.errors import ConfigError
from clip_deploy.spec import ServingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clip_deploy.triton_schema import ModelConfig

_KINDS = ("bench", "capacity")
_SETTINGS = (
    *("max_batch", "queue_delay_us", "instances"),
    *("preferred_batch_sizes", "max_queue_size", "queue_timeout_us", "timeout_action"),
)


@dataclass(frozen=True, slots=True)
class Box:
    """One server of one model. Where a load needs several, all are alike.

    Args:
        model: its name.
        serving: its settings; ``max_batch`` 1 where Triton does not batch.
        curve: what its batches cost, measured with the same number of instances.
    """

    model: str
    serving: ServingSpec
    curve: BatchCurve

    def __post_init__(self) -> None:
        self.curve.seconds(max(1, self.serving.max_batch or 1), np.array([0.5]))

    @property
    def capacity(self) -> float:
        """Requests per second when every batch is as large as it can be: beyond it, a queue grows."""
        size = max(1, self.serving.max_batch or 1)
        if self.serving.max_queue_size:
            size = min(size, self.serving.max_queue_size)
        each_s = self.curve.mean_s(size) + size * self.curve.stolen_s / self.serving.instances
        return self.serving.instances * size / each_s

    @property
    def alone_s(self) -> float:
        """The p99 latency of requests that never meet another: no load has less."""
        waits = 1 not in self.serving.preferred_batch_sizes and (self.serving.max_batch or 1) > 1
        delay_s = self.serving.queue_delay_us / 1e6 if waits else 0.0
        return float(self.curve.seconds(1, np.array([0.99]))[0]) + delay_s + self.curve.overhead_s

    def changed(self, **settings: int | None) -> Box:
        """The same box with other settings; None leaves one as it is."""
        chosen = {name: value for name, value in settings.items() if value is not None}
        return Box(self.model, replace(self.serving, **chosen), self.curve)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        settings = {name: getattr(self.serving, name) for name in _SETTINGS}
        return {"model": self.model, "serving": settings, **self.curve.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Box:
        settings = {name: data["serving"][name] for name in _SETTINGS}
        preferred = tuple(settings.pop("preferred_batch_sizes"))
        serving = ServingSpec(**settings, preferred_batch_sizes=preferred)
        return cls(str(data["model"]), serving, BatchCurve.from_json(data))


def read_box(path: Path) -> Box:
    """A box from the ``curve`` of what ``bench --json`` or ``capacity --json`` wrote.

    Raises:
        ConfigError: it is another file, one of another version, or one without a curve.
    """
    remedy = "write one with clip-deploy bench (or capacity) REPOSITORY --json FILE"

    def kept(data: Mapping[str, Any]) -> Box:
        if not data.get("curve"):
            raise ConfigError(f"{path} holds no batch-latency curve", remedy=remedy)
        return Box.from_json(data["curve"])

    return read_stored(path, _KINDS, kept, remedy=remedy)


def serving_of(config: ModelConfig) -> ServingSpec:
    """The settings of a model, from its configuration as the server completed it."""
    instances = sum(max(1, g.count) * max(1, len(g.gpus)) for g in config.instance_group) or 1
    if not config.HasField("dynamic_batching"):
        return ServingSpec(max_batch=1, queue_delay_us=0, instances=instances)
    batching = config.dynamic_batching
    policy = batching.default_queue_policy
    return ServingSpec(
        max_batch=max(1, config.max_batch_size),
        queue_delay_us=batching.max_queue_delay_microseconds,
        instances=instances,
        preferred_batch_sizes=tuple(batching.preferred_batch_size),
        max_queue_size=policy.max_queue_size,
        queue_timeout_us=policy.default_timeout_microseconds,
        timeout_action="delay"
        if policy.timeout_action and policy.default_timeout_microseconds
        else "reject",
    )
