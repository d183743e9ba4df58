"""A graph held against TensorRT's ONNX parser, by TensorRT for RTX, which needs no GPU to parse and to build."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_deploy.engines.tensorrt.building import BuildOptions
from clip_deploy.errors import extra

if TYPE_CHECKING:
    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.spec import BatchProfile


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the parser and the builder say.

    Args:
        version: of TensorRT for RTX.
        layers: how many the graph became.
        complaints: what was refused, each with its node; empty when the graph builds.
    """

    model: str
    version: str
    layers: int
    complaints: tuple[str, ...]


def check(exported: ExportedModel, profile: BatchProfile | None = None) -> Parsed:
    """Parse a graph strongly typed, and build it: unsupported operators, mixed types and impossible shapes show.

    The plan is thrown away: TensorRT for RTX builds for other runtimes than Triton's.

    Raises:
        MissingDependency: the extra is not installed.
        ConfigError: the export is damaged, or was not checked at such batches.
    """
    with extra("trt-check"):
        import tensorrt_rtx as trt
    chosen = BuildOptions(profile).profile_for(exported)
    exported.require_whole()
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    try:
        if not parser.parse_from_file(str(exported.graph_files[0])):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            complaints = tuple(dict.fromkeys(_told(error) for error in errors))
            return Parsed(exported.name, trt.__version__, network.num_layers, complaints)
        built = _builds(trt, builder, network, exported, chosen)
        complaints = () if built else tuple(logger.errors or ["the builder gives no reason"])
        return Parsed(exported.name, trt.__version__, network.num_layers, complaints)
    finally:
        del parser, network, builder
        gc.collect()


def _builds(
    trt: Any, builder: Any, network: Any, exported: ExportedModel, profile: BatchProfile
) -> bool:
    config = builder.create_builder_config()
    shapes = builder.create_optimization_profile()
    tensor = exported.contract.input
    sizes = (profile.least, profile.best, profile.most)
    shapes.set_shape(tensor.name, *((size, *tensor.shape) for size in sizes))
    config.add_optimization_profile(shapes)
    return builder.build_serialized_network(network, config) is not None


def _told(error: Any) -> str:
    name, operator = error.node_name(), error.node_operator()
    where = f"{operator} {name!r}: " if name or operator else ""
    return f"{where}{error.desc().strip()}"


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps errors, and says nothing."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message.strip())

    return Logger()
