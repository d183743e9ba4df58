"""One encoder of a CLIP model, cut out of it, with its contract read off the loaded model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import extra
from clip_deploy.spec import Preprocess, Scoring, Tower

with extra("export"):
    import torch
    from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Submodules that an encoder never calls: dropped before tracing, so that one tower's export holds one tower's weights.
_UNUSED = {
    Tower.IMAGE: ("text", "transformer", "token_embedding", "ln_final", "text_decoder"),
    Tower.TEXT: ("visual", "text_decoder"),
}


class Encoder(nn.Module):
    """An encoder whose output is of unit length; ``forward`` takes what the served model takes.

    Image: pixels, float32 or uint8 ``[batch, 3, height, width]`` → ``[batch, embed_dim]``.
    Text: token ids, int32 ``[batch, context_length]`` → ``[batch, embed_dim]``.
    """

    def __init__(self, model: Any, tower: Tower, preprocess: Preprocess | None = None) -> None:
        super().__init__()
        self.normalises = preprocess is not None and preprocess.pixels == "uint8"
        if preprocess is not None and self.normalises:
            self.register_buffer("mean", torch.tensor(preprocess.mean).reshape(1, 3, 1, 1))
            self.register_buffer("std", torch.tensor(preprocess.std).reshape(1, 3, 1, 1))
        for name in _UNUSED[tower]:
            if hasattr(model, name):
                setattr(model, name, None)
        self.model = model
        self.tower = tower

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.normalises:
            inputs = (inputs.float() / 255 - self.get_buffer("mean")) / self.get_buffer("std")
        return embed(self.model, self.tower, inputs)

    def release(self) -> None:
        """Give the weights' memory back now: torch's exporter keeps references to them in caches of its own."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype)


def embed(model: Any, tower: Tower, inputs: torch.Tensor) -> torch.Tensor:
    """Embeddings of unit length, ``[batch, embed_dim]``."""
    encode = model.encode_image if tower is Tower.IMAGE else model.encode_text
    return nn.functional.normalize(encode(inputs), dim=-1)


def weights_sha256(model: Any) -> str:
    """SHA-256 over names and values of all parameters and buffers of the whole model: what ties two towers together."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def preprocess_of(model: Any) -> Preprocess:
    """The preprocessing that open_clip attaches to a loaded model."""
    config: Mapping[str, Any] = model.visual.preprocess_cfg
    size = config["size"]
    interpolation = config["interpolation"]
    return Preprocess(
        size=tuple(size) if isinstance(size, (tuple, list)) else (size, size),
        mean=_triple(config["mean"]),
        std=_triple(config["std"]),
        resize_mode=config["resize_mode"],
        # At inference open_clip reads anything but bilinear, "random" included, as bicubic.
        interpolation="bilinear" if interpolation == "bilinear" else "bicubic",
        fill_color=config["fill_color"],
    )


def scoring_of(model: Any) -> Scoring:
    """Softmax over a scaled cosine (CLIP), or a sigmoid with a bias (SigLIP): a bias comes from that training."""
    scale = float(model.logit_scale.exp().flatten()[0])
    bias = getattr(model, "logit_bias", None)
    if bias is None:
        return Scoring("softmax", scale)
    return Scoring("sigmoid", scale, float(bias.flatten()[0]))


def activation_of(model: Any) -> str:
    """The activation of the MLP blocks, by class name: QuickGELU and GELU give different vectors."""
    names = {type(module).__name__ for module in model.modules()}
    return next((name for name in ("QuickGELU", "GELU", "ReLU") if name in names), "other")


def answers(encoder: Callable[[torch.Tensor], torch.Tensor], inputs: Any) -> Any:
    """torch's FP32 embeddings, numpy ``[n, embed_dim]``, computed row by row: what everything is compared with."""
    with torch.inference_mode():
        rows = [encoder(torch.from_numpy(inputs[i : i + 1])) for i in range(len(inputs))]
    return torch.cat(rows).float().numpy()


def _triple(values: Any) -> tuple[float, float, float]:
    red, green, blue = values if isinstance(values, (tuple, list)) else (values,) * 3
    return float(red), float(green), float(blue)
