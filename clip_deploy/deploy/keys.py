"""Every key of clip-deploy.toml, with its flag on the command line and its place in the Python API: one table.

A key is its flag without the dashes; where a flag may be given several times, the key is a list and ends in ``s``.
"""

from __future__ import annotations

from typing import Any

from clip_deploy.deploy.key import Key, as_written
from clip_deploy.deploy.kinds import (
    CHANNELS,
    NAME_OR_PATH,
    NUMBER,
    PARAMETERS,
    PATH,
    TEXT,
    TEXTS,
    WHOLE,
    WHOLES,
    YES_OR_NO,
)
from clip_deploy.deploy.nouns import RUNGS
from clip_deploy.engines import BACKENDS
from clip_deploy.engines.tensorrt.building import HARDWARE_COMPATIBILITY
from clip_deploy.servers import LAUNCHERS
from clip_deploy.spec import (
    GRAPH_PRECISIONS,
    INTERPOLATIONS,
    PIXELS,
    RESIZE_MODES,
    BatchProfile,
    Precision,
    Tower,
)

# What a table is, for the file, the schema and the page.
TABLES = {
    "encoder": "what is exported: weights, towers, preprocessing",
    "engine": "what runs the graphs inside Triton",
    "plan": "how TensorRT builds; for backend tensorrt",
    "serving": "config.pbtxt: batches, queue, instances",
    "server": "the server that the smoke test starts, and the Triton release that is meant",
    "checks": "what must hold",
    "publish": "where the repository goes when all holds; nowhere without this table",
}


def _values(words: Any) -> tuple[str, ...]:
    return tuple(as_written(list(words)))


KEYS: tuple[Key, ...] = (
    Key(
        *("encoder", "model", NAME_OR_PATH, "export MODEL", "EncoderSpec.model"),
        "an open_clip architecture, hf-hub:org/name, a checkpoint folder or a model config (.json)",
        example='"ViT-B-32"',
    ),
    Key(
        *("encoder", "pretrained", NAME_OR_PATH, "export --pretrained", "EncoderSpec.pretrained"),
        "an open_clip tag, a checkpoint file or folder, or random[:SEED], whose vectors mean nothing",
        example='"laion2b_s34b_b79k"',
    ),
    Key(
        *("encoder", "towers", TEXTS, "export --tower", "EncoderSpec.towers"),
        "which encoders",
        choices=_values(Tower),
        made=lambda names: tuple(map(Tower, names)),
    ),
    Key(
        *("encoder", "precision", TEXT, "export --precision", "EncoderSpec.precision"),
        "the arithmetic inside the graphs; fp16 is for GPUs",
        choices=_values(GRAPH_PRECISIONS),
        made=Precision,
    ),
    Key(
        *("encoder", "max_batch", WHOLE, "export --max-batch", "EncoderSpec.max_batch"),
        "the largest batch that is checked, and so the largest that may be served",
    ),
    Key(
        *("encoder", "out", PATH, "export --out", "Deployment.out"),
        "where exports, reports and what is remembered of them go",
        default="build/NAME",
    ),
    Key(
        *("encoder", "images", PATH, "export --images", "EncoderSpec.images"),
        "your own reference photographs, with captions.json where you have one",
        example='"photographs"',
    ),
    Key(
        *("encoder", "calibration_images", PATH, "export --calibration-images"),
        "EncoderSpec.calibration_images",
        "more photographs to measure ranges on, with precision fp16",
        example='"more-photographs"',
    ),
    Key(
        *("encoder", "force_quick_gelu", YES_OR_NO, "export --force-quick-gelu"),
        "EncoderSpec.force_quick_gelu",
        "use QuickGELU, as OpenAI's weights need",
    ),
    Key(
        *("encoder", "resize_mode", TEXT, "export --resize-mode", "EncoderSpec.resize_mode"),
        "instead of the weights' own",
        choices=RESIZE_MODES,
    ),
    Key(
        *("encoder", "interpolation", TEXT, "export --interpolation", "EncoderSpec.interpolation"),
        "instead of the weights' own",
        choices=INTERPOLATIONS,
    ),
    Key(
        *("encoder", "mean", CHANNELS, "export --mean", "EncoderSpec.mean"),
        "red, green, blue; instead of the weights' own",
        made=tuple,
    ),
    Key(
        *("encoder", "std", CHANNELS, "export --std", "EncoderSpec.std"),
        "red, green, blue; instead of the weights' own",
        made=tuple,
    ),
    Key(
        *("encoder", "pixels", TEXT, "export --pixels", "EncoderSpec.pixels"),
        "what the image tower reads: normalised by the caller, or as decoded, a quarter of the bytes",
        choices=_values(PIXELS),
    ),
    Key(
        *("engine", "backend", TEXT, "render-config --backend", "Deployment.backend"),
        "Triton's backend; python runs in the embedded server",
        choices=_values(BACKENDS),
    ),
    Key(
        *("engine", "engine", TEXT, "render-config --engine", "EngineSpec.name"),
        "what runs the graphs inside the python backend; openvino is the fastest on a CPU",
        choices=tuple(dict.fromkeys(name for row in BACKENDS.values() for name in row.engines)),
    ),
    Key(
        *("engine", "precision", TEXT, "render-config --precision", "EngineSpec.precision"),
        "what the engine computes in; auto is the graph's own, and for openvino bf16 where the CPU has it",
        choices=("auto", *_values(Precision)),
    ),
    Key(
        *("engine", "calibration_images", PATH, "render-config --calibration-images"),
        "EngineSpec.calibration_images",
        "photographs to calibrate int8 on; a quarter is held back to judge it",
        example='"calibration"',
    ),
    Key(
        *("plan", "batch", TEXT, "build-trt --batch", "BuildOptions.profile"),
        "batch sizes as MIN:OPT:MAX; by default 1 to the encoder's max_batch, best at a quarter of it",
        made=BatchProfile.parse,
        example='"1:8:32"',
    ),
    Key(
        *("plan", "timing_cache", PATH, "build-trt --timing-cache", "BuildOptions.timing_cache"),
        "a file that remembers measured kernels: the next build is faster",
        example='"timing.cache"',
    ),
    Key(
        *("plan", "hardware_compat", TEXT, "build-trt --hardware-compat", "BuildOptions.hardware"),
        "which other GPUs may run the plans; anything but none costs speed",
        choices=_values(HARDWARE_COMPATIBILITY),
    ),
    Key(
        *("plan", "version_compatible", YES_OR_NO, "build-trt --version-compatible"),
        "BuildOptions.version_compatible",
        "let later TensorRT versions load the plans",
    ),
    Key(
        *("plan", "in_container", YES_OR_NO, "build-trt --in-container", "Deployment.in_container"),
        "build inside the release's image, through Docker",
    ),
    Key(
        *("serving", "repository", PATH, "render-config --repository", "Deployment.repository"),
        "the model repository; a change adds a version",
        default="build/NAME/model_repository",
    ),
    Key(
        *("serving", "max_batch", WHOLE, "render-config --max-batch", "ServingSpec.max_batch"),
        "by default what was checked; 0 switches batching off",
    ),
    Key(
        *("serving", "max_queue_delay_us", WHOLE, "render-config --max-queue-delay-us"),
        "ServingSpec.queue_delay_us",
        "microseconds that a request waits for company",
    ),
    Key(
        *("serving", "instance_count", WHOLE, "render-config --instance-count"),
        "ServingSpec.instances",
        "copies of the model; each takes its own memory",
    ),
    Key(
        *("serving", "instance_kind", TEXT, "render-config --instance-kind", "ServingSpec.kind"),
        "what an instance runs on",
        choices=("auto", "cpu", "gpu"),
    ),
    Key(
        *("serving", "gpus", WHOLES, "render-config --gpus", "ServingSpec.gpus"),
        "ids, with instance_kind gpu; all by default",
        made=tuple,
        example="[0, 1]",
    ),
    Key(
        *("serving", "preferred_batch_sizes", WHOLES, "render-config --preferred-batch-size"),
        "ServingSpec.preferred_batch_sizes",
        "better none: Triton then sends what the delay collected",
        made=tuple,
        example="[8, 16]",
    ),
    Key(
        *("serving", "max_queue_size", WHOLE, "render-config --max-queue-size"),
        "ServingSpec.max_queue_size",
        "waiting requests beyond which new ones are refused at once; 0 is no limit",
    ),
    Key(
        *("serving", "queue_timeout_us", WHOLE, "render-config --queue-timeout-us"),
        "ServingSpec.queue_timeout_us",
        "microseconds that a request may wait; 0 is no limit",
    ),
    Key(
        *("serving", "timeout_action", TEXT, "render-config --timeout-action"),
        "ServingSpec.timeout_action",
        "what becomes of a request that waited too long",
        choices=("reject", "delay"),
    ),
    Key(
        *("serving", "warmup", YES_OR_NO, "render-config --warmup", "ServingSpec.warmup"),
        "run batch 1 and the largest batch before the model is called ready",
    ),
    Key(
        *("serving", "version_policy", TEXT, "render-config --version-policy"),
        "ServingSpec.version_policy",
        "latest:N, all, or specific:1,3",
    ),
    Key(
        *("serving", "cuda_graphs", YES_OR_NO, "render-config --cuda-graphs"),
        "ServingSpec.cuda_graphs",
        "for tensorrt: one CUDA graph per batch size",
    ),
    Key(
        *("serving", "parameters", PARAMETERS, "render-config --parameter"),
        "ServingSpec.parameters",
        "backend parameters",
    ),
    Key(
        *("serving", "templates", PATH, "render-config --templates", "Deployment.templates"),
        "your own templates; a file there replaces the shipped one of the same name",
        example='"templates"',
    ),
    Key(
        *("server", "launcher", TEXT, "smoke-test --launcher", "Deployment.launcher"),
        "what to start; by default the one that has the backend",
        choices=_values(LAUNCHERS),
    ),
    Key(
        *("server", "triton_release", TEXT, "smoke-test --triton-release", "ServerOptions.release"),
        "the container's release; lint and plans are held to it, too",
    ),
    Key(
        *("server", "timeout", NUMBER, "smoke-test --timeout", "ServerOptions.timeout_s"),
        "seconds that loading may take",
        made=float,
    ),
    Key(
        *("checks", "strict", YES_OR_NO, "lint --strict", "Checks.strict"),
        "the linter's warnings fail, too",
    ),
    Key(
        *("checks", "ignore", TEXTS, "lint --ignore", "Checks.ignore"),
        "codes, or beginnings of codes, that the linter leaves out",
        made=tuple,
        example='["CD401"]',
    ),
    Key(
        *("checks", "run", YES_OR_NO, "lint --run", "Checks.run"),
        "the linter also runs the graphs on the CPU",
    ),
    Key(
        *("checks", "concurrency", WHOLE, "smoke-test --concurrency", "Checks.concurrency"),
        "requests that the smoke test sends at once",
    ),
    Key(
        *("checks", "min_cosine", NUMBER, "smoke-test --min-cosine", "Checks.min_cosine"),
        "the least cosine to torch's answers, where the precision's own tolerance is not strict enough",
        example="0.9999",
    ),
    Key(
        *("checks", "images", PATH, "smoke-test --images", "Checks.images"),
        "your own photographs for the smoke test",
        example='"photographs"',
    ),
    Key(
        *("checks", "require", TEXTS, "deploy --require", "Checks.require"),
        "rungs of the ladder that must not be skipped",
        choices=RUNGS,
        made=tuple,
        example='["lint", "embedded"]',
    ),
    Key(
        *("publish", "destination", NAME_OR_PATH, "publish DESTINATION", "Publishing.destination"),
        "a folder, s3://, gs:// or as://; credentials never stand in this file",
        example='"s3://bucket/models"',
    ),
    Key(
        *("publish", "keep", WHOLE, "published prune --keep", "Publishing.keep"),
        "versions that stay there; all by default",
        example="5",
    ),
    Key(
        *("publish", "reload", TEXTS, "publish --reload", "Publishing.reload"),
        "HOST:PORT of servers that take the new version, one after the other",
        made=tuple,
        example='["10.0.0.7:8001"]',
    ),
)


def keys_of(table: str) -> dict[str, Key]:
    """The keys of a table by their names."""
    return {key.name: key for key in KEYS if key.table == table}
