"""A server that is a formula: throughput and latency follow a batcher's arithmetic, with noise; nothing is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from clip_deploy.bench.figures import Latency, Load, Run
from clip_deploy.tune.space import Settings


@dataclass
class SyntheticServer:
    """A closed loop in front of a dynamic batcher.

    A batch of n costs ``fixed_s + n × row_s`` on one core, less by the speed-up of its threads; threads beyond the
    cores slow everything.

    Args:
        noise: the relative spread of one measurement.
        asked: settings in the order in which they were measured.
    """

    cores: int = 2
    fixed_s: float = 0.010
    row_s: float = 0.020
    serial: float = 0.1
    crowding: float = 0.05
    noise: float = 0.02
    seed: int = 0
    asked: list[Settings] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def __call__(self, settings: Settings, load: Load) -> Run:
        self.asked.append(settings)
        throughput, p99_s = self.truth(settings, load)
        factor = math.exp(self.random.normal(0, self.noise))
        return run(load, throughput / factor, p99_s * factor)

    def truth(self, settings: Settings, load: Load) -> tuple[float, float]:
        """Answers per second and the 99th percentile, without noise."""
        users = load.users or 1
        threads = settings.threads or max(1, self.cores // settings.instances)
        busy = min(settings.instances, users)
        crowd = max(1.0, busy * threads / self.cores) * (1 + self.crowding * (busy - 1))
        delay_s = max(settings.queue_delay_us, 0) / 1e6
        waiting = users / busy
        # a batch fills when enough wait; otherwise the delay collects some of those that come back
        batch = max(
            1.0, min(settings.max_batch, waiting / 2 + waiting / 2 * min(1, delay_s / 0.004))
        )
        speed = self.serial + (1 - self.serial) / threads
        service_s = (self.fixed_s + batch * self.row_s * speed) * crowd
        cycle_s = service_s + (delay_s if batch < settings.max_batch else 0.1 * delay_s)
        throughput = busy * batch / cycle_s
        return throughput, max(users / throughput, cycle_s) * 1.25


def run(load: Load, throughput: float, p99_s: float, **changes: object) -> Run:
    """A run with these two figures."""
    seconds = 3.0
    count = max(int(throughput * seconds), 1)
    latency = Latency(p99_s * 0.7, p99_s * 0.7, p99_s * 0.9, p99_s, p99_s, p99_s)
    values = {
        "load": load,
        "seconds": seconds,
        "sent": count,
        "answered": count,
        "wrong": 0,
        "errors": {},
        "throughput": throughput,
        "latency": latency,
        "histogram": {1: count},
        "queue_s": 0.0,
        "compute_s": 0.0,
        "server_cores": None,
        "server_memory_mb": None,
        "client_cores": 0.0,
    }
    return Run(**values | changes)
