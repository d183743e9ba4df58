"""An engine build and the choices of a deployment → config.pbtxt, judged by Triton's own schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from google.protobuf import text_encoding, text_format

from clip_deploy import __version__
from clip_deploy.contract import PREFIX, pack
from clip_deploy.errors import ConfigError
from clip_deploy.resources import templates_dir
from clip_deploy.triton_schema import DataType, ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.artifacts import EngineBuild
    from clip_deploy.spec import ServingSpec, TensorSpec

WARMUP_FOLDER = "warmup"


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One request that Triton sends to a model before it calls it ready.

    ``file`` holds the bytes of one row and lies in the model's ``warmup`` folder; Triton repeats it ``batch`` times.
    ``unbatched`` is the leading axis of a model that Triton does not batch.
    """

    name: str
    batch: int
    file: str
    unbatched: tuple[int, ...] = ()


def render(build: EngineBuild, serving: ServingSpec, *, templates: Path | None = None) -> str:
    """The text of config.pbtxt.

    Args:
        build: what is served.
        serving: how.
        templates: the user's own folder; a file in it replaces the shipped one of the same name.

    Raises:
        ConfigError: contradictory choices, or a template that Triton's schema refuses.
    """
    if serving.cuda_graphs and build.backend != "tensorrt":
        raise ConfigError(
            f"CUDA graphs with backend {build.backend}",
            remedy="drop --cuda-graphs, or use --backend tensorrt",
        )
    max_batch = _max_batch(build, serving)
    contract = build.exported.contract
    parameters = dict(serving.parameters) | contract.to_parameters() | dict(build.parameters)
    if (data := build.exported.tokenizer_data()) is not None:
        parameters[PREFIX + "tokenizer"] = pack(data)
    context = {
        "name": build.name,
        "backend": build.backend,
        "version": __version__,
        "contract": contract,
        "max_batch": max_batch,
        "unbatched": () if max_batch else (-1,),
        "kind": _kind(build, serving),
        "serving": serving,
        "policy": bool(serving.max_queue_size or serving.queue_timeout_us),
        "version_policy": _version_policy(serving),
        "warmup": warmup_samples(build, serving),
        "parameters": parameters,
    }
    text = _filled(build.backend, context, templates)
    _judge(text, build, max_batch)
    return text


def warmup_samples(build: EngineBuild, serving: ServingSpec) -> list[WarmupSample]:
    """Batch 1 and the largest batch, on a real input: kernels are chosen and memory is taken before the first user."""
    if not serving.warmup:
        return []
    tensor = build.exported.contract.input
    file = f"{tensor.name}-{build.exported.files['reference.npz'][:12]}.bin"
    max_batch = _max_batch(build, serving)
    if max_batch == 0:
        return [WarmupSample("one row", 1, file, unbatched=(1,))]
    return [WarmupSample(f"batch of {size}", size, file) for size in sorted({1, max_batch})]


def _max_batch(build: EngineBuild, serving: ServingSpec) -> int:
    checked = build.largest_batch
    wanted = checked if serving.max_batch is None else serving.max_batch
    if wanted > checked:
        raise ConfigError(
            f"max batch {wanted} for {build.name}, which was checked up to {checked}",
            remedy=f"export and build it with --max-batch {wanted}, or render with {checked} or less",
        )
    if too_large := [size for size in serving.preferred_batch_sizes if not 1 <= size <= wanted]:
        raise ConfigError(
            f"preferred batch size {too_large[0]} with max batch {wanted}",
            remedy="prefer sizes from 1 to the max batch, or better none: Triton then forms what the delay allows",
        )
    return wanted


def _kind(build: EngineBuild, serving: ServingSpec) -> str:
    if serving.kind not in build.kinds:
        raise ConfigError(
            f"backend {build.backend} does not run as instance kind {serving.kind}",
            remedy=f"use {' or '.join(build.kinds)}, or another --backend",
        )
    return build.kinds[serving.kind]


def _version_policy(serving: ServingSpec) -> str:
    """The field's inside; empty for Triton's default, the newest version alone."""
    word, numbers = serving.version_policy_choice()
    if (word, numbers) == ("latest", (1,)):
        return ""
    inside = {
        "all": "",
        "latest": f"num_versions: {numbers[0] if numbers else 1}",
        "specific": f"versions: [ {', '.join(map(str, numbers))} ]",
    }[word]
    return f"{word}: {{ {inside} }}"


def _filled(backend: str, context: dict[str, Any], templates: Path | None) -> str:
    """``<backend>.pbtxt.j2`` where there is one, else the file that all share."""
    if templates is not None and not any(templates.glob("*.pbtxt.j2")):
        raise ConfigError(
            f"{templates} holds no template",
            remedy="put a config.pbtxt.j2 there; copy the shipped one",
        )
    folders = [str(folder) for folder in (templates, templates_dir()) if folder]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # the output is protobuf text, not HTML; strings go through `quoted`
    )
    environment.filters["quoted"] = quoted
    try:
        return environment.select_template([f"{backend}.pbtxt.j2", "config.pbtxt.j2"]).render(
            context
        )
    except jinja2.TemplateError as error:
        place = (
            f"{getattr(error, 'filename', None) or getattr(error, 'name', None) or 'the template'}"
        )
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"{place}{line}: {error.message}", remedy="correct the template"
        ) from error


def quoted(value: object) -> str:
    """A protobuf text string."""
    return f'"{text_encoding.CEscape(str(value), as_utf8=True)}"'


def _judge(text: str, build: EngineBuild, max_batch: int) -> None:
    """Parse with Triton's schema, and hold what a template may have changed against what is served."""
    config = parse_config(text, f"the rendered config of {build.name}")
    contract = build.exported.contract
    shape = () if max_batch else (-1,)
    expected = (
        build.name,
        build.backend,
        max_batch,
        [_told(contract.input, shape)],
        [_told(contract.output, shape)],
    )
    found = (
        config.name,
        config.backend,
        config.max_batch_size,
        [(t.name, DataType.Name(t.data_type), tuple(t.dims)) for t in config.input],
        [(t.name, DataType.Name(t.data_type), tuple(t.dims)) for t in config.output],
    )
    for what, wanted, got in zip(
        ("name", "backend", "max_batch_size", "input", "output"), expected, found
    ):
        if wanted != got:
            raise ConfigError(
                f"the template says {what} {got!r} for {build.name}, which has {wanted!r}",
                remedy=f"take {what} from the variables that the shipped config.pbtxt.j2 uses",
            )


def _told(tensor: TensorSpec, batch: tuple[int, ...]) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, f"TYPE_{tensor.dtype}", batch + tensor.shape


def parse_config(text: str, place: object) -> ModelConfig:
    """config.pbtxt as a message.

    Raises:
        ConfigError: Triton would not read it; with line and column.
    """
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        what = str(error).partition(" : ")[2] or str(error)
        raise ConfigError(
            f"{place}, line {line}, column {column}: {what}", remedy="correct that line"
        ) from error
