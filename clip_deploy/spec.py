"""The vocabulary: what is asked for, and what an encoder is. Frozen, checked on construction, standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from clip_deploy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Triton's short datatype names and numpy's for the same thing; config.pbtxt writes the first with TYPE_ before it.
DTYPES: dict[str, str] = {"FP32": "float32", "INT32": "int32", "UINT8": "uint8"}

RESIZE_MODES = ("shortest", "longest", "squash")
INTERPOLATIONS = ("bicubic", "bilinear")
# What an image tower reads → the dtype of its input: normalised by the caller, or as decoded and normalised inside.
PIXELS = {"float32": "FP32", "uint8": "UINT8"}


class Tower(str, Enum):
    """One of the two encoders of a CLIP model; each becomes a Triton model of its own."""

    IMAGE = "image"
    TEXT = "text"

    @property
    def model_name(self) -> str:
        """The Triton model's name, which is its folder's too."""
        return f"clip_{self.value}_encoder"

    @property
    def input_name(self) -> str:
        """The one input: pixels or token ids."""
        return "pixel_values" if self is Tower.IMAGE else "input_ids"

    @property
    def output_name(self) -> str:
        """The one output: embeddings of unit length."""
        return f"{self.value}_embeds"


# The least share of a plan's layers that compute in FP16, in a plan that claims to.
LEAST_HALF_SHARE = 0.2


class Precision(str, Enum):
    """The arithmetic inside a graph; its inputs and outputs are the same at any precision."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


# What a graph's own types can be; bfloat16 and INT8 are what an engine makes of an FP32 graph.
GRAPH_PRECISIONS = (Precision.FP32, Precision.FP16)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far embeddings of unit length may lie from torch's FP32 answer, per row.

    ``cosine`` is the least allowed; ``max_error`` the largest allowed difference of one component; ``independence``
    the largest difference of one row computed alone and among others.
    """

    cosine: float
    max_error: float
    independence: float
    norm: float = 1e-3


# The one place for thresholds: export and smoke-test both read it. FP32 graphs agree with torch to 1e-6 in practice;
# the margin covers other BLAS kernels and other batch shapes, and is still 100 times below what a wrong pixel causes.
# FP16 graphs agree to a cosine of 0.999998 and an error of 4e-4 when rehearsed with exact sums; a GPU that sums in FP16
# loses a digit more. Text towers go wrong first, so theirs is no looser. bfloat16 keeps 8 bits of 24: a trained small
# CLIP agrees to 0.99985, random ViT-B-32 to 0.99992; INT8 is held to searches, too (decision 11).
TOLERANCES: dict[tuple[Precision, Tower], Tolerance] = {
    (Precision.FP32, Tower.IMAGE): Tolerance(cosine=0.99999, max_error=1e-4, independence=5e-5),
    (Precision.FP32, Tower.TEXT): Tolerance(cosine=0.99999, max_error=1e-4, independence=5e-5),
    (Precision.FP16, Tower.IMAGE): Tolerance(cosine=0.9995, max_error=5e-3, independence=2e-3),
    (Precision.FP16, Tower.TEXT): Tolerance(cosine=0.9995, max_error=5e-3, independence=2e-3),
    (Precision.BF16, Tower.IMAGE): Tolerance(cosine=0.999, max_error=1.5e-2, independence=5e-3),
    (Precision.BF16, Tower.TEXT): Tolerance(cosine=0.999, max_error=1.5e-2, independence=5e-3),
    (Precision.INT8, Tower.IMAGE): Tolerance(cosine=0.99, max_error=5e-2, independence=1e-2),
    (Precision.INT8, Tower.TEXT): Tolerance(cosine=0.99, max_error=5e-2, independence=1e-2),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output, named once for the exporter, the engine, config.pbtxt and the client.

    ``shape`` leaves out the batch axis, which always comes first and is always dynamic: an image tower reads
    ``(3, height, width)`` pixels, normalised, channels first; a text tower reads ``(context_length,)`` token ids;
    both write ``(embed_dim,)`` of unit length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"tensor {self.name!r} has dtype {self.dtype!r}",
                remedy=f"use one of {', '.join(DTYPES)}",
            )
        if not self.shape or any(axis < 1 for axis in self.shape):
            raise ConfigError(
                f"tensor {self.name!r} has shape {list(self.shape)}",
                remedy="every axis but the batch has a fixed size",
            )

    @property
    def numpy_dtype(self) -> str:
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """The batch sizes that an engine is built for: it runs ``least`` to ``most`` and is fastest at ``best``."""

    least: int
    best: int
    most: int

    def __post_init__(self) -> None:
        if self.least != 1:
            raise ConfigError(
                f"batch profile {self} begins at {self.least}",
                remedy="begin at 1: a lone request is a batch of 1",
            )
        if not self.least <= self.best <= self.most:
            raise ConfigError(
                f"batch profile {self} is not in order", remedy="write MIN:OPT:MAX, as 1:8:32"
            )

    def __str__(self) -> str:
        return f"{self.least}:{self.best}:{self.most}"

    @classmethod
    def parse(cls, text: str) -> BatchProfile:
        """``MIN:OPT:MAX``, as 1:8:32."""
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ConfigError(f"batch profile {text!r}", remedy="write MIN:OPT:MAX, as 1:8:32")
        return cls(*map(int, parts))

    @classmethod
    def up_to(cls, most: int) -> BatchProfile:
        """A profile that is fastest at a quarter of the largest batch: what a few milliseconds of waiting collect."""
        return cls(1, max(1, most // 4), most)


@dataclass(frozen=True, slots=True)
class Preprocess:
    """How a picture becomes an image tower's pixels: what open_clip calls the preprocess config.

    ``size`` is (height, width) in pixels; ``mean`` and ``std`` are per channel (red, green, blue) of values in 0..1.
    ``shortest`` scales the shorter side and crops the centre, ``longest`` scales the longer side and pads with
    ``fill_color``, ``squash`` ignores the aspect ratio. ``pixels`` says who normalises: the caller, who then sends
    ``float32``, or the graph, which then reads ``uint8`` as decoded: a quarter of the bytes.
    """

    size: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize_mode: str
    interpolation: str
    fill_color: int = 0
    pixels: str = "float32"

    def __post_init__(self) -> None:
        if self.pixels not in PIXELS:
            raise ConfigError(
                f"pixels {self.pixels!r} are unknown", remedy=f"use one of {', '.join(PIXELS)}"
            )
        if self.resize_mode not in RESIZE_MODES:
            raise ConfigError(
                f"resize mode {self.resize_mode!r} is unknown",
                remedy=f"use one of {', '.join(RESIZE_MODES)}",
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(
                f"interpolation {self.interpolation!r} is unknown",
                remedy=f"use one of {', '.join(INTERPOLATIONS)}",
            )
        if len(self.size) != 2 or min(self.size) < 1 or len(self.mean) != 3 or len(self.std) != 3:
            raise ConfigError(
                f"preprocessing of size {self.size}, mean {self.mean}, std {self.std}",
                remedy="size is (height, width); mean and std have three values",
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ConfigError(
                f"mean {self.mean}, std {self.std}", remedy="finite values, and std above 0"
            )


@dataclass(frozen=True, slots=True)
class Tokens:
    """How a text becomes a text tower's ids.

    ``clean`` names a cleaning function of ``inputs.texts``; ``sha256`` is that of ``tokenizer.json``; ids equal to
    ``zeroed_id`` are set to 0 afterwards (open_clip's ``strip_sep_token``).
    """

    context_length: int
    pad_id: int
    clean: str
    sha256: str
    zeroed_id: int | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the model itself turns the cosine of an image and a text into a probability.

    ``softmax`` over the texts of ``scale × cosine`` (CLIP), or ``sigmoid`` of ``scale × cosine + bias`` (SigLIP).
    """

    kind: str
    scale: float
    bias: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("softmax", "sigmoid"):
            raise ConfigError(f"scoring {self.kind!r} is unknown", remedy="use softmax or sigmoid")


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What to export, in open_clip's own words.

    Args:
        model: an open_clip architecture, ``hf-hub:org/name``, or the path of a model config JSON or checkpoint folder.
        pretrained: an open_clip tag, a checkpoint file or folder, or ``random[:SEED]``; None where ``model`` has them.
        towers: which encoders.
        max_batch: the largest batch the graphs are checked at, and so the largest they may be served at.
        pixels: what the image tower reads; see ``Preprocess``.
        images: the user's own folder of reference photographs, instead of those that ship with the package.
        calibration_images: more photographs, on which a half-precision export measures the ranges of its values.
    """

    model: str
    pretrained: str | None = None
    towers: tuple[Tower, ...] = (Tower.IMAGE, Tower.TEXT)
    precision: Precision = Precision.FP32
    max_batch: int = 32
    force_quick_gelu: bool = False
    resize_mode: str | None = None
    interpolation: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pixels: str = "float32"
    images: Path | None = None
    calibration_images: Path | None = None

    def __post_init__(self) -> None:
        if self.precision not in GRAPH_PRECISIONS:
            raise ConfigError(
                f"a graph in {self.precision.value}",
                remedy="export in fp32; render-config --engine openvino then computes in bf16 or int8",
            )
        if self.calibration_images is not None and self.precision is Precision.FP32:
            raise ConfigError(
                "calibration images for an FP32 export, which needs none",
                remedy="add --precision fp16, or drop --calibration-images",
            )
        if not 1 <= self.max_batch <= 4096:
            raise ConfigError(
                f"max batch {self.max_batch}", remedy="choose 1 to 4096; 32 suits most deployments"
            )
        if self.pixels not in PIXELS:
            raise ConfigError(
                f"pixels {self.pixels!r} are unknown", remedy=f"use one of {', '.join(PIXELS)}"
            )
        if not self.towers:
            raise ConfigError("no tower to export", remedy="use --tower image, text or both")
        self.random_seed()

    def random_seed(self) -> int | None:
        """The seed of ``random[:SEED]``, or None for real weights."""
        word, _, seed = (self.pretrained or "").partition(":")
        if word != "random":
            return None
        if seed and not seed.isdecimal():
            raise ConfigError(
                f"random weights with seed {seed!r}",
                remedy="write random or random:SEED, as random:7",
            )
        return int(seed or 0)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine runs a graph inside a backend, and in what arithmetic.

    Args:
        name: the engine; None is the backend's first.
        precision: ``auto``, or a value of ``Precision``; auto is the graph's own, and for OpenVINO bfloat16 where the
            CPU has it.
        calibration_images: photographs, with captions for a text tower, on which INT8 is calibrated and held back.
    """

    name: str | None = None
    precision: str = "auto"
    calibration_images: Path | None = None

    def __post_init__(self) -> None:
        if self.precision != "auto" and self.precision not in list(Precision):
            raise ConfigError(
                f"precision {self.precision!r} is unknown",
                remedy=f"use auto, {', '.join(p.value for p in Precision)}",
            )
        if (self.precision == Precision.INT8) is not (self.calibration_images is not None):
            raise ConfigError(
                "--precision int8 and --calibration-images go together",
                remedy="INT8 is calibrated and judged on photographs of your own: add both, or neither",
            )


@dataclass(frozen=True, slots=True)
class ServingSpec:
    """How Triton runs a model: everything of config.pbtxt that is a choice. Times are in microseconds.

    ``max_batch`` None means the largest that the export was checked at, 0 a model that Triton does not batch. ``gpus``
    only with kind ``gpu``.
    """

    max_batch: int | None = None
    queue_delay_us: int = 5000
    instances: int = 1
    kind: str = "auto"
    gpus: tuple[int, ...] = ()
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_size: int = 0
    queue_timeout_us: int = 0
    timeout_action: str = "reject"
    warmup: bool = True
    version_policy: str = "latest:1"
    cuda_graphs: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_batch is not None and self.max_batch < 0:
            raise ConfigError(f"max batch {self.max_batch}", remedy="0 means no batching at all")
        if min(self.queue_delay_us, self.max_queue_size, self.queue_timeout_us) < 0:
            raise ConfigError(
                "a negative delay, timeout or queue size", remedy="use 0 to switch it off"
            )
        if self.instances < 1:
            raise ConfigError(
                f"{self.instances} instances", remedy="one is enough; measure before adding more"
            )
        if self.kind not in ("auto", "cpu", "gpu"):
            raise ConfigError(f"instance kind {self.kind!r}", remedy="use auto, cpu or gpu")
        if self.gpus and self.kind != "gpu":
            raise ConfigError(
                f"gpu ids with instance kind {self.kind}",
                remedy="add --instance-kind gpu, or drop --gpus",
            )
        if min(self.gpus, default=0) < 0 or len(set(self.gpus)) != len(self.gpus):
            raise ConfigError(
                f"gpu ids {list(self.gpus)}", remedy="name each GPU once, counted from 0"
            )
        if self.timeout_action not in ("reject", "delay"):
            raise ConfigError(
                f"timeout action {self.timeout_action!r}", remedy="use reject or delay"
            )
        if self.queue_timeout_us == 0 and self.timeout_action == "delay":
            raise ConfigError("a timeout action without a timeout", remedy="add --queue-timeout-us")
        if any(key.startswith("clip_deploy.") for key in self.parameters):
            raise ConfigError(
                "a parameter that begins with clip_deploy.", remedy="those keys describe the model"
            )
        self.version_policy_choice()

    def version_policy_choice(self) -> tuple[str, tuple[int, ...]]:
        """``("latest", (n,))``, ``("all", ())`` or ``("specific", (versions…))``."""
        word, _, rest = self.version_policy.partition(":")
        numbers = tuple(int(n) for n in rest.split(",") if n.isdecimal())
        wanted = {"all": 0, "latest": 1}.get(word, len(numbers) or None)
        if word not in ("all", "latest", "specific") or len(numbers) != wanted or 0 in numbers:
            raise ConfigError(
                f"version policy {self.version_policy!r}",
                remedy="use latest:N, all, or specific:1,3",
            )
        return word, numbers
