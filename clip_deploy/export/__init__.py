"""OpenCLIP → ONNX; the only home of torch and open_clip."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy import __version__
from clip_deploy.artifacts import MANIFEST, REFERENCE, TOKENIZER, ExportedModel
from clip_deploy.compare import Reference
from clip_deploy.contract import Contract
from clip_deploy.errors import ClipDeployError, ConfigError, ExportError
from clip_deploy.export import graph, half, loading, parity, reference, sources, towers
from clip_deploy.export import tokenizer as tokenizers
from clip_deploy.files import building, digest, digest_json
from clip_deploy.inputs.photographs import photographs
from clip_deploy.inputs.texts import TextTokenizer
from clip_deploy.progress import Progress, silent
from clip_deploy.spec import PIXELS, TOLERANCES, EncoderSpec, Precision, TensorSpec, Tower

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.export.sources import Source
    from clip_deploy.inputs.photographs import Photographs
    from clip_deploy.spec import Preprocess, Tokens

_VERSIONED = (
    *("torch", "torchvision", "open_clip_torch", "timm", "onnx", "onnxscript", "onnxruntime"),
    *("numpy", "pillow", "ftfy", "regex", "tokenizers"),
)


@dataclass(frozen=True, slots=True)
class _Job:
    """What all towers of one export share."""

    spec: EncoderSpec
    source: Source
    pictures: Photographs
    checkpoint_sha256: str | None
    progress: Progress
    more_pictures: Photographs | None = None

    def key(self, tower: Tower) -> str:
        """The digest of everything that decides the tower's files."""
        spec = asdict(self.spec)
        spec |= {"images": None, "calibration_images": None, "towers": tower.value}
        pictures = [*self.pictures.paths, *(self.more_pictures.paths if self.more_pictures else ())]
        return digest_json(
            {
                "spec": spec,
                "config": self.source.config,
                "checkpoint": self.checkpoint_sha256,
                "photographs": [(p.name, digest([p])) for p in pictures],
                "captions": self.pictures.captions,
                "versions": _versions(),
                "code": digest(sorted(Path(__file__).parent.glob("*.py"))),
            }
        )


def export(
    spec: EncoderSpec,
    out: Path,
    *,
    progress: Progress = silent,
    warn: Progress = silent,
) -> list[ExportedModel]:
    """Export the towers of ``spec`` into ``out/<model name>/``, each held against torch before it is put there.

    A tower whose inputs (weights, config, options, photographs, versions) and files are unchanged is left alone.

    Args:
        progress: told the name of each step as it begins.
        warn: told of choices that give other vectors than the weights were trained for.

    Raises:
        ConfigError: an unknown model, tag or file.
        ExportError: the model did not load or trace, or its graph is out of tolerance; nothing is written.
    """
    progress(f"finding {spec.model}")
    source = sources.resolve(spec)
    for note in sources.notes(source, spec):
        warn(note)
    pictures = photographs(spec.images)
    more = photographs(spec.calibration_images) if spec.calibration_images else None
    job = _Job(spec, source, pictures, source.checkpoint_sha256(), progress, more)
    return [_export_tower(job, tower, out / tower.model_name) for tower in spec.towers]


def _export_tower(job: _Job, tower: Tower, directory: Path) -> ExportedModel:
    key = job.key(tower)
    if (current := _up_to_date(directory, key)) is not None:
        job.progress(f"{tower.value}: unchanged")
        return current
    with building(directory, ExportError) as folder:
        _write_tower(job, tower, key, folder)
    return ExportedModel.read(directory)


def _up_to_date(directory: Path, key: str) -> ExportedModel | None:
    """The export that stands there, if it came from the same inputs and its files are what its manifest says."""
    if not (directory / MANIFEST).is_file():
        return None
    try:
        model = ExportedModel.read(directory)
    except ConfigError:
        return None  # damaged or of an older schema: made again
    return model if model.key == key and not model.damaged_files() else None


def _write_tower(job: _Job, tower: Tower, key: str, folder: Path) -> None:
    """Fill ``folder`` with one tower's files, the manifest last."""
    job.progress(f"{tower.value}: loading {job.source.name}, {job.source.label}")
    model = loading.load(job.source, job.spec)
    reading = _reading(job, tower, model, folder)
    facts = {
        "architecture": job.source.name,
        "pretrained": job.source.label,
        "checkpoint_sha256": job.checkpoint_sha256,
        "activation": towers.activation_of(model),
    }
    weights_sha256, scoring = towers.weights_sha256(model), towers.scoring_of(model)
    rival = _counterpart(job, tower, model) if job.spec.precision is Precision.FP16 else None
    encoder = towers.Encoder(model, tower, reading.preprocess)
    del model
    job.progress(f"{tower.value}: asking torch about {len(reading.inputs)} reference inputs")
    outputs = towers.answers(encoder, reading.inputs)
    job.progress(f"{tower.value}: tracing the graph")
    graph.trace(encoder, reading.inputs[:2], tower.output_name, reading.tensor, folder)
    encoder.release()
    conversion = {}
    if job.spec.precision is Precision.FP16:
        conversion = _halved(job, tower, reading, outputs, folder)
    file = graph.finish(folder)
    figures = _compared(job, tower, reading, outputs, folder / file.file, rival)
    Reference(reading.inputs, outputs, reading.labels, reading.captions).save(
        folder / REFERENCE, tower
    )
    contract = Contract(
        tower=tower,
        model=job.source.name,
        pretrained=job.source.label,
        trained=job.source.seed is None,
        precision=job.spec.precision,
        input=reading.tensor,
        output=TensorSpec(tower.output_name, "FP32", (outputs.shape[1],)),
        scoring=scoring,
        weights_sha256=weights_sha256,
        graph_sha256=file.sha256,
        preprocess=reading.preprocess,
        tokens=reading.tokens,
    )
    files = {path.name: digest([path]) for path in sorted(folder.iterdir())}
    ExportedModel(
        folder,
        key,
        contract,
        file,
        job.spec.max_batch,
        facts,
        figures,
        _versions(),
        files,
        conversion,
    ).write_manifest()


def _counterpart(job: _Job, tower: Tower, model: Any) -> NDArray[Any] | None:
    """The other tower's FP32 embeddings of the reference, to search in; None where its tokenizer is out of reach."""
    inputs: NDArray[Any]
    if tower is Tower.TEXT:
        inputs = reference.pixels(job.pictures, towers.preprocess_of(model))
        return np.asarray(towers.answers(partial(towers.embed, model, Tower.IMAGE), inputs))
    try:
        tokenizer = loading.load_tokenizer(job.source)
    except ClipDeployError:
        return None
    inputs = reference.token_ids(reference.texts(job.pictures), tokenizer)
    return np.asarray(towers.answers(partial(towers.embed, model, Tower.TEXT), inputs))


def _halved(
    job: _Job, tower: Tower, reading: _Reading, outputs: NDArray[Any], folder: Path
) -> dict[str, Any]:
    """Convert the graph in ``folder`` to FP16, after the FP32 one was found right."""
    job.progress(f"{tower.value}: comparing the FP32 graph with torch")
    limits = TOLERANCES[Precision.FP32, tower]
    encode = parity.session(folder / graph.FILE)
    parity.check(encode, reading.inputs, outputs, limits, min(job.spec.max_batch, 2))
    del encode  # its weights are in memory
    inputs = [reading.inputs]
    if tower is Tower.IMAGE and job.more_pictures is not None:
        assert reading.preprocess is not None  # an image tower has one
        inputs.append(reference.pixels(job.more_pictures, reading.preprocess))
    job.progress(f"{tower.value}: measuring ranges and converting to FP16")
    return half.convert(folder, reading.tensor.name, inputs).to_json()


def _compared(
    job: _Job,
    tower: Tower,
    reading: _Reading,
    outputs: NDArray[Any],
    file: Path,
    rival: NDArray[Any] | None,
) -> dict[str, Any]:
    """Hold the finished graph against torch; returns the figures for the manifest."""
    precision, largest = job.spec.precision, job.spec.max_batch
    is_half = precision is Precision.FP16
    with_what = ", rounding as a GPU does," if is_half else ""
    job.progress(f"{tower.value}: comparing{with_what} with torch at batches 1, 2, 3 and {largest}")
    encode = parity.rehearsed(file) if is_half else parity.session(file)
    limits = TOLERANCES[precision, tower]
    figures = parity.check(encode, reading.inputs, outputs, limits, largest)
    if is_half:
        figures["ranks"] = parity.check_ranks(encode(reading.inputs), outputs, rival, tower)
    return figures


@dataclass(frozen=True, slots=True)
class _Reading:
    """How a tower reads, and its reference inputs."""

    tensor: TensorSpec
    inputs: NDArray[Any]
    labels: tuple[str, ...]
    captions: tuple[str, ...] = ()
    preprocess: Preprocess | None = None
    tokens: Tokens | None = None


def _reading(job: _Job, tower: Tower, model: Any, folder: Path) -> _Reading:
    """Prepare the reference inputs by open_clip's own code; writes ``tokenizer.json`` for a text tower."""
    pictures = job.pictures
    if tower is Tower.IMAGE:
        preprocess = replace(towers.preprocess_of(model), pixels=job.spec.pixels)
        dtype = PIXELS[preprocess.pixels]
        tensor = TensorSpec(tower.input_name, dtype, (3, *preprocess.size))
        inputs = reference.pixels(pictures, preprocess)
        return _Reading(tensor, inputs, pictures.names, pictures.captions, preprocess=preprocess)
    tokenizer = loading.load_tokenizer(job.source)
    data, tokens = tokenizers.as_data(tokenizer)
    sentences = reference.texts(pictures)
    tokenizers.check(TextTokenizer(data, tokens), tokenizer, sentences)
    (folder / TOKENIZER).write_text(data, "utf-8")
    tensor = TensorSpec(tower.input_name, "INT32", (tokens.context_length,))
    return _Reading(
        tensor, reference.token_ids(sentences, tokenizer), tuple(sentences), tokens=tokens
    )


def _versions() -> dict[str, str]:
    found = {"clip-deploy": __version__}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
