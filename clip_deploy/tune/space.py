"""What may be tuned: each knob is a row that says how a config tells it, how it is written there, and what to try."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from clip_deploy.triton_schema import ModelConfig

# Threads of all instances together may exceed the cores by this much: a thread that waits leaves its core to another.
_OVERSUBSCRIPTION = 1.5
_THREADS = "intra_op_thread_count"
_THREADED = {"python", "onnxruntime"}  # backends that read it
ALONE = -1  # the queue delay of a config without dynamic batching: every request runs by itself
_DELAYS_US = (0, 500, 1000, 2000, 5000, 10000, 20000)


@dataclass(frozen=True, slots=True, order=True)
class Settings:
    """One choice for every knob; the fields are named as the rows of ``KNOBS``.

    Args:
        queue_delay_us: how long a request waits for company; ``ALONE`` where nothing is batched.
        instances: copies of the model that run side by side.
        threads: of each instance; 0 shares the cores among them.
        max_batch: rows that run together at most; 0 for a model that Triton does not batch.
    """

    queue_delay_us: int
    instances: int
    threads: int
    max_batch: int

    def __str__(self) -> str:
        threads = f"{self.threads} threads each" if self.threads else "cores shared"
        copies = f"{self.instances} instance{'s' if self.instances != 1 else ''}"
        delay = "no batching" if self.queue_delay_us == ALONE else f"delay {self.queue_delay_us} µs"
        return f"{delay}, {copies}, {threads}, max batch {self.max_batch}"

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def of(cls, config: ModelConfig) -> Settings:
        """What a config says."""
        return cls(**{knob.name: knob.read(config) for knob in KNOBS})

    def written(self, config: ModelConfig) -> ModelConfig:
        """A copy of a config that says this."""
        copy = type(config)()
        copy.CopyFrom(config)
        for knob in KNOBS:
            value = getattr(self, knob.name)
            if knob.read(copy) != value:
                knob.write(copy, value)
        return copy


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What decides which values are worth trying.

    Args:
        default: what the config says now; every knob may keep it.
        cores: of the machine that serves.
        at_once: requests that can be under way at the same time, at most; None where nobody can say.
        budget_us: what the 99th percentile may be.
        fixed: knobs that this config does not let us turn.
    """

    default: Settings
    cores: int
    at_once: int | None
    budget_us: float
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting.

    Args:
        name: the field of ``Settings``.
        label: what tables call it.
        read: the value that a config tells.
        write: puts a value into a config.
        values: what is worth trying; the default need not be among them.
    """

    name: str
    label: str
    read: Callable[[ModelConfig], int]
    write: Callable[[ModelConfig, int], None]
    values: Callable[[Surroundings], Iterable[int]]


def _read_delay(config: ModelConfig) -> int:
    if not config.HasField("dynamic_batching"):
        return ALONE
    return int(config.dynamic_batching.max_queue_delay_microseconds)


def _write_delay(config: ModelConfig, value: int) -> None:
    if value == ALONE:
        config.ClearField("dynamic_batching")
        return
    config.dynamic_batching.SetInParent()  # a delay of 0 alone would leave no trace
    config.dynamic_batching.max_queue_delay_microseconds = value


def _delays(around: Surroundings) -> Iterable[int]:
    return (delay for delay in _DELAYS_US if delay < around.budget_us)


def _read_instances(config: ModelConfig) -> int:
    return sum(group.count or 1 for group in config.instance_group) or 1


def _write_instances(config: ModelConfig, value: int) -> None:
    if not config.instance_group:
        config.instance_group.add()
    config.instance_group[0].count = value


def _read_threads(config: ModelConfig) -> int:
    text = config.parameters[_THREADS].string_value if _THREADS in config.parameters else ""
    return int(text) if text.isdecimal() else 0


def _write_threads(config: ModelConfig, value: int) -> None:
    if value:
        config.parameters[_THREADS].string_value = str(value)
    else:
        del config.parameters[_THREADS]


def _up_to_cores(around: Surroundings) -> Iterable[int]:
    return range(1, around.cores + 1) if around.cores <= 4 else _doubling(around.cores)


def _write_max_batch(config: ModelConfig, value: int) -> None:
    """With everything that may not exceed it: Triton can die of a warmup batch above the maximum."""
    for sample in config.model_warmup:
        if sample.batch_size > value:
            sample.name = sample.name.replace(f"batch of {sample.batch_size}", f"batch of {value}")
            sample.batch_size = value
    batching = config.dynamic_batching
    preferred = [size for size in batching.preferred_batch_size if size <= value]
    if len(preferred) < len(batching.preferred_batch_size):
        batching.preferred_batch_size[:] = preferred
    config.max_batch_size = value


def _batches(around: Surroundings) -> Iterable[int]:
    """Up to what was checked; a batch that can never fill is the same as one that just can."""
    most = around.default.max_batch
    enough = next((size for size in _doubling(most) if size >= (around.at_once or most)), most)
    return (size for size in _doubling(most) if size <= enough)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, … and the greatest itself."""
    powers = itertools.takewhile(lambda size: size < most, (1 << n for n in itertools.count()))
    return [*powers, most]


KNOBS = (
    Knob("queue_delay_us", "queue delay, µs", _read_delay, _write_delay, _delays),
    Knob("instances", "instances", _read_instances, _write_instances, _up_to_cores),
    Knob(
        "threads",
        "threads each",
        _read_threads,
        _write_threads,
        lambda around: (0, *_up_to_cores(around)),
    ),
    Knob(
        "max_batch",
        "max batch",
        lambda config: int(config.max_batch_size),
        _write_max_batch,
        _batches,
    ),
)


@dataclass(frozen=True, slots=True)
class Space:
    """All settings worth trying: ``values`` of each knob, ascending, and the default, which is one of them."""

    values: Mapping[str, tuple[int, ...]]
    default: Settings
    cores: int

    @classmethod
    def around(cls, surroundings: Surroundings) -> Space:
        """The space for a config on a machine under a load."""
        values = {}
        for knob in KNOBS:
            kept = getattr(surroundings.default, knob.name)
            tried = () if knob.name in surroundings.fixed else knob.values(surroundings)
            values[knob.name] = tuple(sorted({kept, *tried}))
        space = cls(values, surroundings.default, surroundings.cores)
        return replace(space, default=space.plain(surroundings.default))

    def __iter__(self) -> Iterator[Settings]:
        """Each once, whatever ways there are to write it."""
        grid = itertools.product(*self.values.values())
        choices = (Settings(**dict(zip(self.values, choice))) for choice in grid)
        plain = {self.plain(choice): None for choice in choices if self.is_bearable(choice)}
        return iter(plain)

    def is_bearable(self, choice: Settings) -> bool:
        """Whether its threads fit the cores; what the config says already is never in question."""
        fits = choice.instances * choice.threads <= self.cores * _OVERSUBSCRIPTION
        return fits or choice == self.default

    def plain(self, choice: Settings) -> Settings:
        """The one way to write settings that do the same: a share of the cores, no delay where nobody can join."""
        shared = max(1, self.cores // choice.instances)
        if choice.threads == shared and 0 in self.values["threads"]:
            choice = replace(choice, threads=0)
        if choice.max_batch == 1:
            choice = replace(choice, queue_delay_us=self.values["queue_delay_us"][0])
        return choice

    @property
    def least(self) -> Settings:
        """What answers a lone request soonest: all cores for one, and nobody to wait for."""
        first = {name: values[0] for name, values in self.values.items()}
        return self.plain(Settings(**first))


def fixed_knobs(config: ModelConfig) -> frozenset[str]:
    """Knobs that a config leaves no choice for: batching where there is none, counts where groups differ."""
    fixed: set[str] = set()
    if config.max_batch_size < 1:
        fixed |= {"queue_delay_us", "max_batch"}
    if config.HasField("sequence_batching"):
        fixed |= {"queue_delay_us"}
    if len(config.instance_group) > 1:
        fixed |= {"instances"}
    if (config.backend or config.platform.removesuffix("_onnx")) not in _THREADED:
        fixed |= {"threads"}
    return frozenset(fixed)


def settings_from_json(data: Mapping[str, Any]) -> Settings:
    """Settings as a study keeps them."""
    return Settings(**{knob.name: int(data[knob.name]) for knob in KNOBS})
