"""What a caller must know to use an encoder: written by export, carried in config.pbtxt, read back by the client."""

from __future__ import annotations

import base64
import functools
import lzma
import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from clip_deploy.errors import ConfigError
from clip_deploy.spec import PIXELS, Precision, Preprocess, Scoring, TensorSpec, Tokens, Tower

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTRACT = "1"
PREFIX = "clip_deploy."

# A tokenizer of 256,000 words takes 35 MB as JSON; more than this is not one.
_MAX_TOKENIZER_BYTES = 128 * 2**20

_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True, slots=True)
class Contract:
    """One encoder, described so that nobody has to guess.

    ``trained`` is False for random weights, whose vectors mean nothing. ``weights_sha256`` is over all parameters of
    the loaded model, both towers: two encoders with the same value belong together. Exactly one of ``preprocess``
    (image) and ``tokens`` (text) is set.
    """

    tower: Tower
    model: str
    pretrained: str
    trained: bool
    precision: Precision
    input: TensorSpec
    output: TensorSpec
    scoring: Scoring
    weights_sha256: str
    graph_sha256: str
    preprocess: Preprocess | None = None
    tokens: Tokens | None = None

    def __post_init__(self) -> None:
        if (self.preprocess is None) is (self.tower is Tower.IMAGE) or (self.tokens is None) is (
            self.tower is Tower.TEXT
        ):
            raise ConfigError(
                f"an {self.tower.value} encoder without its preprocessing",
                remedy="export the model again",
            )
        if self.preprocess and PIXELS[self.preprocess.pixels] != self.input.dtype:
            raise ConfigError(
                f"an input of {self.input.dtype} for {self.preprocess.pixels} pixels",
                remedy="render the model again: nobody could tell who normalises",
            )

    @property
    def embed_dim(self) -> int:
        return self.output.shape[0]

    def to_parameters(self) -> dict[str, str]:
        """Keys and values for ``parameters`` of config.pbtxt; tensors are left to its ``input`` and ``output``."""
        values: dict[str, Any] = {
            "contract": CONTRACT,
            "tower": self.tower.value,
            "model": self.model,
            "pretrained": self.pretrained,
            "trained": self.trained,
            "precision": self.precision.value,
            "normalized": True,
            "scoring": self.scoring.kind,
            "logit_scale": self.scoring.scale,
            "logit_bias": self.scoring.bias,
            "weights_sha256": self.weights_sha256,
            "graph_sha256": self.graph_sha256,
        }
        if self.preprocess:
            values |= {
                "image_size": self.preprocess.size,
                "resize_mode": self.preprocess.resize_mode,
                "interpolation": self.preprocess.interpolation,
                "mean": self.preprocess.mean,
                "std": self.preprocess.std,
                "fill_color": self.preprocess.fill_color,
                "pixels": self.preprocess.pixels,
            }
        if self.tokens:
            values |= {
                "context_length": self.tokens.context_length,
                "pad_id": self.tokens.pad_id,
                "clean": self.tokens.clean,
                "tokenizer_sha256": self.tokens.sha256,
            }
            if self.tokens.zeroed_id is not None:
                values["zeroed_id"] = self.tokens.zeroed_id
        return {PREFIX + key: _text(value) for key, value in values.items()}

    @classmethod
    def from_parameters(
        cls,
        parameters: Mapping[str, str],
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> Contract:
        """Read a served model's description.

        Raises:
            ConfigError: the model was not rendered by clip-deploy, or by a version this one cannot read.
        """
        reader = _Parameters(parameters)
        if reader.text("contract") != CONTRACT:
            raise ConfigError(
                f"the model follows contract {reader.text('contract')!r}; this version reads {CONTRACT!r}",
                remedy="use the clip-deploy version that rendered the model, or render it again",
            )
        tower = reader.choice("tower", Tower)
        is_image = tower is Tower.IMAGE
        if len(inputs) != 1 or len(outputs) != 1:
            raise ConfigError(
                "an encoder has one input and one output", remedy="render the model again"
            )
        return cls(
            tower=tower,
            model=reader.text("model"),
            pretrained=reader.text("pretrained"),
            trained=reader.text("trained") == "true",
            precision=reader.choice("precision", Precision),
            input=inputs[0],
            output=outputs[0],
            scoring=Scoring(
                reader.text("scoring"), reader.number("logit_scale"), reader.number("logit_bias")
            ),
            weights_sha256=reader.text("weights_sha256"),
            graph_sha256=reader.text("graph_sha256"),
            preprocess=reader.preprocess() if is_image else None,
            tokens=None if is_image else reader.tokens(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tower": self.tower.value, "precision": self.precision.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        preprocess, tokens = data["preprocess"], data["tokens"]
        return cls(
            **{
                key: data[key]
                for key in ("model", "pretrained", "trained", "weights_sha256", "graph_sha256")
            },
            tower=Tower(data["tower"]),
            precision=Precision(data["precision"]),
            input=_tensor(data["input"]),
            output=_tensor(data["output"]),
            scoring=Scoring(**data["scoring"]),
            preprocess=_preprocess(preprocess) if preprocess else None,
            tokens=Tokens(**tokens) if tokens else None,
        )


def _tensor(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(data["name"], data["dtype"], tuple(data["shape"]))


def _preprocess(data: Mapping[str, Any]) -> Preprocess:
    lists = {key: tuple(data[key]) for key in ("size", "mean", "std")}
    return Preprocess(**{**data, **lists})


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Parameters:
    """Typed reads from the flat strings of a model config, with one message for what is missing."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters

    def text(self, key: str) -> str:
        try:
            return self._parameters[PREFIX + key]
        except KeyError:
            raise ConfigError(
                f"the model config has no parameter {PREFIX + key}",
                remedy="serve a model that clip-deploy render-config wrote: the client guesses nothing",
            ) from None

    def choice(self, key: str, kind: type[_Choice]) -> _Choice:
        try:
            return kind(self.text(key))
        except ValueError:
            raise ConfigError(
                f"parameter {PREFIX + key} is {self.text(key)!r}, not one of {', '.join(c.value for c in kind)}",
                remedy="render the model again, or upgrade clip-deploy on this machine",
            ) from None

    def numbers(self, key: str) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in self.text(key).split(","))
        except ValueError:
            raise ConfigError(
                f"parameter {PREFIX + key} is {self.text(key)!r}, not numbers",
                remedy="render the model again",
            ) from None

    def number(self, key: str) -> float:
        return self.numbers(key)[0]

    def integer(self, key: str) -> int:
        return _whole(self.number(key), key)

    def preprocess(self) -> Preprocess:
        height, width = self.numbers("image_size")
        return Preprocess(
            size=(_whole(height, "image_size"), _whole(width, "image_size")),
            mean=self.numbers("mean"),  # type: ignore[arg-type]  # Preprocess checks the length
            std=self.numbers("std"),  # type: ignore[arg-type]
            resize_mode=self.text("resize_mode"),
            interpolation=self.text("interpolation"),
            fill_color=self.integer("fill_color"),
            pixels=self.text("pixels"),
        )

    def tokens(self) -> Tokens:
        return Tokens(
            context_length=self.integer("context_length"),
            pad_id=self.integer("pad_id"),
            clean=self.text("clean"),
            sha256=self.text("tokenizer_sha256"),
            zeroed_id=self.integer("zeroed_id")
            if PREFIX + "zeroed_id" in self._parameters
            else None,
        )


@functools.lru_cache(maxsize=2)  # a second of work, asked for again by every rendering
def pack(data: str) -> str:
    """A tokenizer's JSON as the value of a parameter: compressed, in ASCII (CLIP's 1.7 MB become 0.6)."""
    return base64.b64encode(lzma.compress(data.encode(), preset=9)).decode()


def unpack(value: str) -> str:
    """What ``pack`` packed.

    Raises:
        ConfigError: the value is damaged, or larger than any tokenizer.
    """
    decoder = lzma.LZMADecompressor()
    try:
        data = decoder.decompress(
            base64.b64decode(value, validate=True), _MAX_TOKENIZER_BYTES
        ).decode()
    except (ValueError, lzma.LZMAError) as error:
        raise ConfigError(
            f"the model's tokenizer is damaged: {error}", remedy="render the model again"
        ) from error
    if not decoder.eof:
        raise ConfigError(
            "the model's tokenizer is cut off or too large", remedy="render the model again"
        )
    return data


def _whole(value: float, key: str) -> int:
    if not math.isfinite(value):
        raise ConfigError(f"{PREFIX}{key} is {value}", remedy="render the model again")
    return int(value)
