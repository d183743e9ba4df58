"""``clip-deploy export``: an OpenCLIP model → two checked ONNX graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import Images, JsonFile, numbers
from clip_deploy.cli.output import Steps, say, show, warn, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.artifacts import ExportedModel

_MODEL = "An open_clip architecture (ViT-B-32), hf-hub:org/name, a checkpoint folder, or your model config (.json)."
_PRETRAINED = (
    "An open_clip tag, a checkpoint file or folder, or random[:SEED], whose vectors mean nothing."
)


def export(
    model: Annotated[str, typer.Argument(help=_MODEL)],
    pretrained: Annotated[Optional[str], typer.Option(metavar="SOURCE", help=_PRETRAINED)] = None,
    tower: Annotated[str, typer.Option(metavar="image|text|both", help="Which encoders.")] = "both",
    precision: Annotated[
        str,
        typer.Option(
            metavar="fp32|fp16",
            help="The arithmetic inside the graphs. fp16 is for GPUs; inputs and outputs stay FP32.",
        ),
    ] = "fp32",
    max_batch: Annotated[
        int, typer.Option(help="The largest batch to check, and so to serve.")
    ] = 32,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the two folders go.")] = Path(
        "build"
    ),
    images: Images = None,
    calibration_images: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR", help="More photographs to measure ranges on, with --precision fp16."
        ),
    ] = None,
    force_quick_gelu: Annotated[
        bool, typer.Option("--force-quick-gelu", help="Use QuickGELU, as OpenAI's weights need.")
    ] = False,
    resize_mode: Annotated[
        Optional[str],
        typer.Option(
            metavar="MODE", help="shortest, longest or squash, instead of the weights' own."
        ),
    ] = None,
    interpolation: Annotated[
        Optional[str],
        typer.Option(metavar="NAME", help="bicubic or bilinear, instead of the weights' own."),
    ] = None,
    mean: Annotated[
        Optional[str], typer.Option(metavar="R,G,B", help="Instead of the weights' own.")
    ] = None,
    std: Annotated[
        Optional[str], typer.Option(metavar="R,G,B", help="Instead of the weights' own.")
    ] = None,
    pixels: Annotated[
        str,
        typer.Option(
            metavar="float32|uint8",
            help="What the image tower reads: normalised by the caller, or as decoded and normalised in the graph, a quarter of the bytes.",
        ),
    ] = "float32",
    json_file: JsonFile = None,
) -> None:
    """Export both towers to ONNX and hold each against torch.

    Each folder gets the graph, a manifest that describes it, and real inputs with torch's answers; a graph that
    disagrees with torch is not written. What is up to date is left alone.
    """
    from clip_deploy.errors import ConfigError
    from clip_deploy.spec import GRAPH_PRECISIONS, EncoderSpec, Precision, Tower

    towers = {
        "image": (Tower.IMAGE,),
        "text": (Tower.TEXT,),
        "both": (Tower.IMAGE, Tower.TEXT),
    }.get(tower)
    if towers is None:
        raise ConfigError(f"tower {tower!r} is unknown", remedy="use --tower image, text or both")
    if precision not in GRAPH_PRECISIONS:
        raise ConfigError(f"precision {precision!r} is unknown", remedy="use fp32 or fp16")
    spec = EncoderSpec(
        precision=Precision(precision),
        calibration_images=calibration_images,
        model=model,
        pretrained=pretrained,
        towers=towers,
        max_batch=max_batch,
        force_quick_gelu=force_quick_gelu,
        resize_mode=resize_mode,
        interpolation=interpolation,
        mean=numbers(mean, "--mean") if mean else None,
        std=numbers(std, "--std") if std else None,
        pixels=pixels,
        images=images,
    )
    if spec.random_seed() is not None:
        warn(
            "random weights: everything works, and the vectors mean nothing. Name real ones with --pretrained."
        )
    with Steps() as steps:
        steps("importing torch and open_clip")
        from clip_deploy.export import export as run

        models = run(spec, out, progress=steps, warn=warn)
    show(_table(models), beside=json_file)
    say(f"next: clip-deploy render-config {out}")
    write_json(
        [exported.to_json() | {"directory": str(exported.directory)} for exported in models],
        json_file,
    )


def _table(models: list[ExportedModel]) -> RenderableType:
    from clip_deploy.report.grid import grid

    columns = ("model", "input", "output", "size", "precision", "against torch", "activation")
    rows = grid(*columns, "folder")
    for model in models:
        contract, parity = model.contract, model.parity
        rows.add_row(
            model.name,
            f"{contract.input.name} {contract.input.dtype} {list(contract.input.shape)}",
            f"{contract.output.name} {list(contract.output.shape)}",
            f"{model.graph.size_bytes / 2**20:.0f} MB",
            _precision(model),
            f"cosine ≥ {parity['min_cosine']:.6f}, error ≤ {parity['max_error']:.0e}",
            str(model.source["activation"]),
            str(model.directory),
        )
    return rows


def _precision(model: ExportedModel) -> str:
    """The precision; of an FP16 graph also what stayed in FP32, and whether searches find the same."""
    name = model.contract.precision.value.upper()
    if not model.conversion:
        return name
    ranks = min(share for share in model.parity["ranks"].values() if share is not None)
    return f"{name}, {len(model.conversion['kept_fp32'])} nodes FP32, searches {ranks:.0%} alike"
