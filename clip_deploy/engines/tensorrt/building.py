"""An exported graph → a TensorRT plan, by Polygraphy on this machine's GPU. The one home of tensorrt and polygraphy.

Networks are strongly typed: the graph's own types decide. TensorRT 10 has a flag for that, TensorRT 11 knows nothing
else, and both are told the same. No precision flag is ever touched, since TensorRT 11 has none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import BuiltPlan
from clip_deploy.engines.tensorrt import PLAN, plan_folder
from clip_deploy.engines.tensorrt.device import device
from clip_deploy.engines.tensorrt.reading import Layers, PlanFacts, require
from clip_deploy.errors import ConfigError, EngineError, MissingDependency, extra
from clip_deploy.files import building, digest, replacing
from clip_deploy.plan import read_header
from clip_deploy.progress import Progress, silent
from clip_deploy.releases import IMAGE, release, with_tensorrt
from clip_deploy.spec import BatchProfile

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.artifacts import ExportedModel

# What --hardware-compat says → TensorRT's name of it.
HARDWARE_COMPATIBILITY = {
    "none": None,
    "ampere+": "AMPERE_PLUS",
    "same-cc": "SAME_COMPUTE_CAPABILITY",
}
_OLDEST = (10, 12)
# The timing cache's name in the folder of a build: a copy, so that a failed build changes nothing.
TIMING = "timing.cache"
# TensorRT's names of tensor types → Triton's.
_DTYPES = {"FLOAT": "FP32", "HALF": "FP16", "INT32": "INT32", "UINT8": "UINT8", "INT64": "INT64"}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build.

    Args:
        profile: the batch sizes; None takes 1 to the largest that the export was checked at.
        release: the Triton release that will load the plan, as 26.05; None leaves that open.
        timing_cache: a file that remembers measured kernels; it makes the next build faster, and is updated.
        hardware: ``none``, ``ampere+`` or ``same-cc``: on which other GPUs the plan may run, at some cost in speed.
        version_compatible: whether later TensorRT versions may load it; Triton must be told so, too.
    """

    profile: BatchProfile | None = None
    release: str | None = None
    timing_cache: Path | None = None
    hardware: str = "none"
    version_compatible: bool = False

    def __post_init__(self) -> None:
        if self.hardware not in HARDWARE_COMPATIBILITY:
            raise ConfigError(
                f"hardware compatibility {self.hardware!r} is unknown",
                remedy=f"use {', '.join(HARDWARE_COMPATIBILITY)}",
            )
        if self.release is not None:
            release(self.release)
        if self.timing_cache is not None:
            _require_cache(self.timing_cache)

    def profile_for(self, exported: ExportedModel) -> BatchProfile:
        """The batch sizes, which the export must have been checked at."""
        profile = self.profile or BatchProfile.up_to(exported.max_batch)
        if profile.most > exported.max_batch:
            raise ConfigError(
                f"batches of {profile.most} for {exported.name}, which was checked up to {exported.max_batch}",
                remedy=f"export it with --max-batch {profile.most}, or build for {exported.max_batch} or less",
            )
        return profile


def _require_cache(path: Path) -> None:
    """Refuse a place where no timing cache can be, and a file that is none, before anything is built."""
    remedy = "name a file for --timing-cache, in a folder that exists"
    try:
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(4096)
        elif path.exists() or not path.resolve().parent.is_dir():
            raise ConfigError(f"{path} cannot be a timing cache", remedy=remedy)
        else:
            head = b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from error
    if head and head.isascii() and b"\0" not in head:
        raise ConfigError(f"{path} is a text, and no timing cache", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Made:
    """A plan as a builder leaves it: its file, what was read back from it, and who built it."""

    facts: PlanFacts
    provenance: dict[str, Any]


def build(
    exported: ExportedModel, options: BuildOptions, *, progress: Progress = silent
) -> BuiltPlan:
    """Build a plan beside the export and read it back; what stood there stays until the new one is right.

    Raises:
        MissingDependency: no driver, no TensorRT, or one that is too old; found before anything heavy is imported.
        EngineError: the release carries another TensorRT, the graph does not build, or the plan is not what was asked.
    """
    require_machine()
    require_release(
        options.release, installed_version(), moves_on=options.version_compatible, warn=progress
    )
    return keep(exported, options, _by_polygraphy, progress)


def keep(
    exported: ExportedModel, options: BuildOptions, builder: Any, progress: Progress
) -> BuiltPlan:
    """Run a builder in a folder of its own, hold its plan against what was asked, and put it beside the export."""
    profile = options.profile_for(exported)
    exported.require_whole()
    target = plan_folder(exported)
    with building(target, EngineError) as folder:
        progress(f"{exported.name}: building a plan for batches {profile}")
        if options.timing_cache is not None and options.timing_cache.is_file():
            shutil.copyfile(options.timing_cache, folder / TIMING)
        made = builder(exported, profile, options, folder)
        progress(f"{exported.name}: reading it back")
        plan = folder / PLAN
        size = plan.stat().st_size
        header = read_header(plan)
        if header is None or header.product != "TensorRT":
            raise EngineError(
                f"what was built is no TensorRT plan: {header or 'it has no header'}",
                remedy="check which tensorrt is installed (clip-deploy doctor)",
            )
        require(made.facts, exported, profile, size)
        built_by = header.version[:3]
        require_release(options.release, built_by, moves_on=options.version_compatible)
        cache_sha256 = _keep_cache(folder / TIMING, options.timing_cache)
        provenance = dict(made.provenance) | {
            "tensorrt": str(header),
            "triton_release": options.release,
            "graph_sha256": exported.graph.sha256,
            "hardware_compatibility": options.hardware,
            "version_compatible": options.version_compatible,
            "timing_cache_sha256": cache_sha256,
        }
        BuiltPlan(
            folder, PLAN, digest([plan]), size, profile, made.facts.layers.half_share, provenance
        ).write()
    return BuiltPlan.read(target)


def _keep_cache(used: Path, wanted: Path | None) -> str | None:
    """Put the timing cache that a build has used in its place; its digest, or None where there is none."""
    for lock in used.parent.glob(f"{used.name}*.lock"):
        lock.unlink()
    if wanted is None or not used.is_file():
        return None
    with replacing(wanted.resolve()) as temporary:
        shutil.copyfile(used, temporary)
    used.unlink()
    return digest([wanted])


def require_machine() -> None:
    """Raise MissingDependency unless a plan can be built here; nothing is imported to find out.

    TensorRT without a driver may end the process, so the driver comes first.
    """
    if device() is None:
        raise MissingDependency(
            "this machine has no NVIDIA driver or no GPU, and TensorRT builds on the GPU that will run the plan",
            remedy="run build-trt on that machine; build-trt --check looks at the graph without a GPU",
        )
    for package in ("tensorrt", "polygraphy"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"{package} is not installed",
                remedy="pip install 'clip-deploy[gpu]', or build with --in-container",
            )
    if installed_version()[:2] < _OLDEST:
        raise MissingDependency(
            f"TensorRT {_dotted(installed_version())} is too old to be strongly typed",
            remedy="pip install 'tensorrt>=10.12'",
        )


def installed_version() -> tuple[int, ...]:
    """TensorRT's version by its package's metadata."""
    for name in ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"):
        try:
            parts = version(name).split(".")
        except PackageNotFoundError:
            continue
        return tuple(int(part) for part in parts[:3] if part.isdecimal())
    return (0,)


def require_release(
    name: str | None,
    building_version: tuple[int, ...],
    *,
    moves_on: bool = False,
    warn: Progress = silent,
) -> None:
    """Raise EngineError where the Triton release is known to carry another TensorRT than the one that builds.

    Args:
        moves_on: whether the plan is version-compatible, so that a later TensorRT loads it, too.
        warn: told where the release's TensorRT is not known for certain.
    """
    if name is None:
        return
    bounds, version = release(name).tensorrt_bounds(), building_version[:3]
    if bounds is None or bounds[0] != bounds[1]:
        warn(f"which TensorRT Triton {name} carries is not known for certain: not compared exactly")
    if bounds is None or bounds[0] <= version <= bounds[1] or (moves_on and version <= bounds[1]):
        return
    least, most = map(_dotted, bounds)
    has = least if least == most else f"{least} to {most}"
    fitting = ", ".join(each.name for each in with_tensorrt(building_version)) or "no known release"
    raise EngineError(
        f"Triton {name} carries TensorRT {has}, and {_dotted(version)} builds here, which fits {fitting}",
        remedy=f"build inside its image, {IMAGE.format(release=name)}: "
        f"clip-deploy build-trt … --in-container --triton-release {name}",
    )


def _by_polygraphy(
    exported: ExportedModel, profile: BatchProfile, options: BuildOptions, folder: Path
) -> Made:
    with extra("gpu"):
        import tensorrt as trt
    data = plan_bytes(trt, exported, profile, options, folder / TIMING)
    (folder / PLAN).write_bytes(data)
    builder = {"builder": f"Polygraphy with TensorRT {trt.__version__}", "container": None}
    return Made(
        read_back(trt, data, host_code=options.version_compatible), (device() or {}) | builder
    )


def plan_bytes(
    trt: Any,
    exported: ExportedModel,
    profile: BatchProfile,
    options: BuildOptions,
    cache_file: Path,
) -> bytes:
    """The serialised engine. ``trt`` is the tensorrt module that Polygraphy uses; ``cache_file`` its timing cache.

    Raises:
        EngineError: the graph does not parse or build.
    """
    with extra("gpu"):
        from polygraphy.backend.trt import (
            CreateConfig,
            EngineBytesFromNetwork,
            NetworkFromOnnxPath,
            Profile,
        )
        from polygraphy.exception import PolygraphyException
        from polygraphy.logger import G_LOGGER
    tensor = exported.contract.input
    shapes = [(size, *tensor.shape) for size in (profile.least, profile.best, profile.most)]
    level = HARDWARE_COMPATIBILITY[options.hardware]
    cache = str(cache_file) if options.timing_cache else None
    try:
        # It reports to stdout, which is for results.
        with contextlib.redirect_stdout(io.StringIO()), G_LOGGER.verbosity(G_LOGGER.ERROR):
            network = NetworkFromOnnxPath(
                str(exported.graph_files[0]),
                strongly_typed=hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"),
            )
            config = CreateConfig(
                profiles=[Profile().add(tensor.name, *shapes)],
                load_timing_cache=cache if cache_file.is_file() else None,
                profiling_verbosity=trt.ProfilingVerbosity.DETAILED,
                hardware_compatibility_level=getattr(trt.HardwareCompatibilityLevel, level)
                if level
                else None,
                version_compatible=options.version_compatible,
            )
            built = EngineBytesFromNetwork(network, config=config, save_timing_cache=cache)()
    except PolygraphyException as error:
        raise EngineError(
            f"TensorRT does not build {exported.name}: {str(error).strip().splitlines()[-1][:300]}",
            remedy="clip-deploy build-trt --check names the operators",
        ) from error
    return bytes(built)


def read_back(trt: Any, data: bytes, *, host_code: bool = False) -> PlanFacts:
    """Load a plan and ask it for its tensors, its profile, and the types of its layers.

    A version-compatible plan carries a runtime of its own, which is code: it loads only where ``host_code`` is allowed,
    and this one was built a moment ago.
    """
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    if host_code:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise EngineError(
            "TensorRT does not load the plan that it has built",
            remedy="check the driver (clip-deploy doctor)",
        )
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = {
        name: (
            "input" if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else "output",
            _DTYPES.get(engine.get_tensor_dtype(name).name, engine.get_tensor_dtype(name).name),
            tuple(engine.get_tensor_shape(name)),
        )
        for name in names
    }
    profile: dict[str, Any] = {
        name: tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, 0))
        for name in names
        if tensors[name][0] == "input"
    }
    inspector = engine.create_engine_inspector()
    layers = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return PlanFacts(tensors, profile, Layers.read(layers))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
