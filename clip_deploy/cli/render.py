"""``clip-deploy render-config``: exports → a Triton model repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from clip_deploy.cli.lint import require_clean
from clip_deploy.cli.output import Steps, say

_PREFERRED = "A batch size to prefer; may be repeated. Off by default: Triton then sends what the delay collected, which is faster for almost every model."


def render_config(
    builds: Annotated[
        list[Path],
        typer.Argument(
            metavar="BUILD...", help="What export left: a tower's folder, or the parent of both."
        ),
    ],
    backend: Annotated[
        str,
        typer.Option(
            help="onnxruntime (in the server's container), python (also in the embedded server), tensorrt (after build-trt), or openvino (containers that carry it)."
        ),
    ] = "onnxruntime",
    engine: Annotated[
        Optional[str],
        typer.Option(
            metavar="onnxruntime|openvino",
            help="What runs the graph inside the python backend; openvino is the fastest on a CPU.",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            metavar="auto|fp32|bf16|int8",
            help="What OpenVINO computes in. auto: bf16 where this CPU has it, else fp32. int8 needs --calibration-images.",
        ),
    ] = "auto",
    calibration_images: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR",
            help="Photographs, and captions.json for a text tower, to calibrate INT8 on; a quarter is held back to judge it.",
        ),
    ] = None,
    repository: Annotated[
        Path, typer.Option(metavar="DIR", help="The model repository to add to.")
    ] = Path("model_repository"),
    max_batch: Annotated[
        Optional[int],
        typer.Option(
            help="At most what the export was checked at, which is the default; 0 switches batching off.",
            min=0,
        ),
    ] = None,
    max_queue_delay_us: Annotated[
        int,
        typer.Option(
            "--max-queue-delay-us",
            "--max-queue-delay",
            metavar="µs",
            help="How long a request waits for company.",
        ),
    ] = 5000,
    instance_count: Annotated[
        int, typer.Option(help="Copies of the model; each takes its own memory.")
    ] = 1,
    instance_kind: Annotated[
        str, typer.Option(metavar="auto|cpu|gpu", help="What an instance runs on.")
    ] = "auto",
    gpus: Annotated[
        Optional[str],
        typer.Option(metavar="0,1", help="GPU ids, with --instance-kind gpu; all by default."),
    ] = None,
    preferred_batch_size: Annotated[Optional[list[int]], typer.Option(help=_PREFERRED)] = None,
    max_queue_size: Annotated[
        int,
        typer.Option(
            help="Waiting requests beyond which new ones are refused at once; 0 is no limit."
        ),
    ] = 0,
    queue_timeout_us: Annotated[
        int,
        typer.Option(metavar="µs", help="How long a request may wait in the queue; 0 is no limit."),
    ] = 0,
    timeout_action: Annotated[
        str,
        typer.Option(
            metavar="reject|delay", help="What becomes of a request that waited too long."
        ),
    ] = "reject",
    warmup: Annotated[
        bool,
        typer.Option(
            help="Run batch 1 and the largest batch on a real input before the model is called ready."
        ),
    ] = True,
    version_policy: Annotated[
        str, typer.Option(metavar="POLICY", help="latest:N, all, or specific:1,3.")
    ] = "latest:1",
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs",
            help="For tensorrt: one CUDA graph per batch size. Off by default: it helps small batches, and costs memory and a slow start.",
        ),
    ] = False,
    parameter: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="KEY=VALUE",
            help="A backend parameter, as intra_op_thread_count=4; may be repeated.",
        ),
    ] = None,
    templates: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR",
            help="Your own templates; a file there replaces the shipped one of the same name.",
        ),
    ] = None,
    stdout: Annotated[
        bool, typer.Option("--stdout", help="Print the configs and write nothing.")
    ] = False,
) -> None:
    """Render config.pbtxt and assemble a Triton model repository.

    Each run adds a new version and overwrites none. The text is judged by Triton's own schema before anything is written.
    """
    from clip_deploy import repository as repositories
    from clip_deploy.artifacts import exported_models
    from clip_deploy.engines import BACKENDS
    from clip_deploy.errors import ConfigError
    from clip_deploy.lint import target
    from clip_deploy.spec import EngineSpec, ServingSpec

    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown", remedy=f"use {', '.join(BACKENDS)}")
    serving = ServingSpec(
        max_batch=max_batch,
        queue_delay_us=max_queue_delay_us,
        instances=instance_count,
        kind=instance_kind,
        gpus=_gpu_ids(gpus),
        preferred_batch_sizes=tuple(preferred_batch_size or ()),
        max_queue_size=max_queue_size,
        queue_timeout_us=queue_timeout_us,
        timeout_action=timeout_action,
        warmup=warmup,
        version_policy=version_policy,
        cuda_graphs=cuda_graphs,
        parameters=_parameters(parameter or []),
    )
    models = exported_models(builds)
    asked = EngineSpec(engine, precision, calibration_images)
    with Steps() as steps:
        built = [BACKENDS[backend].build(model, asked, steps) for model in models]
    configs = [repositories.render(build, serving, templates=templates) for build in built]
    if stdout:
        sys.stdout.write("\n".join(configs))
        return
    for build in built:
        model = repositories.assemble(build, serving, repository, templates=templates)
        typer.echo(f"{repository / model.name} version {model.served[-1]} ({model.backend})")
    kind = "gpu" if instance_kind == "gpu" or backend == "tensorrt" else "auto"
    require_clean(repository, target(kind), models=[build.name for build in built])
    say(
        f"next: clip-deploy smoke-test {repository}"
        if backend == "python"
        else f"next: clip-deploy serve {repository} --launcher container"
    )


def _gpu_ids(text: str | None) -> tuple[int, ...]:
    from clip_deploy.errors import ConfigError

    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--gpus {text!r} is not a list of GPU ids", remedy="write them as 0,1")
    return tuple(int(part) for part in parts)


def _parameters(pairs: list[str]) -> dict[str, str]:
    from clip_deploy.errors import ConfigError

    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(
                f"--parameter {pair!r} is not KEY=VALUE",
                remedy="write it as intra_op_thread_count=4",
            )
        found[key] = value
    return found
