"""An ONNX file without its weights: tensors as ONNX Runtime will see them, versions, external data.

Weights are skipped in a memory map, so that a file of any size costs milliseconds. Shapes of outputs are inferred, as
ONNX Runtime infers them; what the file merely declares is believed only where inference says nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_deploy.lint.wire import LENGTH, Damaged, delimited, encoded, fields

# Field numbers of onnx.proto.
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_TENSOR_VALUES = {4, 5, 6, 7, 9, 10, 11}
# Constants up to this size decide shapes; larger ones are weights.
_KEPT_BYTES = 1024
# A graph's structure beyond this is not one that a linter should read.
_MAX_STRUCTURE_BYTES = 256 * 2**20
_MAX_FILE_BYTES_OF_A_POINTER = 1024
# The least share of FP16 weights in an FP16 graph.
_HALF_SHARE = 0.5
_MAX_AXES = 64
_MAX_DIGITS = 19

# onnx.TensorProto.DataType → Triton's, for what Triton can carry.
_TRITON_DTYPES = {
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
    16: "TYPE_BF16",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a graph. ``shape`` has -1 for every axis that is not fixed; None when nothing is known.

    ``declared`` is what the file says: ONNX Runtime's inference may see less than onnx's, so that either can be what
    a server compares with.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    declared: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExternalData:
    """Weights outside the file: where, from which byte, and how many (None: to the end)."""

    location: str
    offset: int
    length: int | None
    is_invalid: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """What a linter needs of an ONNX file.

    ``inputs`` are those a request must give; ``defaults`` those that an initializer stands in for; ``half_share`` the
    share of FP16 among the floating-point weights; ``is_foreign`` says that operators occur that onnx does not know, so
    that a server may know more of the shapes; ``weight_types`` how many weights each type has.
    """

    inputs: dict[str, Tensor]
    defaults: dict[str, Tensor]
    outputs: dict[str, Tensor]
    ir_version: int
    opsets: dict[str, int]
    external: tuple[ExternalData, ...] = ()
    half_share: float = 0.0
    parameters: int = 0
    is_foreign: bool = False
    weight_types: tuple[tuple[str, int], ...] = ()

    @property
    def is_half(self) -> bool:
        """Whether it is an FP16 graph; what stays in FP32 in one are norms and the like."""
        return self.half_share >= _HALF_SHARE


class Unreadable(Exception):
    """The file is no ONNX graph; the message says what it is instead."""


def read(path: Path) -> Graph:
    """Read an ONNX file. The same file, linked or copied into many places, is read once.

    Raises:
        Unreadable: it is empty, cut off, a Git LFS pointer, or not ONNX at all.
        ModuleNotFoundError: onnx is not installed.
    """
    status = path.stat()
    return _read(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, str(path))


@functools.lru_cache(maxsize=4096)
def _read(device: int, inode: int, size: int, changed: int, path: str) -> Graph:
    if size == 0:
        raise Unreadable("is empty")
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        # Without this each step reads ahead into the weights: on a cold disk, a hundred times the work.
        mapped.madvise(mmap.MADV_RANDOM)
        if size < _MAX_FILE_BYTES_OF_A_POINTER and mapped[:].startswith(b"version https://git-lfs"):
            raise Unreadable("is a Git LFS pointer, not the model: run git lfs pull")
        view = memoryview(mapped)
        try:
            structure = _structure(view)
        except Damaged as error:
            raise Unreadable(f"is not a complete ONNX file: {error}") from error
        finally:
            view.release()
    digest = hashlib.sha256(structure).digest()
    if digest not in _known:
        _known[digest] = _understood(structure)
    return _known[digest]


# What is known of structures. Models that differ in their weights alone, as versions of one do, share theirs.
_known: dict[bytes, Graph] = {}


def _understood(structure: bytes) -> Graph:
    import onnx

    try:
        model = onnx.load_from_string(structure)
    except Exception as error:  # protobuf's DecodeError, by whichever implementation
        raise Unreadable(f"is not an ONNX file: {error}") from error
    if not model.HasField("graph") or not model.graph.output:
        raise Unreadable("holds no graph with outputs")
    return _graph(model, onnx)


def _structure(view: memoryview) -> bytes:
    """The model without the values of large tensors."""
    out = bytearray()
    for number, kind, start, end in fields(view):
        if kind != LENGTH:
            out += encoded(number << 3 | kind) + (
                encoded(start) if kind == 0 else bytes(view[start:end])
            )
        elif number == _MODEL_GRAPH:
            with view[start:end] as graph:
                out += delimited(number, _graph_structure(graph))
        else:
            out += delimited(number, bytes(view[start:end]))
        if len(out) > _MAX_STRUCTURE_BYTES:
            raise Damaged(f"its structure alone is larger than {_MAX_STRUCTURE_BYTES // 2**20} MB")
    return bytes(out)


def _graph_structure(graph: memoryview) -> bytes:
    """A graph's bytes, copied in stretches between its large tensors."""
    out, copied = bytearray(), 0
    begin = 0
    for number, kind, start, end in fields(graph):
        if kind == LENGTH and number == _GRAPH_INITIALIZER and end - start > _KEPT_BYTES:
            out += graph[copied:begin]
            with graph[start:end] as tensor:
                out += delimited(number, _tensor_head(tensor))
            copied = end
        begin = end
        if len(out) > _MAX_STRUCTURE_BYTES:
            raise Damaged("its structure is too large")
    return bytes(out + graph[copied:])


def _tensor_head(tensor: memoryview) -> bytes:
    """A tensor's bytes, copied in stretches between its values."""
    out, copied, begin = bytearray(), 0, 0
    for number, _, _, end in fields(tensor):
        if number in _TENSOR_VALUES:
            out += tensor[copied:begin]
            copied = end
        begin = end
    return bytes(out + tensor[copied:])


def _graph(model: Any, onnx: Any) -> Graph:
    graph = model.graph
    weights = [_text(tensor.name) for tensor in graph.initializer]
    weights += [_text(sparse.values.name) for sparse in graph.sparse_initializer]
    given = {_text(value.name): _tensor(value) for value in graph.input}
    declared = {_text(value.name): _tensor(value) for value in graph.output}
    inferred = _inferred(model, onnx)
    outputs = {
        name: Tensor(name, tensor.dtype, _united(tensor.shape, inferred.get(name)), tensor.shape)
        for name, tensor in declared.items()
    }
    types: Counter[str] = Counter()
    for tensor in graph.initializer:
        dtype = _TRITON_DTYPES.get(tensor.data_type, "other").removeprefix("TYPE_")
        types[dtype] += _size(tensor.dims)
    floats = types["FP32"] + types["FP16"]
    return Graph(
        inputs={name: tensor for name, tensor in given.items() if name not in weights},
        defaults={name: tensor for name, tensor in given.items() if name in weights},
        outputs=outputs,
        ir_version=model.ir_version,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        external=tuple(
            _external(tensor) for tensor in graph.initializer if tensor.data_location == 1
        ),
        half_share=types["FP16"] / floats if floats else 0.0,
        is_foreign=any(node.domain not in ("", "ai.onnx") for node in graph.node),
        parameters=types["FP32"] + types["FP16"],
        weight_types=tuple(types.most_common()),
    )


def _inferred(model: Any, onnx: Any) -> dict[str, tuple[int, ...] | None]:
    """Shapes of outputs by inference alone: what the file declares is taken away first."""
    if model.functions:  # they may call one another, each twice
        return {}
    bare = type(model)()
    bare.CopyFrom(model)
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        done = onnx.shape_inference.infer_shapes(bare, data_prop=False)
    except (
        Exception
    ):  # an operator that onnx does not know: nothing is inferred, the declared shapes stand
        return {}
    return {_text(value.name): _shape(value) for value in done.graph.output}


def _united(
    declared: tuple[int, ...] | None, inferred: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """What ONNX Runtime makes of both: where they contradict each other, nothing is known."""
    if inferred is None or declared is None:
        return declared if inferred is None else inferred
    if len(inferred) != len(declared):
        return None
    return tuple(_united_axis(a, b) for a, b in zip(declared, inferred))


def _united_axis(declared: int, inferred: int) -> int:
    if declared == inferred or inferred == -1:
        return declared
    return inferred if declared == -1 else -1


def _size(dims: Any) -> int:
    """How many values a tensor has; a lie counts as nothing."""
    if len(dims) > _MAX_AXES or any(not 0 <= axis < 2**40 for axis in dims):
        return 0
    return int(min(math.prod(dims), 2**60))


def _tensor(value: Any) -> Tensor:
    dtype = _TRITON_DTYPES.get(value.type.tensor_type.elem_type, "")
    return Tensor(_text(value.name), dtype, _shape(value))


def _text(value: str | bytes) -> str:
    """A name; protobuf gives bytes where a file's are not UTF-8."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _shape(value: Any) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor.shape.dim)


def _external(tensor: Any) -> ExternalData:
    entries = {_text(entry.key): _text(entry.value) for entry in tensor.external_data}
    offset, length = entries.get("offset", "0"), entries.get("length", "")
    return ExternalData(
        location=entries.get("location", "").replace("\0", "�"),
        offset=_number(offset),
        length=_number(length) if length else None,
        is_invalid=not _is_number(offset) or bool(length and not _is_number(length)),
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _number(text: str) -> int:
    return int(text) if _is_number(text) else 0
