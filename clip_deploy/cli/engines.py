"""``clip-deploy build-trt`` and ``clip-deploy inspect``: TensorRT plans, and what a model file is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clip_deploy.cli.options import JsonFile
from clip_deploy.cli.output import Steps, say, show, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.artifacts import BuiltPlan, ExportedModel
    from clip_deploy.engines.tensorrt.checking import Parsed
    from clip_deploy.spec import BatchProfile


def build_trt(
    builds: Annotated[
        list[Path],
        typer.Argument(
            metavar="BUILD...", help="What export left: a tower's folder, or the parent of both."
        ),
    ],
    batch: Annotated[
        Optional[str],
        typer.Option(
            metavar="MIN:OPT:MAX",
            help="Batch sizes; MIN is 1. By default 1 to what the export was checked at, best at a quarter of it.",
        ),
    ] = None,
    triton_release: Annotated[
        Optional[str],
        typer.Option(metavar="YY.MM", help="The release that will load the plans; must fit."),
    ] = None,
    timing_cache: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="Remembers measured kernels: the next build is faster."),
    ] = None,
    hardware_compat: Annotated[
        str,
        typer.Option(
            metavar="none|ampere+|same-cc",
            help="Which other GPUs may run the plans; anything but none costs speed.",
        ),
    ] = "none",
    version_compatible: Annotated[
        bool,
        typer.Option(
            "--version-compatible",
            help="Let later TensorRT versions load the plans. Triton needs --backend-config=tensorrt,version-compatible=true.",
        ),
    ] = False,
    in_container: Annotated[
        bool,
        typer.Option("--in-container", help="Build inside the release's image, through Docker."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Build nothing: parse the graphs, on any machine without GPU."
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Build TensorRT plans of exported graphs, on the GPU that will run them, and read them back.

    The graph's own types decide the precision: export with --precision fp16 for FP16 plans.
    """
    from clip_deploy.artifacts import exported_models
    from clip_deploy.engines.tensorrt.building import BuildOptions
    from clip_deploy.errors import ConfigError
    from clip_deploy.spec import BatchProfile

    profile = BatchProfile.parse(batch) if batch else None
    options = BuildOptions(
        profile, triton_release, timing_cache, hardware_compat, version_compatible
    )
    models = exported_models(builds)
    of_a_build = (in_container, timing_cache, triton_release, version_compatible)
    if check and (any(of_a_build) or hardware_compat != "none"):
        raise ConfigError(
            "--check with options of a build", remedy="drop them: it parses, and keeps nothing"
        )
    if check:
        _check(models, profile, json_file)
        return
    if in_container:
        from clip_deploy.engines.tensorrt.container import build
    else:
        from clip_deploy.engines.tensorrt.building import build
    with Steps() as steps:
        plans = [build(model, options, progress=steps) for model in models]
    show(_plans(models, plans), beside=json_file)
    say(f"next: clip-deploy render-config {' '.join(map(str, builds))} --backend tensorrt")
    write_json([plan.to_json() | {"path": str(plan.path)} for plan in plans], json_file)


def _check(
    models: list[ExportedModel], profile: BatchProfile | None, json_file: Path | None
) -> None:
    from dataclasses import asdict

    from clip_deploy.engines.tensorrt.checking import check
    from clip_deploy.errors import EngineError

    with Steps() as steps:
        results = []
        for model in models:
            steps(f"{model.name}: parsing and building")
            results.append(check(model, profile))
    show(_parsed(results), beside=json_file)
    write_json([asdict(result) for result in results], json_file)
    if refused := [result for result in results if result.complaints]:
        raise EngineError(
            f"{refused[0].model} does not build: {refused[0].complaints[0]}",
            remedy="export it again, in FP32, or report the model's name and this line",
        )


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A model.onnx or a model.plan.")],
    json_file: JsonFile = None,
) -> None:
    """Say what a model file is: tensors, versions, precision, and which Triton releases load it."""
    from clip_deploy.inspection import inspect as look

    facts = look(file)
    show(_facts(facts), beside=json_file)
    write_json(facts, json_file)


def _plans(models: list[ExportedModel], plans: list[BuiltPlan]) -> RenderableType:
    from clip_deploy.report.grid import grid

    rows = grid("model", "batches", "size", "FP16 layers", "TensorRT", "GPU", "plan")
    for model, plan in zip(models, plans):
        share = "not told" if plan.half_share is None else f"{plan.half_share:.0%}"
        made = plan.provenance
        rows.add_row(
            model.name,
            str(plan.profile),
            f"{plan.size_bytes / 2**20:.0f} MB",
            share,
            str(made.get("tensorrt", "")),
            str(made.get("gpu", "")),
            str(plan.path),
        )
    return rows


def _parsed(results: list[Parsed]) -> RenderableType:
    from clip_deploy.report.grid import grid

    rows = grid("model", "layers", "TensorRT for RTX", "verdict")
    for result in results:
        verdict = "; ".join(result.complaints) or "parses and builds, strongly typed"
        rows.add_row(result.model, str(result.layers), result.version, verdict)
    return rows


def _facts(facts: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in ([], {}, None):
            rows.add_row(name.replace("_", " "), _told(name, value))
    return rows


def _told(name: str, value: Any) -> str:
    if name == "size_bytes":
        return f"{value / 2**20:,.1f} MB"
    if isinstance(value, dict):
        parts = [
            f"{key} {v:,}" if isinstance(v, int) else f"{key}: {v}" for key, v in value.items()
        ]
        return ", ".join(parts) if name != "provenance" else "\n".join(parts)
    if isinstance(value, list):
        return "\n".join(map(str, value)) if name in ("inputs", "outputs") else ", ".join(value)
    if isinstance(value, float):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)
