"""CD1xx: folders, names and versions."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.model import BACKEND_FILES, CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_MODEL_FILES = {file for _, file in BACKEND_FILES.values()}


@rule(
    "CD101",
    "config-not-found",
    Severity.WARNING,
    "Triton reads config.pbtxt in the model's folder and nothing else; without it, it completes a config of its own, "
    "with a max_batch_size of 4.",
    bad=Example(files={"config.pbtxt": "missing", "config.pbtext": "name: 'clip_image'"}),
    good=Example(),
)
def config_not_found(model: Model, target: Target) -> Iterator[Hit]:
    if model.has_config:
        return
    inside = [
        path for folder in model.folders.values() if folder.is_dir() for path in folder.iterdir()
    ]
    for path in sorted([*model.folder.iterdir(), *inside]):
        if path.is_file() and _looks_like_config(path.name):
            yield Hit(
                f"{path.relative_to(model.folder)} is not read: Triton looks for {CONFIG} in the model's folder",
                file=path,
                remedy=f"mv {path.relative_to(model.folder)} {CONFIG}",
            )


def _looks_like_config(name: str) -> bool:
    lower = name.lower()
    near = difflib.SequenceMatcher(None, lower, CONFIG).ratio() > 0.75
    return (
        lower == CONFIG
        or lower.endswith((".pbtxt", ".pbtext", ".prototxt"))
        or (near and "config" in lower)
    )


@rule(
    "CD102",
    "no-version",
    Severity.ERROR,
    "A model is loaded from a folder whose name is a version number; without one that its version policy allows, "
    "Triton refuses it.",
    bad=Example(files={"1": "missing"}),
    good=Example(),
)
def no_version(model: Model, target: Target) -> Iterator[Hit]:
    if model.served or not (model.is_parsed or not model.has_config):
        return
    there = f"it has {', '.join(map(str, model.folders))}" if model.folders else "it has none"
    place = model.place("version_policy")
    loose = [
        path.name for path in model.folder.iterdir() if path.name in _MODEL_FILES and path.is_file()
    ]
    hint = f"; {loose[0]} belongs into a folder named 1" if loose else ""
    if model.name.startswith("."):
        hint = "; every folder in a repository is a model to Triton, hidden ones too"
    yield Hit(
        f"no version that the policy allows: {there}{hint}",
        place,
        file=None if place else model.folder,
        remedy=f"mkdir {model.name}/1 && mv {model.name}/{loose[0]} {model.name}/1/"
        if loose
        else None,
    )


@rule(
    "CD103",
    "version-name",
    Severity.WARNING,
    "A folder whose name is not a plain number is no version to Triton: it is ignored without a word that reaches you.",
    bad=Example(files={"v2/model.onnx": "graph"}),
    good=Example(files={"2/model.onnx": "graph"}),
)
def version_name(model: Model, target: Target) -> Iterator[Hit]:
    for folder in sorted(path for path in model.folder.iterdir() if path.is_dir()):
        plain = re.fullmatch(r"0|[1-9][0-9]*", folder.name)
        if plain or not any((folder / file).exists() for file in _MODEL_FILES):
            continue
        leading = re.match(r"\s*[-+]?([0-9]+)", folder.name)
        if leading and not (model.folder / leading.group(1)).is_dir():
            continue  # CD106 says it
        if any(folder.samefile(version) for version in model.folders.values() if version.is_dir()):
            continue  # reached by a link
        number = re.search(r"[1-9][0-9]*", folder.name)
        fix = f"mv {model.name}/{folder.name} {model.name}/{number.group()}" if number else None
        yield Hit(
            f"the folder {folder.name} holds a model and is not loaded", file=folder, remedy=fix
        )


@rule(
    "CD104",
    "version-absent",
    Severity.WARNING,
    "A version that the policy names and that is not there is left out, and Triton goes on with the others.",
    bad="version_policy: { specific: { versions: [ 1, 3 ] } }",
    good="version_policy: { specific: { versions: [ 1 ] } }",
)
def version_absent(model: Model, target: Target) -> Iterator[Hit]:
    wanted = model.config.version_policy.specific.versions
    absent = [str(v) for v in wanted if v not in model.folders]
    if absent and model.served:
        yield Hit(
            f"the policy names version {', '.join(absent)}, which is not there",
            model.place("version_policy", "specific", "versions"),
        )


@rule(
    "CD105",
    "folder-name",
    Severity.ERROR,
    "The folder's name and the config's name must be equal.",
    bad='name: "clip_image_encoder"',
    good='name: "clip_image"',
)
def folder_name(model: Model, target: Target) -> Iterator[Hit]:
    name = model.config.name
    if name and name != model.name:
        message = f"the config names the model {name!r}, its folder {model.name!r}"
        yield model.hit(message, "name", right=f'name: "{model.name}"')


@rule(
    "CD106",
    "version-number-with-rest",
    Severity.ERROR,
    "Triton reads the number at the beginning of a folder's name and then looks for a folder of just that number.",
    bad=Example(files={"1": "missing", "1_final/model.onnx": "graph"}),
    good=Example(),
)
def version_number_with_rest(model: Model, target: Target) -> Iterator[Hit]:
    for version, folder in model.served.items():
        if version >= 2**63:
            message = "a version beyond what a number can hold: the server ends"
            yield Hit(message, file=model.folder)
        elif not folder.is_dir():
            yield Hit(
                f"version {version} is loaded from a folder named {version}, which is not there",
                file=model.folder,
                remedy=f"rename the folder that begins with {version} to {version}",
            )


@rule(
    "CD107",
    "link-to-nowhere",
    Severity.ERROR,
    "Triton looks at everything in a model's folder and beside it; a link that leads nowhere stops it there.",
    bad=Example(files={"notes.txt": "link to nowhere"}),
    good=Example(),
)
def link_to_nowhere(model: Model, target: Target) -> Iterator[Hit]:
    folders = [model.folder]
    if model is next(iter(model.repository.models.values())):
        folders.append(model.repository.path)  # said once
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_symlink() and not path.exists() and path.name != CONFIG:
                whole = folder is not model.folder
                message = f"{path.name} is a link that leads nowhere, and stops "
                message += "the whole repository" if whole else "the model"
                yield Hit(message, file=path)
