"""Which model, which weights: names and paths, resolved before anything is read, and nothing chosen unasked."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError, ExportError, extra
from clip_deploy.files import digest

with extra("export"):
    import open_clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.spec import EncoderSpec

_CONFIG_KEYS = ("embed_dim", "vision_cfg", "text_cfg")
_CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".npz", ".ckpt")
# Families whose published weights were trained with QuickGELU; seen in file names of local checkpoints.
_QUICK_GELU_FAMILIES = ("openai", "quickgelu", "dfn", "metaclip", "laion400m", "cc12m", "yfcc15m")


@dataclass(frozen=True, slots=True)
class Source:
    """What will be loaded, resolved but not read.

    Args:
        name: what open_clip is asked for: an architecture, or a name with its ``hf-hub:`` or ``local-dir:`` schema.
        config: the open_clip model config.
        pretrained: open_clip's tag or a checkpoint's path; None for random weights and for schemas.
        label: the weights in the user's words, for manifests and messages.
        checkpoint: the file with the weights; None for random ones.
        seed: of random weights.
    """

    name: str
    config: dict[str, Any]
    label: str
    pretrained: str | None = None
    checkpoint: Path | None = None
    seed: int | None = None

    @property
    def quick_gelu(self) -> bool:
        return bool(self.config.get("quick_gelu", False))

    def checkpoint_sha256(self) -> str | None:
        return digest([self.checkpoint]) if self.checkpoint else None


def resolve(spec: EncoderSpec) -> Source:
    """Find what a spec names; downloads the checkpoint of a tag or a hub model where it is not cached yet.

    Raises:
        ConfigError: no such model, tag or file, with the nearest names.
        ExportError: the hub cannot be reached.
    """
    seed = spec.random_seed()
    if spec.model.startswith("hf-hub:"):
        return _from_hub(spec.model, seed)
    folder = Path(spec.model.removeprefix("local-dir:"))
    if spec.model.startswith("local-dir:") or folder.is_dir():
        return _from_folder(folder, seed)
    name = _registered(Path(spec.model)) if spec.model.endswith(".json") else _known(spec.model)
    config = open_clip.get_model_config(name)
    if seed is not None:
        return Source(name, config, label=f"random:{seed}", seed=seed)
    if spec.pretrained is None:
        raise ConfigError(f"{name} needs weights", remedy=f"add --pretrained {_choices(name)}")
    return _with_weights(name, config, spec.pretrained)


def notes(source: Source, spec: EncoderSpec) -> list[str]:
    """Warnings about choices that load without complaint and give other vectors than the weights were trained for."""
    return [note for check in (_quick_gelu_note, _preprocess_note) if (note := check(source, spec))]


def _from_hub(name: str, seed: int | None) -> Source:
    repository = name.removeprefix("hf-hub:")
    try:
        with quiet():
            config = open_clip.get_model_config(name)
            weights = (
                None if seed is not None else open_clip.download_pretrained_from_hf(repository)
            )
    except (
        Exception
    ) as error:  # huggingface_hub raises a dozen kinds: connection, offline mode, 404, gated …
        raise unreachable(name, error) from error
    label = name if seed is None else f"random:{seed}"
    return Source(name, config, label=label, checkpoint=weights and Path(weights), seed=seed)


def _from_folder(folder: Path, seed: int | None) -> Source:
    config = _read_config(folder / "open_clip_config.json")
    if seed is not None:
        return Source(f"local-dir:{folder}", config, label=f"random:{seed}", seed=seed)
    return Source(
        f"local-dir:{folder}", config, label=str(folder), checkpoint=_checkpoint_in(folder)
    )


def _with_weights(name: str, config: dict[str, Any], pretrained: str) -> Source:
    path = Path(pretrained)
    if path.is_dir():
        return _with_folder(name, config, path)
    if path.is_file():
        return Source(name, config, label=pretrained, pretrained=pretrained, checkpoint=path)
    tag = open_clip.get_pretrained_cfg(name, pretrained)
    if tag:
        try:
            with quiet():
                checkpoint = open_clip.download_pretrained(tag)
        except Exception as error:  # see _from_hub
            raise unreachable(f"the weights {pretrained} of {name}", error) from error
        return Source(
            name, config, label=pretrained, pretrained=pretrained, checkpoint=Path(checkpoint)
        )
    if path.suffix in _CHECKPOINT_SUFFIXES or len(path.parts) > 1:
        raise ConfigError(f"there is no checkpoint at {path}", remedy="check the path")
    raise ConfigError(
        f"{name} has no weights called {pretrained!r}",
        remedy=f"add --pretrained {_choices(name, pretrained)}",
    )


def _with_folder(name: str, config: dict[str, Any], folder: Path) -> Source:
    """A checkpoint folder under an architecture's name: its own config, where it has one, must be the same."""
    checkpoint = _checkpoint_in(folder)
    if not (folder / "open_clip_config.json").is_file():
        return Source(
            name, config, label=str(folder), pretrained=str(checkpoint), checkpoint=checkpoint
        )
    own = _read_config(folder / "open_clip_config.json")
    if any(own[key] != config[key] for key in ("embed_dim", "vision_cfg")):
        raise ConfigError(
            f"the checkpoint in {folder} is not {name}: its open_clip_config.json describes another model",
            remedy=f"run clip-deploy export {folder}",
        )
    return Source(f"local-dir:{folder}", own, label=str(folder), checkpoint=checkpoint)


def _checkpoint_in(folder: Path) -> Path:
    from open_clip.factory import (
        _find_checkpoint_in_dir,
    )  # the rule that create_model follows for local-dir:

    with quiet():
        found = _find_checkpoint_in_dir(folder)
    if found is None:
        raise ConfigError(
            f"{folder} holds no weights", remedy="it needs a .safetensors, .bin or .pth file"
        )
    return Path(found)


def _registered(path: Path) -> str:
    """Make a user's model config known to open_clip under its file name; returns the name."""
    config = _read_config(path)
    name = path.parent.resolve().name if path.stem == "open_clip_config" else path.stem
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.json").write_text(json.dumps(config), "utf-8")
        open_clip.add_model_config(Path(folder) / f"{name}.json")
        open_clip.factory._MODEL_CONFIG_PATHS.pop()  # the file is about to go; what it said is registered
    return name


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no model config at {path}", remedy="check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a model config: {error}",
            remedy="write an open_clip model config in JSON",
        ) from error
    config = config.get("model_cfg", config) if isinstance(config, dict) else {}
    if missing := [key for key in _CONFIG_KEYS if key not in config]:
        raise ConfigError(
            f"{path} lacks {', '.join(missing)}", remedy="write an open_clip model config in JSON"
        )
    return dict(config)


def _known(model: str) -> str:
    names = open_clip.list_models()
    name = model.replace("/", "-")
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
    raise ConfigError(
        f"open_clip knows no model {model!r}",
        remedy=f"did you mean {' or '.join(near)}? A config of your own is given as a path that ends in .json",
    )


def _choices(name: str, wanted: str = "") -> str:
    """What ``--pretrained`` can say for an architecture, the nearest first."""
    tags = open_clip.list_pretrained_tags_by_model(name)
    near = difflib.get_close_matches(wanted, tags, n=4, cutoff=0.3) or tags[:6]
    return ", ".join([*near, "a checkpoint's path, or random (vectors without meaning)"])


def unreachable(what: str, error: Exception) -> ExportError:
    root: BaseException = error
    while cause := root.__cause__ or root.__context__:  # wrapped several times on its way up
        root = cause
    return ExportError(
        f"{what} could not be fetched: {first_line(root)}",
        remedy="check the name and the network, or fetch the file elsewhere and give its path as --pretrained",
    )


def _quick_gelu_note(source: Source, spec: EncoderSpec) -> str | None:
    if (
        source.quick_gelu
        or spec.force_quick_gelu
        or source.checkpoint is None
        or "timm_model_name" in source.config["vision_cfg"]
    ):
        return None
    tag = open_clip.get_pretrained_cfg(source.name, source.pretrained or "")
    hint = (
        tag.get("quick_gelu", False)
        if tag
        else any(f in source.checkpoint.stem.lower() for f in _QUICK_GELU_FAMILIES)
    )
    if not hint:
        return None
    twin = f"{source.name}-quickgelu"
    way = f"export {twin}" if twin in open_clip.list_models() else "add --force-quick-gelu"
    return (
        f"{source.label} was trained with QuickGELU and {source.name} uses GELU: the vectors would be off. "
        f"Rather {way}."
    )


def _preprocess_note(source: Source, spec: EncoderSpec) -> str | None:
    """A local checkpoint carries no preprocessing; open_clip then assumes OpenAI's, wrong for many families."""
    is_file = source.checkpoint is not None and source.pretrained == str(source.checkpoint)
    if not is_file or spec.resize_mode or spec.mean or spec.std:
        return None
    fields = {
        "resize_mode": "shortest",
        "mean": open_clip.OPENAI_DATASET_MEAN,
        "std": open_clip.OPENAI_DATASET_STD,
    }
    tags = [
        open_clip.get_pretrained_cfg(source.name, t)
        for t in open_clip.list_pretrained_tags_by_model(source.name)
    ]
    published = {
        tuple(tag.get(field) or default for field, default in fields.items()) for tag in tags
    }
    if not published or tuple(fields.values()) in published:
        return None
    mode, mean, std = next(iter(published))
    options = (
        f"--resize-mode {mode} --mean {','.join(map(str, mean))} --std {','.join(map(str, std))}"
    )
    return (
        f"every published checkpoint of {source.name} prepares its pictures differently. "
        f"Add {options}, unless yours differs."
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """open_clip logs to the root logger and warns about what ``notes`` says better."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
