"""What clip-deploy.toml describes: a deployment, all of it, and nothing contradictory in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clip_deploy.engines import BACKENDS
from clip_deploy.engines.tensorrt.building import BuildOptions
from clip_deploy.errors import ConfigError
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.servers.install import TRITON_RELEASE
from clip_deploy.spec import EncoderSpec, EngineSpec, ServingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# The ladder, from the bottom up: each rung is nearer to the server that will serve.
RUNGS = ("lint", "embedded", "tensorrt-check", "container", "gpu")


@dataclass(frozen=True, slots=True)
class Checks:
    """What a deployment must stand.

    Args:
        strict: whether the linter's warnings fail, too.
        ignore: codes, or beginnings of codes, that the linter leaves out.
        run: whether the linter also runs the graphs on the CPU.
        concurrency: how many requests the smoke test sends at once.
        min_cosine: the least cosine to torch's answers, where the precision's own tolerance is not strict enough.
        images: photographs for the smoke test.
        require: rungs of the ladder that must not be skipped.
    """

    strict: bool = False
    ignore: tuple[str, ...] = ()
    run: bool = False
    concurrency: int = 100
    min_cosine: float | None = None
    images: Path | None = None
    require: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 2000:
            raise ConfigError(
                f"{self.concurrency} requests at once", remedy="send 1 to 2000 with --concurrency"
            )
        if self.min_cosine is not None and not 0 < self.min_cosine <= 1:
            raise ConfigError(
                f"a least cosine of {self.min_cosine}", remedy="write one up to 1, as 0.9999"
            )
        if unknown := sorted(set(self.require) - set(RUNGS)):
            raise ConfigError(
                f"the ladder has no rung {unknown[0]!r}", remedy=f"require {', '.join(RUNGS)}"
            )


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where a repository goes when everything holds.

    Args:
        destination: a folder, or an address of object storage; credentials come from where its library looks for them.
        keep: how many versions stay there; None keeps all.
        reload: gRPC addresses of servers that take the new version, one after the other.
    """

    destination: str
    keep: int | None = None
    reload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep {self.keep} versions", remedy="keep 1 at least: it serves")
        if "@" in self.destination.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                "a destination with a user's name or a password in it",
                remedy="put credentials where the storage's library looks for them, as in AWS_PROFILE",
            )


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model from its weights to the servers that carry it.

    Args:
        said: every key of its tables, with its table's name before it, as the file or its defaults have it.
        out: the folder of the exports, of what is remembered about them and of the reports.
        source: the files and folders that ``encoder.model`` and ``encoder.pretrained`` name, where they name any.
        server: how to start a server for the smoke test; its release is the one that is linted and built for, too.
    """

    name: str
    said: Mapping[str, Any]
    encoder: EncoderSpec
    out: Path
    repository: Path
    backend: str = "onnxruntime"
    engine: EngineSpec = field(default_factory=EngineSpec)
    plan: BuildOptions = field(default_factory=BuildOptions)
    in_container: bool = False
    serving: ServingSpec = field(default_factory=ServingSpec)
    templates: Path | None = None
    launcher: str | None = None
    server: ServerOptions = field(default_factory=ServerOptions)
    checks: Checks = field(default_factory=Checks)
    publish: Publishing | None = None
    source: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for what, remedy in _contradictions(self):
            raise ConfigError(what, remedy=remedy)

    @property
    def engine_name(self) -> str:
        """The engine that runs inside the backend."""
        return self.engine.name or next(iter(BACKENDS[self.backend].engines))

    @property
    def starts(self) -> str:
        """The launcher of the server for the smoke test: the one that was named, or the first that has the backend."""
        return self.launcher or next(
            name
            for name, row in LAUNCHERS.items()
            if row.backends is None or self.backend in row.backends
        )

    @property
    def wants_gpu(self) -> bool:
        return self.backend == "tensorrt" or self.serving.kind == "gpu"

    def words(self, *tables: str) -> dict[str, Any]:
        """What the file says in these tables."""
        return {key: value for key, value in self.said.items() if key.partition(".")[0] in tables}


def _contradictions(d: Deployment) -> Iterator[tuple[str, str]]:
    """(what, how to mend it) of everything in a deployment that cannot hold together with the rest."""
    backend = BACKENDS[d.backend]
    if d.engine_name not in backend.engines:
        yield (
            f"backend {d.backend} has no engine {d.engine_name!r}",
            f"use --engine {' or '.join(backend.engines)}, or another --backend",
        )
    has = LAUNCHERS[d.starts].backends
    if has is not None and d.backend not in has:
        fitting = [n for n, row in LAUNCHERS.items() if row.backends and d.backend in row.backends]
        yield (
            f"the {d.starts} server cannot load backend {d.backend}",
            f"use --launcher {' or '.join(fitting)}, or --backend {' or '.join(sorted(has))}",
        )
    yield from _of_the_engine(d)
    yield from _of_batches(d)
    if d.serving.kind not in backend.kinds:
        yield (
            f"backend {d.backend} does not run as instance kind {d.serving.kind}",
            f"use --instance-kind {' or '.join(backend.kinds)}, or another --backend",
        )
    if d.serving.cuda_graphs and d.backend != "tensorrt":
        yield (
            f"CUDA graphs with backend {d.backend}",
            "drop --cuda-graphs, or use --backend tensorrt",
        )
    if d.starts == "embedded" and d.said.get("server.triton_release") not in (
        *(None, ServerOptions().release),
        TRITON_RELEASE,
    ):
        yield (
            f"Triton {d.server.release} in the embedded server, which is {TRITON_RELEASE}",
            "drop --triton-release, or use --launcher container",
        )
    yield from _of_rungs(d)


def _of_the_engine(d: Deployment) -> Iterator[tuple[str, str]]:
    graph, asked = d.encoder.precision.value, d.engine.precision
    if d.engine_name == "openvino":
        if graph != "fp32":
            yield (
                f"engine openvino on {graph} graphs",
                "use --precision fp32 for the encoder: OpenVINO computes in bf16 by itself",
            )
    elif asked not in ("auto", graph):
        yield (
            f"engine {d.engine_name} in {asked}, and graphs in {graph}",
            f"use --precision {graph} for the engine or leave it out, or --engine openvino",
        )
    if d.backend != "tensorrt" and (d.plan != BuildOptions() or d.in_container):
        yield (
            f"a plan for TensorRT, and backend {d.backend}",
            "use --backend tensorrt, or take the plan out",
        )


def _of_batches(d: Deployment) -> Iterator[tuple[str, str]]:
    checked = d.encoder.max_batch
    built = d.plan.profile.most if d.plan.profile else checked
    if built > checked:
        yield (
            f"batch {d.plan.profile} of the plans, and graphs that are checked up to {checked}",
            f"use --max-batch {built} for the encoder, or build for {checked} or less",
        )
    served = d.serving.max_batch
    if served is not None and served > min(built, checked):
        yield (
            f"batches of {served} are served, and {min(built, checked)} is the largest that is checked",
            f"use --max-batch {served} for the encoder, or serve {min(built, checked)} or less",
        )
    largest = min(built, checked) if served is None else served
    if too_large := [n for n in d.serving.preferred_batch_sizes if not 1 <= n <= largest]:
        yield (
            f"preferred batch size {too_large[0]} with max batch {largest}",
            "prefer sizes from 1 to the max batch, or better none",
        )


def _of_rungs(d: Deployment) -> Iterator[tuple[str, str]]:
    required = d.checks.require
    if "container" in required and d.starts != "container":
        yield (
            f"rung container is required, and backend {d.backend} is served by the {d.starts} server",
            LAUNCHERS["container"].otherwise,
        )
    if "gpu" in required and not d.wants_gpu:
        yield (
            f"rung gpu is required, and backend {d.backend} is asked to run on no GPU",
            "use --instance-kind gpu or --backend tensorrt",
        )
