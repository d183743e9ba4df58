"""CD7xx: model files, external weights, versions of formats."""

from __future__ import annotations

import difflib
import posixpath
from typing import TYPE_CHECKING

from clip_deploy.lint import graph as graphs
from clip_deploy.lint.disk import head, names_in
from clip_deploy.lint.engine import is_version_compatible
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.plan import read_header
from clip_deploy.releases import first_that_reads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.lint.graph import Graph
    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_MANY_FILES = 16
_POINTER = b"version https://git-lfs"


@rule(
    "CD701",
    "model-file-missing",
    Severity.ERROR,
    "The backend opens one file in a version's folder, and it is not there under that name.",
    bad=Example(files={"1/model.onnx": "missing", "1/clip.onnx": "graph"}),
    good=Example(files={"1/model.onnx": "graph"}),
)
def model_file_missing(model: Model, target: Target) -> Iterator[Hit]:
    if model.is_ensemble or not model.file_name or model.backend not in _OPENED:
        return
    if model.backend == "pytorch" and model.config.runtime == "model.py":
        return  # the code finds its own files
    for folder in model.served.values():
        path = model.model_file(folder)
        if not folder.is_dir() or path.is_file() or path.is_dir():
            continue
        names = names_in(folder)
        suffix = model.file_name.rpartition(".")[2]
        same = [name for name in names if name.endswith(f".{suffix}")]
        near = same or difflib.get_close_matches(model.file_name, names, n=1)
        there = f"there is {', '.join(names[:4])}" if names else "the folder is empty"
        yield Hit(
            f"{folder.name}/{model.file_name} is not there: {there}",
            model.place("default_model_filename"),
            file=None if model.fields("default_model_filename") else folder,
            remedy=f'write default_model_filename: "{near[0]}"' if near else None,
        )


_OPENED = ("onnxruntime", "tensorrt", "python", "pytorch", "openvino")


@rule(
    "CD702",
    "not-a-graph",
    Severity.ERROR,
    "The file is empty, cut off, or something else than an ONNX graph.",
    bad=Example(files={"1/model.onnx": "cut off"}),
    good=Example(files={"1/model.onnx": "graph"}),
)
def not_a_graph(model: Model, target: Target) -> Iterator[Hit]:
    for path in model.graph_files():
        if not path.is_file() or _is_pointer(path):
            continue
        try:
            graphs.read(path)
        except graphs.Unreadable as error:
            yield Hit(f"{_inside(model, path)} {error}", file=path)
        except ModuleNotFoundError:
            return
        except OSError as error:
            yield Hit(f"{_inside(model, path)} cannot be read: {error.strerror}", file=path)


@rule(
    "CD703",
    "git-lfs-pointer",
    Severity.ERROR,
    "The repository was cloned without Git LFS: a text of three lines lies where the model should be.",
    bad=Example(files={"1/model.onnx": "lfs pointer"}),
    good=Example(files={"1/model.onnx": "graph"}),
)
def git_lfs_pointer(model: Model, target: Target) -> Iterator[Hit]:
    for folder in model.served.values():
        if not folder.is_dir():
            continue
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
            if path.is_file() and _is_pointer(path):
                yield Hit(
                    f"{_inside(model, path)} is a Git LFS pointer", file=path, remedy="git lfs pull"
                )


@rule(
    "CD704",
    "empty-file",
    Severity.ERROR,
    "A model file of no bytes: a copy or a download that did not finish.",
    bad=Example(config='backend: "python"', files={"1/model.py": ""}),
    good=Example(config='backend: "python"', files={"1/model.py": "python"}),
)
def empty_file(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend not in _OPENED or model.backend == "onnxruntime" or not model.file_name:
        return
    for folder in model.served.values():
        path = model.model_file(folder)
        if path.is_file() and path.stat().st_size == 0:
            yield Hit(f"{_inside(model, path)} is empty", file=path)


@rule(
    "CD705",
    "external-data-missing",
    Severity.ERROR,
    "The graph's weights lie in another file, which must travel with it.",
    bad=Example(files={"1/model.onnx": "graph with external data", "1/model.onnx.data": "missing"}),
    good=Example(files={"1/model.onnx": "graph with external data"}),
)
def external_data_missing(model: Model, target: Target) -> Iterator[Hit]:
    for path, graph in _graphs(model):
        for location in sorted({each.location for each in graph.external}):
            if _is_outside(location):
                continue
            if not (path.parent / location).is_file():
                near = difflib.get_close_matches(location, names_in(path.parent), n=1)
                hint = f"; there is {near[0]}" if near else ""
                yield Hit(
                    f"the weights of {_inside(model, path)} are in {location}, which is not there{hint}",
                    file=path,
                )


@rule(
    "CD706",
    "external-data-outside",
    Severity.WARNING,
    "Weights outside the version's folder do not travel with it, and newer ONNX Runtime versions refuse them.",
    bad=Example(files={"1/model.onnx": "graph with external data outside"}),
    good=Example(files={"1/model.onnx": "graph with external data"}),
)
def external_data_outside(model: Model, target: Target) -> Iterator[Hit]:
    for path, graph in _graphs(model):
        for location in sorted(
            {each.location for each in graph.external if _is_outside(each.location)}
        ):
            yield Hit(
                f"the weights of {_inside(model, path)} are in {location}, outside its folder",
                file=path,
            )


@rule(
    "CD707",
    "external-data-short",
    Severity.ERROR,
    "The weight file ends before the last tensor does: a copy that did not finish, or another model's weights.",
    bad=Example(files={"1/model.onnx": "graph with external data", "1/model.onnx.data": "cut off"}),
    good=Example(files={"1/model.onnx": "graph with external data"}),
)
def external_data_short(model: Model, target: Target) -> Iterator[Hit]:
    for path, graph in _graphs(model):
        for location in sorted({each.location for each in graph.external}):
            file = path.parent / location
            if _is_outside(location) or not file.is_file():
                continue
            here = [each for each in graph.external if each.location == location]
            if any(each.is_invalid for each in here):
                yield Hit(
                    f"{_inside(model, path)} gives an offset or length in {location} that is no number",
                    file=path,
                )
                continue
            needed = max(each.offset + (each.length or 0) for each in here)
            size = file.stat().st_size
            if size < needed:
                yield Hit(
                    f"{_inside(model, file)} has {size:,} bytes, the graph needs {needed:,}",
                    file=file,
                )


@rule(
    "CD708",
    "many-external-files",
    Severity.WARNING,
    "One file per tensor makes a model load for minutes, and is easily copied incompletely.",
    bad=Example(files={"1/model.onnx": "graph with many external files"}),
    good=Example(files={"1/model.onnx": "graph with external data"}),
)
def many_external_files(model: Model, target: Target) -> Iterator[Hit]:
    for path, graph in _graphs(model):
        files = {each.location for each in graph.external}
        if len(files) > _MANY_FILES:
            yield Hit(
                f"the weights of {_inside(model, path)} are in {len(files)} files: save them as one",
                file=path,
            )


@rule(
    "CD709",
    "graph-too-new",
    Severity.ERROR,
    "The target's ONNX Runtime refuses newer IR versions and opsets than it knows.",
    bad=Example(files={"1/model.onnx": "graph of IR 99"}),
    good=Example(files={"1/model.onnx": "graph"}),
)
def graph_too_new(model: Model, target: Target) -> Iterator[Hit]:
    limits = target.release.onnx_limits()
    if limits is None:
        return
    if model.backend != "onnxruntime":
        return  # our Python models run it in an ONNX Runtime of their own
    for path, graph in _graphs(model):
        opset = graph.opsets.get("", graph.opsets.get("ai.onnx", 0))
        if graph.ir_version <= limits[0] and opset <= limits[1]:
            continue
        first = first_that_reads(graph.ir_version, opset)
        later = (
            f"the first release that reads it is {first.name}"
            if first
            else "no known release reads it"
        )
        yield Hit(
            f"{_inside(model, path)} has IR version {graph.ir_version} and opset {opset}; Triton {target.release.name} "
            f"reads IR {limits[0]} and opset {limits[1]} at most; {later}",
            file=path,
        )


@rule(
    "CD710",
    "not-a-plan",
    Severity.ERROR,
    "The file is no TensorRT plan; one of TensorRT-RTX is not for Triton.",
    bad=Example('backend: "tensorrt"', files={"1/model.plan": "graph"}, gpu=True),
    good=Example(
        'backend: "tensorrt"', files={"1/model.plan": "plan of TensorRT 10.4.0"}, gpu=True
    ),
)
def not_a_plan(model: Model, target: Target) -> Iterator[Hit]:
    for path in _plans(model):
        header = read_header(path)
        if path.stat().st_size and header is None:
            yield Hit(f"{_inside(model, path)} is not a TensorRT plan", file=path)
        elif header is not None and header.product != "TensorRT":
            yield Hit(
                f"{_inside(model, path)} was built by {header}, which Triton does not load",
                file=path,
            )


@rule(
    "CD711",
    "plan-of-another-tensorrt",
    Severity.ERROR,
    "A plan loads in the TensorRT version that built it, and the target release carries another.",
    bad=Example('backend: "tensorrt"', files={"1/model.plan": "plan of TensorRT 8.5.1"}, gpu=True),
    good=Example(
        'backend: "tensorrt"', files={"1/model.plan": "plan of TensorRT 10.4.0"}, gpu=True
    ),
)
def plan_of_another_tensorrt(model: Model, target: Target) -> Iterator[Hit]:
    bounds = target.release.tensorrt_bounds()
    if bounds is None or not target.release_is_given:
        return
    least, most = bounds
    known = (
        _dotted(least)
        if least == most
        else f"at least {_dotted(least)} and at most {_dotted(most)}"
    )
    for path in _plans(model):
        header = read_header(path)
        if header is None or header.product != "TensorRT":
            continue  # CD710 says it
        moves_on = is_version_compatible(model) and header.version[:3] <= most
        if not moves_on and not least <= header.version[:3] <= most:
            yield Hit(
                f"{_inside(model, path)} was built by {header}; Triton {target.release.name} has TensorRT {known}",
                file=path,
            )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _graphs(model: Model) -> Iterator[tuple[Path, Graph]]:
    """The graphs of all served versions that can be read."""
    for path in model.graph_files():
        try:
            yield path, graphs.read(path)
        except (OSError, graphs.Unreadable, ModuleNotFoundError):
            continue


def _plans(model: Model) -> list[Path]:
    if model.backend != "tensorrt":
        return []
    paths = [model.model_file(folder) for folder in model.served.values()]
    return [path for path in paths if path.is_file()]


def _is_pointer(path: Path) -> bool:
    return head(path, len(_POINTER)) == _POINTER


def _is_outside(location: str) -> bool:
    path = posixpath.normpath(location or "..")
    return path.startswith(("/", "../")) or path == ".."


def _inside(model: Model, path: Path) -> str:
    return str(path.relative_to(model.folder)) if path.is_relative_to(model.folder) else path.name
