"""A torch encoder → an ONNX file that every Triton release of the last three years reads."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

from clip_deploy.artifacts import GraphFile
from clip_deploy.errors import ExportError, extra
from clip_deploy.files import digest

with extra("export"):
    import onnx
    import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.export.towers import Encoder
    from clip_deploy.spec import TensorSpec

# LayerNormalization is one op from 17 on, and opset 23's fused Attention is miscomputed by some TensorRT releases.
# 18 is the lowest that torch's exporter writes. IR 8 belongs to opset 18 and is read by ONNX Runtime from 1.13 on,
# which every Triton release since 22.12 carries; newer IR versions are refused by older releases.
OPSET = 18
IR_VERSION = 8

FILE = "model.onnx"
DATA = "model.onnx.data"
# protobuf refuses messages of 2 GiB; the graph's own nodes need a little of that.
_ONE_FILE_LIMIT = 2**31 - 2**24


def trace(
    encoder: Encoder, example: Any, output: str, input_spec: TensorSpec, folder: Path
) -> None:
    """Write the encoder's graph and, apart from it, its weights: ``FILE`` and ``DATA`` in ``folder``.

    The weights are written outside first in any case, because that streams them; ``finish`` puts them into one file
    when torch's copy is gone, so that memory never holds three copies.

    Args:
        example: inputs, numpy ``[2 or more, …]``. A batch of one would be frozen into the graph.

    Raises:
        ExportError: torch cannot trace the model.
    """
    batch = torch.export.Dim("batch", min=1, max=65535)
    try:
        with _silent(), _no_fast_path():
            program = torch.onnx.export(
                encoder,
                (torch.from_numpy(example),),
                input_names=[input_spec.name],
                output_names=[output],
                opset_version=OPSET,
                dynamo=True,
                dynamic_shapes=({0: batch},),
                verbose=False,
            )
            assert program is not None
            program.save(folder / FILE, external_data=True)
            for value in program.model.graph.initializers.values():
                value.const_value = (
                    None  # caches of the exporter would keep its copies of the weights alive
                )
    except Exception as error:  # torch.export raises its own zoo of errors
        if isinstance(error, OSError):
            raise
        raise ExportError(
            f"torch cannot trace this model: {(str(error).strip().splitlines() or [type(error).__name__])[0][:200]}",
            remedy="report the model's name and your versions of torch and open_clip (clip-deploy doctor)",
        ) from error


def finish(folder: Path) -> GraphFile:
    """Make the traced graph fit for old servers and for strangers: IR version, no traces of this machine, one file.

    Raises:
        ExportError: the graph is not valid ONNX.
    """
    model = onnx.load(folder / FILE, load_external_data=False)
    model.ir_version = IR_VERSION
    model.producer_version = torch.__version__
    del model.metadata_props[:]
    _forget_origins(model.graph)
    (folder / FILE).write_bytes(model.SerializeToString())
    try:
        onnx.checker.check_model(str(folder / FILE))
    except onnx.checker.ValidationError as error:
        raise ExportError(
            f"the graph is not valid ONNX: {error}", remedy="report the model's name"
        ) from error
    weights = folder / DATA
    if weights.exists() and weights.stat().st_size < _ONE_FILE_LIMIT:
        _inline(model, weights, folder / FILE)
        weights.unlink()
    files = [path for path in (folder / FILE, weights) if path.exists()]
    size = sum(path.stat().st_size for path in files)
    return GraphFile(
        FILE, OPSET, IR_VERSION, digest(files), size, DATA if weights.exists() else None
    )


def _inline(model: onnx.ModelProto, weights: Path, target: Path) -> None:
    """Write the model with its weights inside, one tensor at a time.

    protobuf's own serializer needs three copies of the weights in memory. The wire format nests by length alone, so the
    same bytes can be streamed: the model without its graph, then the graph's tag and length, its nodes, each tensor.
    """
    tensors = list(model.graph.initializer)
    del model.graph.initializer[:]
    nodes = model.graph.SerializeToString()
    model.ClearField("graph")
    heads = [_tensor_head(tensor) for tensor in tensors]
    sizes = [len(head) + length for head, _, length in heads]
    graph_size = len(nodes) + sum(1 + len(_varint(size)) + size for size in sizes)
    with weights.open("rb") as source, target.open("wb") as sink:
        sink.write(model.SerializeToString())
        sink.write(_tag(_MODEL_GRAPH) + _varint(graph_size) + nodes)
        for (head, offset, length), size in zip(heads, sizes):
            sink.write(_tag(_GRAPH_INITIALIZER) + _varint(size) + head)
            source.seek(offset)
            sink.write(source.read(length))


def _tensor_head(tensor: onnx.TensorProto) -> tuple[bytes, int, int]:
    """A tensor's bytes up to its raw data, and where in the weight file those are: (head, offset, length).

    A tensor that the exporter kept inside is its own head, with nothing to follow.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor.SerializeToString(), 0, 0
    place = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(place.get("offset", 0)), int(place["length"])
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    return tensor.SerializeToString() + _tag(_TENSOR_RAW_DATA) + _varint(length), offset, length


# Field numbers of onnx.proto, read off the schema itself.
_MODEL_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_GRAPH_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_TENSOR_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number


def _tag(field: int) -> bytes:
    """The key of a length-delimited protobuf field."""
    return _varint(field << 3 | 2)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _forget_origins(graph: onnx.GraphProto) -> None:
    """Remove stack traces with paths of this machine, which the exporter writes into every node."""
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    del graph.metadata_props[:]
    del graph.value_info[:]


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Torch's fused attention kernel has no ONNX form."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The exporter warns about its own internals and prints progress of its own."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
