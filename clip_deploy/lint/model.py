"""One model of a repository as Triton sees it: its config, completed the way Triton does it, its files, its graph."""

from __future__ import annotations

import functools
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format

from clip_deploy.contract import PREFIX
from clip_deploy.lint import graph as graphs
from clip_deploy.lint.disk import MAX_TEXT_BYTES, exists, folders, head, inside, names_in
from clip_deploy.lint.findings import Hit
from clip_deploy.lint.text import Block, Document, Field, Place, read
from clip_deploy.triton_schema import ModelConfig, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from clip_deploy.lint.graph import Graph

CONFIG = "config.pbtxt"
# Folders of a model that are no versions.
_NO_VERSIONS = {"warmup", "initial_state", "configs"}
# Strings longer than this (a tokenizer, say) are not shown to the schema's parser, which is slow on them.
_STRING = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|["'][^\n]*""")
_LONG = 4096
_NO_CHARACTER = re.compile(r"\\(?:[4-7][0-7]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2})")
_MINUS = re.compile(r"-[ \t]+(?=\d)")

# Bytes of one element; texts have no fixed size.
DTYPE_BYTES = {
    **dict.fromkeys(("TYPE_BOOL", "TYPE_UINT8", "TYPE_INT8"), 1),
    **dict.fromkeys(("TYPE_UINT16", "TYPE_INT16", "TYPE_FP16", "TYPE_BF16"), 2),
    **dict.fromkeys(("TYPE_UINT32", "TYPE_INT32", "TYPE_FP32"), 4),
    **dict.fromkeys(("TYPE_UINT64", "TYPE_INT64", "TYPE_FP64"), 8),
}

# Backend → (platform, file in a version's folder).
BACKEND_FILES = {
    "tensorrt": ("tensorrt_plan", "model.plan"),
    "onnxruntime": ("onnxruntime_onnx", "model.onnx"),
    "openvino": ("", "model.xml"),
    "pytorch": ("pytorch_libtorch", "model.pt"),
    "python": ("", "model.py"),
}
_TENSORFLOW = dict.fromkeys(("model.savedmodel", "model.graphdef"), "tensorflow")
_PLATFORMS = {platform: backend for backend, (platform, _) in BACKEND_FILES.items() if platform}


class Repository:
    """A model repository: its models by name, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models = {folder.name: Model(folder, self) for folder in folders(path)}
        self.known = self.models  # with those of other repositories that one server is given


class Model:
    """One model's folder.

    ``config`` is the message, empty where there is no config or where it does not parse; ``is_parsed`` tells the two
    apart. Properties are computed once.
    """

    def __init__(self, folder: Path, repository: Repository) -> None:
        self.folder = folder
        self.name = folder.name
        self.repository = repository

    def forget(self) -> None:
        """Drop what was read; it is read again where another model asks for it. Keeps large repositories small."""
        for name in vars(self).keys() - {"folder", "name", "repository"}:
            delattr(self, name)

    @property
    def config_path(self) -> Path:
        return self.folder / CONFIG

    @functools.cached_property
    def config_bytes(self) -> bytes | None:
        """The file's content; None where there is none, where it cannot be read, and where it is far too large."""
        data = head(self.config_path, MAX_TEXT_BYTES + 1)
        return None if data is None or len(data) > MAX_TEXT_BYTES else data

    @functools.cached_property
    def has_config(self) -> bool:
        return exists(self.config_path)

    @functools.cached_property
    def document(self) -> Document:
        """The text with places; bytes that are not UTF-8 become replacement characters."""
        return read((self.config_bytes or b"").decode("utf-8", "replace"))

    @functools.cached_property
    def parsed(self) -> tuple[Any, text_format.ParseError | None]:
        """The message and what the schema's own parser complains about first."""
        text = _STRING.sub(_shortened, self.document.text)
        try:
            return _parse(text), None
        except text_format.ParseError as error:
            return ModelConfig(), error
        except RecursionError:
            return ModelConfig(), text_format.ParseError("nested too deeply", 1, 1)

    @property
    def config(self) -> Any:
        return self.parsed[0]

    @property
    def is_parsed(self) -> bool:
        """Whether there is a config that Triton can read; without one it completes everything itself."""
        return self.parsed[1] is None

    @functools.cached_property
    def folders(self) -> dict[int, Path]:
        """Version folders as Triton finds them, which may not be the folders that are there.

        A number at the beginning of a name counts, unless it begins with a zero, and what is loaded is the folder of
        just that number.
        """
        found = {}
        for folder in folders(self.folder):
            name = folder.name
            number = re.match(r"\s*[-+]?[0-9]+", name)
            if name in _NO_VERSIONS or number is None or (len(name) > 1 and name.startswith("0")):
                continue
            version = int(number.group()) % 2**64  # it is not signed
            found[version] = self.folder / str(version)
        return dict(sorted(found.items()))

    @functools.cached_property
    def served(self) -> dict[int, Path]:
        """The versions that the policy lets Triton load, the newest last."""
        policy = self.config.version_policy
        if policy.HasField("specific"):
            wanted = sorted(set(policy.specific.versions))
            return {v: self.folders[v] for v in wanted if v in self.folders}
        if policy.HasField("all"):
            return self.folders
        count = policy.latest.num_versions if policy.HasField("latest") else 1
        newest = sorted(self.folders, reverse=True)[:count]
        return {v: self.folders[v] for v in sorted(newest)}

    @functools.cached_property
    def backend(self) -> str:
        """The backend that Triton will use; empty where it cannot tell."""
        config = self.config
        if config.backend or config.platform == "ensemble":
            return str(config.backend)
        if config.platform:
            return _PLATFORMS.get(
                config.platform, "pytorch" if config.platform == "libtorch" else ""
            )
        names = {file: backend for backend, (_, file) in BACKEND_FILES.items()} | _TENSORFLOW
        if config.default_model_filename:
            return names.get(config.default_model_filename, "")
        first = next(iter(sorted(folders(self.folder))), None)
        present = names_in(first) if first else []
        found = next((backend for file, backend in names.items() if file in present), "")
        return found or self.name.partition(".")[2]  # model.<backend>: a custom backend

    @property
    def is_ours(self) -> bool:
        """Whether clip-deploy rendered it: a contract is in its parameters."""
        return f"{PREFIX}contract" in self.config.parameters

    @functools.cached_property
    def completes_itself(self) -> bool:
        """Whether the backend may add to what a config says: plans do, Python models that want to, unknown backends."""
        if self.backend != "python":
            return self.backend not in ("onnxruntime", "pytorch", "openvino")
        files = [self.model_file(folder) for folder in self.served.values()]
        return any(b"def auto_complete_config" in (head(file) or b"") for file in files)

    @property
    def is_ensemble(self) -> bool:
        return bool(
            self.config.platform == "ensemble" or self.config.HasField("ensemble_scheduling")
        )

    @property
    def file_name(self) -> str:
        """The name of the file that the backend opens; empty for backends with rules of their own."""
        return (
            str(self.config.default_model_filename) or BACKEND_FILES.get(self.backend, ("", ""))[1]
        )

    def model_file(self, version: Path) -> Path:
        """The file that the backend opens in a version's folder; for a folder of that name, the graph inside."""
        path = inside(version, self.file_name)
        return path / "model.onnx" if self.backend == "onnxruntime" and path.is_dir() else path

    @functools.cached_property
    def graph_failure(self) -> str | None:
        """Why the newest served graph cannot be read; None when it can, or when there is none to read."""
        return self._graph[1]

    @property
    def graph(self) -> Graph | None:
        """The graph of the newest served version, for the backends that open ONNX."""
        return self._graph[0]

    @functools.cached_property
    def _graph(self) -> tuple[Graph | None, str | None]:
        graph_files = [path for path in self.graph_files() if path.is_file()]
        if not graph_files:
            return None, None
        try:
            return graphs.read(graph_files[0]), None
        except graphs.Unreadable as error:
            return None, str(error)
        except ModuleNotFoundError:
            return None, None  # said once, by the report

    def graph_files(self) -> list[Path]:
        """The ONNX files of the served versions, newest first; our own Python models have one, too."""
        folders = list(reversed(self.served.values()))
        if self.backend == "onnxruntime":
            return [self.model_file(folder) for folder in folders]
        return [folder / "model.onnx" for folder in folders] if self.is_ours else []

    @functools.cached_property
    def max_batch(self) -> int:
        """``max_batch_size`` after Triton completed the config: 4 where it is left out and the graph can batch."""
        given = int(self.config.max_batch_size)
        if given or self.graph is None or (self.config.input and self.config.output):
            return given
        tensors = [*self.graph.inputs.values(), *self.graph.outputs.values()]
        can_batch = all(tensor.shape and tensor.shape[0] == -1 for tensor in tensors)
        return 4 if can_batch else 0

    def parameter(self, key: str) -> str:
        """The text of a parameter; empty where it is not given."""
        given = self.config.parameters
        return str(given[key].string_value) if key in given else ""

    @functools.cached_property
    def written_parameters(self) -> dict[str, int]:
        """Key → which of the ``parameters`` in the text it is."""
        blocks = [b for field in self.document.root.all("parameters") for b in field.blocks()]
        keys = [(index, block.first("key")) for index, block in enumerate(blocks)]
        return {
            key.scalars()[0].string: index
            for index, key in keys
            if key is not None and key.scalars()
        }

    def parameter_place(self, key: str) -> Place | None:
        """Where a parameter was written; where the first one was, if this one was not."""
        return self.place("parameters", self.written_parameters.get(key, 0))

    def fields(self, *path: str | int) -> list[Field]:
        """Where a field was written, as ``("input", 0, "dims")``; numbers count the messages of a repeated field."""
        return self._found(path)[0]

    def _found(self, path: tuple[str | int, ...]) -> tuple[list[Field], list[Block]]:
        """(fields, their messages) of a path; each step is taken once, since large configs ask for thousands."""
        if path not in self._steps:
            *before, step = path
            found, blocks = self._found(tuple(before))
            if isinstance(step, int):
                blocks = blocks[step : step + 1]
            else:
                found = [field for block in blocks for field in block.all(step)]
                blocks = [block for field in found for block in field.blocks()]
            self._steps[path] = found, blocks
        return self._steps[path]

    @functools.cached_property
    def _steps(self) -> dict[tuple[str | int, ...], tuple[list[Field], list[Block]]]:
        return {(): ([], [self.document.root])}

    def place(self, *path: str | int) -> Place | None:
        """The place of a field or message; of the nearest one around it where it was not written."""
        for length in range(len(path), 0, -1):
            step = path[length - 1]
            if isinstance(step, str):
                if found := self._found(path[:length])[0]:
                    return found[0].place
            elif blocks := self._found(path[:length])[1]:
                return blocks[0].place
        return None

    def hit(self, message: str, *path: str | int, right: str | None = None) -> Hit:
        """A complaint about a field; ``right`` is how it should read, and "" takes it away."""
        written = self.fields(*path)
        place = written[0].place if written else self.place(*path)
        if right is None or place is None:
            return Hit(message, place, remedy=f"write {right}" if right else None)
        if len(written) == 1 and written[0].end.line == place.line:
            return Hit(message, place, fix=self.document.corrected(written[0], right))
        return Hit(message, place, remedy=f"write {right}" if right else "take it out")


def row_bytes(data_type: int, dims: Sequence[int]) -> int:
    """Bytes of a tensor of that type, 0 for texts. No tensor has 64 axes; a product over thousands takes minutes."""
    return DTYPE_BYTES.get(dtype_name(data_type), 0) * min(math.prod(dims[:64]), 2**63)


def _shortened(match: re.Match[str]) -> str:
    """A long string as an empty one."""
    text = match.group()
    is_whole = text[0] != "#" and text[-1] == text[0]
    return text[0] * 2 if is_whole and len(text) >= _LONG else text


def _parse(text: str) -> Any:
    """The message. Triton takes a space after a minus, and escapes of no character; Python's parser does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parser's own, about escapes
        try:
            return text_format.Parse(text, ModelConfig())
        except text_format.ParseError:
            eased = _NO_CHARACTER.sub("?", _MINUS.sub("-", text))
            if eased == text:
                raise
            return text_format.Parse(eased, ModelConfig())
