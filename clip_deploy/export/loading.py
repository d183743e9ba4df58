"""An open_clip model in memory; a checkpoint is never unpickled beyond tensors, and every failure says what to do."""

from __future__ import annotations

import contextlib
import pickle
import re
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ClipDeployError, ExportError, MissingDependency, extra
from clip_deploy.export.sources import first_line, quiet, unreachable

with extra("export"):
    import open_clip
    import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.export.sources import Source
    from clip_deploy.spec import EncoderSpec


def load(source: Source, spec: EncoderSpec) -> Any:
    """The open_clip model (both towers, FP32, in evaluation mode, on the CPU).

    Raises:
        ExportError: the checkpoint is damaged, unsafe, or of another architecture.
        MissingDependency: the architecture needs a library that is not installed.
    """
    overrides = {
        "mean": spec.mean,
        "std": spec.std,
        "interpolation": spec.interpolation,
        "resize_mode": spec.resize_mode,
    }
    if source.seed is not None:
        torch.manual_seed(source.seed)
    with quiet(), _translated(source):
        model = open_clip.create_model(
            source.name,
            pretrained=source.pretrained,
            load_weights=source.seed is None,
            require_pretrained=source.seed is None,
            pretrained_text=False,
            force_quick_gelu=spec.force_quick_gelu,
            force_preprocess_cfg={
                key: value for key, value in overrides.items() if value is not None
            },
            weights_only=True,
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(source: Source) -> Any:
    """open_clip's own tokenizer for the model."""
    with quiet(), _translated(source):
        return open_clip.get_tokenizer(source.name)


@contextlib.contextmanager
def _translated(source: Source) -> Iterator[None]:
    """open_clip's and torch's failures while building or filling a model, in words that help."""
    what = source.checkpoint or source.name
    try:
        yield
    except ClipDeployError:
        raise
    except ImportError as error:
        library = error.name or "a library"
        raise MissingDependency(
            f"{source.name} needs {library}, which is not installed",
            remedy=f"pip install {library}",
        ) from error
    except pickle.UnpicklingError as error:
        raise ExportError(
            f"{what} holds more than tensors, and loading it could run code: {first_line(error)}",
            remedy="where you trust it, load it yourself and save its state_dict() with safetensors.torch.save_file",
        ) from error
    except (OSError, EOFError) as error:
        if "hf-hub" in source.name or "huggingface" in str(error).lower():
            raise unreachable(source.name, error) from error
        raise ExportError(
            f"{what} is damaged: {first_line(error)}", remedy="copy or download it again"
        ) from error
    except Exception as error:  # RuntimeError, KeyError, SafetensorError, AttributeError …
        raise _misfit(source, error) from error


def _misfit(source: Source, error: Exception) -> ExportError:
    message = str(error)
    damaged = (
        "zip archive",
        "central directory",
        "header",
        "incomplete",
        "deserializ",
        "unexpected end",
    )
    if type(error).__name__ == "SafetensorError" or any(
        word in message.lower() for word in damaged
    ):
        return ExportError(
            f"{source.checkpoint} is damaged: {first_line(error)}",
            remedy="copy or download it again",
        )
    if source.checkpoint is None:
        return ExportError(
            f"{source.name} cannot be built: {first_line(error)}", remedy="check the model config"
        )
    fits = _architectures_of(source.checkpoint)
    return ExportError(
        f"{source.checkpoint} holds the weights of another architecture than {source.name}",
        remedy=f"its weights fit {' or '.join(fits)}"
        if fits
        else "name the architecture that it was trained with",
    )


def _architectures_of(checkpoint: Path) -> list[str]:
    """Architectures of open_clip with the widths that a checkpoint's tensors have; at most four names."""
    try:
        with quiet():
            weights = open_clip.factory.load_state_dict(str(checkpoint), weights_only=True)
        patches = weights["visual.conv1.weight"].shape
        words = next(weights[key] for key in weights if key.endswith("token_embedding.weight"))
        layers = len(set(re.findall(r"visual\.transformer\.resblocks\.(\d+)\.", " ".join(weights))))
        embed_dim = weights["visual.proj"].shape[1]
    except Exception:  # only a hint is lost
        return []
    wanted = (patches[0], patches[-1], layers, words.shape[1], embed_dim)
    configs = {name: open_clip.get_model_config(name) for name in open_clip.list_models()}
    return [name for name, config in configs.items() if _widths(config) == wanted][:4]


def _widths(config: dict[str, Any]) -> tuple[Any, ...] | None:
    """What ``_architectures_of`` compares, with open_clip's defaults; None for towers that are not its own."""
    vision, text = config["vision_cfg"], config["text_cfg"]
    if "timm_model_name" in vision or "hf_model_name" in text:
        return None
    sizes = (vision.get("width", 768), vision.get("patch_size", 16), vision.get("layers", 12))
    return (*sizes, text.get("width", 512), config["embed_dim"])
