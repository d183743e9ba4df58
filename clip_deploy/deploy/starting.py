"""The first clip-deploy.toml: what this machine has is told in it, and nothing is chosen by it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from clip_deploy.deploy.reading import read
from clip_deploy.deploy.schema import SCHEMA_FILE, schema, starting_file
from clip_deploy.doctor import examine
from clip_deploy.errors import ConfigError
from clip_deploy.files import storage

if TYPE_CHECKING:
    from clip_deploy.doctor import Finding

# What doctor looks for → what its presence lets a person choose.
_CHOICES = {
    "embedded server": 'backend = "python" is smoke-tested in it',
    "OpenVINO": 'engine = "openvino" is the fastest on a CPU',
    "Docker": 'backend = "onnxruntime" is smoke-tested in NVIDIA\'s image',
    "GPU": 'backend = "tensorrt" with precision = "fp16" in the encoder serves on it',
    "TensorRT": "plans can be built here",
    "TensorRT check": 'require = ["tensorrt-check"] has TensorRT\'s parser read the graphs',
}


def start(path: Path, model: str, pretrained: str | None, name: str) -> list[Path]:
    """Write a file to begin with, and beside it the schema for editors; what is there is left alone.

    Raises:
        ConfigError: there is such a file already, the model's name does not fit in one, or the disk is full.
    """
    seen = [None if word is None else _seen_from(path.parent, word) for word in (model, pretrained)]
    text = starting_file(seen[0] or model, seen[1], name, [_note(each) for each in _found()])
    _write(path, text)
    try:
        read(path)
    except ConfigError:
        path.unlink()
        raise
    written = [path]
    beside = path.parent / SCHEMA_FILE
    if not beside.exists():
        _write(beside, json.dumps(schema(), indent=2, ensure_ascii=False) + "\n")
        written.append(beside)
    return written


def _seen_from(folder: Path, word: str) -> str:
    """A path as seen from the file's folder, where it is one as seen from here; a name stays one."""
    path = Path(word)
    return word if path.is_absolute() or not path.exists() else os.path.relpath(path, folder)


def _found() -> list[Finding]:
    return [each for each in examine() if each.name in _CHOICES]


def _note(finding: Finding) -> str:
    detail = " ".join(finding.detail.split())
    if finding.found:
        return f"This machine has {finding.name} ({detail[:60]}): {_CHOICES[finding.name]}."
    return f"This machine lacks {finding.name}: {finding.remedy}; then {_CHOICES[finding.name]}."


def _write(path: Path, text: str) -> None:
    """Write a new file, whole or not at all."""
    with storage(path, ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(
                f"{path} is there already", remedy="edit it, or name another with --file"
            ) from None
        except OSError:
            path.unlink(missing_ok=True)
            raise
