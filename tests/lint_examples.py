"""The linter's examples as repositories on disk: a small, correct model, and what a rule's example changes in it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.engines import BACKENDS
from clip_deploy.lint.text import read
from clip_deploy.repository import assemble
from clip_deploy.spec import ServingSpec, Tower

from . import factories

if TYPE_CHECKING:
    from pathlib import Path

    from clip_deploy.lint import Example

CONFIG = """name: "clip_image"
backend: "onnxruntime"
max_batch_size: 8
input { name: "pixel_values" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "image_embeds" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = """class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 605247132\n"
)


def build(example: Example, repository: Path) -> Path:
    """Write the example's repository and return it."""
    folder = repository / "clip_image"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(merged(CONFIG, example.config), "utf-8")
    if "1/model.onnx" not in example.files:
        _write(folder / "1" / "model.onnx", "graph")
    for path, content in example.files.items():
        _write(folder / path, content)
    for name, content in example.models.items():
        _model(repository, name, content)
    return repository


def merged(config: str, changes: str) -> str:
    """A config in which fields of the changes take the place of those of the same name."""
    names = {field.name for field in read(changes).root.fields}
    kept = [line for line in config.splitlines() if line.partition(" ")[0].strip(":") not in names]
    return "\n".join([*kept, changes, ""])


def _write(path: Path, content: str) -> None:
    """Write what a word stands for; a text that is none of the words stands for itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == "missing":
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    elif content == "link to nowhere":
        path.symlink_to("nowhere")
    elif content == "folder":
        path.unlink(missing_ok=True)
        path.mkdir()
    elif content == "cut off":
        data = path.read_bytes() if path.exists() else GRAPHS["graph"].model().SerializeToString()
        path.write_bytes(data[: len(data) // 2])
    elif content == "utf-8-bom":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    elif content in GRAPHS:
        _write_graph(path, content)
    elif content.startswith("plan of TensorRT "):
        version = bytes(int(part) for part in content.rpartition(" ")[2].split("."))
        path.write_bytes(b"ftrt" + bytes(20) + version + bytes(64))
    elif content.endswith(" bytes"):
        path.write_bytes(bytes(int(content.split()[0])))
    else:
        path.write_text({"python": PYTHON, "lfs pointer": POINTER}.get(content, content), "utf-8")


def _write_graph(path: Path, kind: str) -> None:
    """Write a graph; weights of more than a few bytes go to files beside it where its name says so."""
    model = GRAPHS[kind].model()
    for number, tensor in enumerate(model.graph.initializer):
        if "external" not in kind:
            break
        name = f"w{number}" if "many" in kind else f"{path.name}.data"
        data, offset = tensor.raw_data, 0
        if "outside" in kind:
            name = f"../{name}"
        file = path.parent / name
        if file.exists() and number:
            offset = file.stat().st_size
        file.write_bytes((file.read_bytes() if offset else b"") + data)
        tensor.ClearField("raw_data")
        tensor.data_location = 1
        for key, value in (("location", name), ("offset", offset), ("length", len(data))):
            tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())


@dataclass(frozen=True)
class GraphText:
    """pixel_values [batch, 3, 8, 8], flattened and times a matrix of 192 x 4, is ``product``; ``rest`` is what follows.

    ``hidden`` numbers are computed in a way that shape inference does not follow, as they are in traced graphs.
    """

    rest: str = "image_embeds = Identity(product)"
    inputs: str = "float[batch, 3, 8, 8] pixel_values"
    product: str = "product = MatMul(flat, w)"
    ir_version: int = 8
    pieces: int = 1
    half: bool = False

    def model(self) -> Any:
        from onnx import numpy_helper, parser

        weights = np.random.default_rng(0).standard_normal((192, 4)).astype(np.float32)
        names = [f"w{i}" for i in range(self.pieces)]
        text = f"""<ir_version: {self.ir_version}, opset_import: ["": 17]>
        clip ({self.inputs}) => (float[{"1" if "[1," in self.inputs else "batch"}, 4] image_embeds) {{
            flat = Flatten<axis = 1>(pixel_values)
            w = Concat<axis = 0>({", ".join(names)})
            {self.product}
            {self.rest}
        }}"""
        model = parser.parse_model(text)
        weights = weights.astype(np.float16 if self.half else np.float32)
        for name, part in zip(names, np.split(weights / 192**0.5, self.pieces)):
            model.graph.initializer.append(numpy_helper.from_array(part, name))
        return model


def _hidden(name: str, numbers: str) -> str:
    return f"{name}_f = Constant<value_floats = {numbers}>() {name}_g = Floor({name}_f) {name} = Cast<to = 7>({name}_g)"


GRAPHS = {
    "graph": GraphText(),
    "graph with two inputs": GraphText(
        rest="image_embeds = Mul(product, mask)",
        inputs="float[batch, 3, 8, 8] pixel_values, float[batch, 4] mask",
    ),
    "graph in FP16": GraphText(
        "image_embeds = Cast<to = 1>(halves)",
        product="h = Cast<to = 10>(flat) halves = MatMul(h, w)",
        half=True,
    ),
    "graph of batch 1": GraphText(inputs="float[1, 3, 8, 8] pixel_values"),
    "graph of IR 99": GraphText(ir_version=99),
    "graph with external data": GraphText(),
    "graph with external data outside": GraphText(),
    "graph with many external files": GraphText(pieces=24),
    "graph with a frozen batch": GraphText(
        f"{_hidden('a', '[1.0, 2.0, 2.0]')} square = Reshape(product, a) "
        f"{_hidden('b', '[-1.0, 4.0]')} image_embeds = Reshape(square, b)"
    ),
    "graph that loses the batch axis": GraphText(
        f"{_hidden('axes', '[0.0]')} image_embeds = ReduceSum<keepdims = 1>(product, axes)"
    ),
    "graph whose rows mix": GraphText("image_embeds = Softmax<axis = 0>(product)"),
    "graph that declares another shape": GraphText(
        f"{_hidden('shape', '[0.0, 2.0, 2.0]')} image_embeds = Reshape(product, shape)"
    ),
    "graph that refuses small numbers": GraphText(
        "high = Abs(product) far = Constant<value_float = 1000.0>() higher = Add(high, far) "
        "index = Cast<to = 7>(higher) image_embeds = GatherElements<axis = 0>(product, index)"
    ),
}


def _model(repository: Path, name: str, content: str) -> None:
    """Write another model: a config of its own, or a tower as render-config writes it."""
    if "tower" not in content:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(content, "utf-8")
        return
    tower = Tower.IMAGE if "image tower" in content else Tower.TEXT
    changes: dict[str, Any] = {"weights_sha256": "c" * 64} if "other weights" in content else {}
    folder = repository.parent / f"export of {name}"
    model = factories.exported(folder, tower, graph=tower_graph(tower), **changes)
    assemble(BACKENDS["onnxruntime"].build(model), ServingSpec(max_batch=32), repository)
    config = repository / name / "config.pbtxt"
    text = config.read_text("utf-8")
    for words, old, new in _EDITS:
        if words in content:
            assert old in text, f"{name}: {old} is not in its config"
            text = text.replace(old, new)
    config.write_text(text, "utf-8")


def tower_graph(tower: Tower) -> bytes:
    """A graph with the tensors of ``factories.exported``'s towers, and next to nothing in it."""
    from onnx import numpy_helper, parser

    image = tower is Tower.IMAGE
    given = "float[batch, 3, 224, 224]" if image else "int32[batch, 8]"
    means = (
        f"GlobalAveragePool({tower.input_name})" if image else f"Cast<to = 1>({tower.input_name})"
    )
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        clip ({given} {tower.input_name}) => (float[batch, 512] {tower.output_name}) {{
            means = {means} rows = Flatten<axis = 1>(means) {tower.output_name} = MatMul(rows, w)
        }}""")
    weights = np.ones((3 if image else 8, 512), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return bytes(model.SerializeToString())


# Words in an example → what they change in a rendered config.
_EDITS = (
    ("another mean", "0.48145466", "0.5"),
    ("max batch 64", "max_batch_size: 32", "max_batch_size: 64"),
    ("claims fp16", '"fp32"', '"fp16"'),
)
