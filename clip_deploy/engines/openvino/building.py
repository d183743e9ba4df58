"""An exported graph → OpenVINO's IR, compiled as it will be served and held against torch's answers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import ENGINE, REFERENCE, SCHEMA, read_manifest
from clip_deploy.engines.openvino import NETWORK, WEIGHTS
from clip_deploy.errors import ConfigError, EngineError, extra
from clip_deploy.files import building, digest, digest_json, digest_or_none, write_json
from clip_deploy.inputs.photographs import photographs
from clip_deploy.progress import Progress, silent
from clip_deploy.spec import TOLERANCES, EngineSpec, Precision, Tower

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.compare import Encode
    from clip_deploy.inputs.photographs import Photographs

# Of the nearest neighbours, ties apart, that a search must find: bfloat16 hardly moves a vector, INT8 does.
LEAST_RANK_AGREEMENT = {Precision.FP32: 0.99, Precision.BF16: 0.99, Precision.INT8: 0.95}


@dataclass(frozen=True, slots=True)
class BuiltNetwork:
    """What is left beside an export: an IR, how it is to be compiled, and how well it then agrees.

    Args:
        directory: the folder that holds ``model.xml``, ``model.bin`` and this manifest.
        key: the digest of everything that decided it.
        precision: what it computes in; of INT8, what is not quantised computes in ``hint``.
        hint: OpenVINO's INFERENCE_PRECISION_HINT: bf16 or f32.
        parity: figures against torch, by name.
        calibration: of INT8, how many inputs calibrated it, and the figures on those that were held back.
        provenance: versions, CPU, and the graph's digest.
        files: SHA-256 of the IR's two files.
    """

    directory: Path
    key: str
    precision: Precision
    hint: str
    parity: Mapping[str, Any]
    calibration: Mapping[str, Any]
    provenance: Mapping[str, Any]
    files: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "openvino-ir",
            "key": self.key,
            "precision": self.precision.value,
            "hint": self.hint,
            "parity": dict(self.parity),
            "calibration": dict(self.calibration),
            "provenance": dict(self.provenance),
            "files": dict(self.files),
        }

    @classmethod
    def read(cls, directory: Path) -> BuiltNetwork:
        """Read the manifest back.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        path = directory / ENGINE
        remedy = f"remove {directory} and render the model again"
        data = read_manifest(path, remedy)
        try:
            names = ("key", "hint", "parity", "calibration", "provenance", "files")
            values = {name: data[name] for name in names}
            return cls(directory, precision=Precision(data["precision"]), **values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error!r}", remedy=remedy) from error

    def is_whole(self) -> bool:
        """Whether its files are what was checked."""
        return all(digest_or_none(self.directory / name) == sha for name, sha in self.files.items())


def build(
    exported: ExportedModel, spec: EngineSpec, *, progress: Progress = silent
) -> BuiltNetwork:
    """Make an IR beside the export and hold it against torch; one that stands there from the same inputs is left alone.

    Raises:
        MissingDependency: OpenVINO, or NNCF for INT8, is not installed.
        ConfigError: a precision that this CPU or graph has not, or too few calibration images.
        EngineError: the graph does not convert, or its answers are not torch's.
    """
    if exported.contract.precision is not Precision.FP32:
        raise ConfigError(
            f"{exported.name} is an {exported.contract.precision.value} graph",
            remedy="export it with --precision fp32: OpenVINO computes in bf16 by itself",
        )
    with extra("openvino"):
        import openvino

        core = openvino.Core()
    precision, hint = _chosen(core, spec)
    pictures = photographs(spec.calibration_images) if spec.calibration_images else None
    key = _key(exported, precision, hint, pictures)
    directory = exported.directory / "openvino" / precision.value
    if (current := _up_to_date(directory, key)) is not None:
        progress(f"{exported.name}: OpenVINO {precision.value}, unchanged")
        return current
    exported.require_whole()
    with building(directory, EngineError) as folder:
        _fill(core, exported, precision, hint, pictures, folder, key, progress)
    return BuiltNetwork.read(directory)


def _chosen(core: Any, spec: EngineSpec) -> tuple[Precision, str]:
    """The precision, and OpenVINO's hint, on this CPU."""
    has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    name = spec.precision
    if name == "auto":
        name = "bf16" if has_bf16 else "fp32"
    precision = Precision(name)
    if precision is Precision.FP16 or (precision is Precision.BF16 and not has_bf16):
        raise ConfigError(
            f"this CPU has no {precision.value} in OpenVINO",
            remedy="use --precision auto, or render on a machine like the one that will serve",
        )
    return precision, "bf16" if has_bf16 and precision is not Precision.FP32 else "f32"


def _key(
    exported: ExportedModel, precision: Precision, hint: str, pictures: Photographs | None
) -> str:
    return digest_json(
        {
            "graph": exported.graph.sha256,
            "reference": exported.files[REFERENCE],
            "precision": precision.value,
            "hint": hint,
            "pictures": [(p.name, digest([p])) for p in pictures.paths] if pictures else None,
            "captions": pictures.captions if pictures else None,
            "openvino": version("openvino"),
            "code": digest(sorted(Path(__file__).parent.glob("*.py"))),
        }
    )


def _up_to_date(directory: Path, key: str) -> BuiltNetwork | None:
    if not (directory / ENGINE).is_file():
        return None
    try:
        built = BuiltNetwork.read(directory)
    except ConfigError:
        return None  # damaged or of an older schema: made again
    return built if built.key == key and built.is_whole() else None


def _fill(
    core: Any,
    exported: ExportedModel,
    precision: Precision,
    hint: str,
    pictures: Photographs | None,
    folder: Path,
    key: str,
    progress: Progress,
) -> None:
    """Write the IR and its manifest into ``folder``, the manifest last."""
    import openvino

    progress(f"{exported.name}: converting to OpenVINO {precision.value}")
    try:
        network = core.read_model(str(exported.graph_files[0]))
    except RuntimeError as error:
        raise EngineError(
            f"OpenVINO does not read the graph: {str(error).strip().splitlines()[-1][:200]}",
            remedy="serve it with --engine onnxruntime, and report the model's name",
        ) from error
    calibration: dict[str, Any] = {}
    if precision is Precision.INT8:
        from clip_deploy.engines.openvino.quantising import quantised

        assert pictures is not None  # EngineSpec ties the two together
        network, calibration = quantised(core, network, exported, pictures, hint, progress)
    openvino.save_model(network, str(folder / NETWORK), compress_to_fp16=False)
    del network
    progress(f"{exported.name}: comparing with torch")
    parity = _examined(encoder(core, folder / NETWORK, hint), exported, precision)
    files = {name: digest([folder / name]) for name in (NETWORK, WEIGHTS)}
    provenance = {
        "openvino": version("openvino"),
        "cpu": core.get_property("CPU", "FULL_DEVICE_NAME"),
        "graph_sha256": exported.graph.sha256,
    }
    built = BuiltNetwork(folder, key, precision, hint, parity, calibration, provenance, files)
    write_json(folder / ENGINE, built.to_json())


def encoder(core: Any, network: Any, hint: str) -> Encode:
    """A network, compiled as it is served, as a function from inputs to embeddings."""
    import numpy as np

    model = core.read_model(str(network)) if isinstance(network, Path) else network
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
    request = compiled.create_infer_request()

    def encode(inputs: NDArray[Any]) -> NDArray[np.float32]:
        return np.array(request.infer([np.ascontiguousarray(inputs)])[0])

    return encode


def _examined(encode: Encode, exported: ExportedModel, precision: Precision) -> dict[str, Any]:
    """Hold the network against the reference that travels with the export; returns the figures."""
    from clip_deploy.compare import Reference, examine, rank_shares

    tower = exported.contract.tower
    reference = Reference.read(exported.directory / REFERENCE, tower)
    limits = TOLERANCES[precision, tower]
    result = examine(encode, reference.inputs, reference.outputs, limits, exported.max_batch)
    rival = counterpart(exported)
    ranks = rank_shares(encode(reference.inputs), reference.outputs, rival, tower)
    require_right([*result.faults, *rank_faults(ranks, precision)], exported, precision)
    return {**result.figures, "ranks": ranks}


def rank_faults(ranks: Mapping[str, float | None], precision: Precision) -> list[str]:
    """Searches that find too much that the reference would not."""
    return [
        f"only {share:.1%} of {name} results are right"
        for name, share in ranks.items()
        if share is not None and share < LEAST_RANK_AGREEMENT[precision]
    ]


def require_right(faults: list[str], exported: ExportedModel, precision: Precision) -> None:
    """Raise EngineError where there are faults; nothing was put beside the export then."""
    if not faults:
        return
    remedy = {
        Precision.FP32: "serve it with --engine onnxruntime, and report the model's name",
        Precision.BF16: "use --precision fp32 for this model",
        Precision.INT8: "use --precision bf16; or calibrate on more photographs, and export with --images, so that the "
        "reference is of the kind that will be searched, too",
    }[precision]
    raise EngineError(
        f"{exported.name} in OpenVINO {precision.value} is out of tolerance: {'; '.join(faults)}",
        remedy=remedy,
    )


def counterpart(exported: ExportedModel) -> NDArray[np.float32] | None:
    """torch's embeddings of the other tower, to search in, where it lies beside this one and has the same weights."""
    from clip_deploy.artifacts import ExportedModel
    from clip_deploy.compare import Reference

    other = Tower.TEXT if exported.contract.tower is Tower.IMAGE else Tower.IMAGE
    try:
        found = ExportedModel.read(exported.directory.parent / other.model_name)
        if found.contract.weights_sha256 != exported.contract.weights_sha256:
            return None
        return Reference.read(found.directory / REFERENCE, other).outputs
    except ConfigError:
        return None
