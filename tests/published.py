"""Example repositories that Triton's users meet first, re-created: the same models and options, in our words.

After the quick start of triton-inference-server/server, the tutorials' conceptual guide, and the python_backend's
examples. Triton serves all of them, so the linter must have no error for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_EXECUTE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
_COMPLETES = _EXECUTE.replace(
    "class TritonPythonModel:\n",
    """class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name in ("INPUT0", "INPUT1"):
            config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(0)
        return config

""",
)


@dataclass(frozen=True)
class PublishedModel:
    """``graph``: ONNX in text form; without one it is a Python model, or an ensemble."""

    config: str | None
    graph: str = ""
    code: str = _EXECUTE
    files: tuple[str, ...] = ()


def _adding(kind: str, shape: str) -> str:
    return f"""<ir_version: 8, opset_import: ["": 13]>
    simple ({kind}[{shape}] INPUT0, {kind}[{shape}] INPUT1) => ({kind}[{shape}] OUTPUT0, {kind}[{shape}] OUTPUT1) {{
        OUTPUT0 = Add(INPUT0, INPUT1) OUTPUT1 = Sub(INPUT0, INPUT1)
    }}"""


_SIMPLE = """input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
"""
_PAIR = _SIMPLE.replace("INT32", "FP32").replace("16", "4")


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{k}" value: "{v}" }}' for k, v in inputs.items()]
    maps += [f'output_map {{ key: "{k}" value: "{v}" }}' for k, v in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


_TEXT_STEPS = ",\n".join(
    [
        _step("detection_preprocessing", {"detection_preprocessing_input": "input_image"},
              {"detection_preprocessing_output": "preprocessed_image"}),
        _step("text_detection", {"input_images:0": "preprocessed_image"},
              {"feature_fusion/Conv_7/Sigmoid:0": "score", "feature_fusion/concat_3:0": "geometry"}),
        _step("detection_postprocessing",
              {"detection_postprocessing_input_1": "score", "detection_postprocessing_input_2": "geometry",
               "detection_postprocessing_input_3": "preprocessed_image"},
              {"detection_postprocessing_output": "cropped_images"}),
        _step("text_recognition", {"input.1": "cropped_images"}, {"308": "recognition_output"}),
        _step("recognition_postprocessing", {"recognition_postprocessing_input": "recognition_output"},
              {"recognition_postprocessing_output": "recognized_text"}),
    ]
)  # fmt: skip

PUBLISHED: dict[str, dict[str, PublishedModel]] = {
    "the quick start": {
        # A graph of batch 1, served without Triton's batch axis by way of reshapes.
        "densenet_onnx": PublishedModel(
            """name: "densenet_onnx"
platform: "onnxruntime_onnx"
max_batch_size : 0
input [
  {
    name: "data_0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 224, 224 ]
    reshape { shape: [ 1, 3, 224, 224 ] }
  }
]
output [
  {
    name: "fc6_1"
    data_type: TYPE_FP32
    dims: [ 1000 ]
    reshape { shape: [ 1, 1000, 1, 1 ] }
    label_filename: "densenet_labels.txt"
  }
]
""",
            """<ir_version: 3, opset_import: ["": 8]>
            densenet (float[1, 3, 224, 224] data_0, float[1000, 3, 1, 1] w) => (float[1, 1000, 1, 1] fc6_1) {
                pooled = GlobalAveragePool(data_0) fc6_1 = Conv(pooled, w)
            }""",
            files=("densenet_labels.txt",),
        ),
        "simple": PublishedModel(
            f'name: "simple"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n{_SIMPLE}',
            _adding("int32", "N, 16"),
        ),
        "simple_without_a_config": PublishedModel(None, _adding("int32", "N, 16")),
        "simple_sequence": PublishedModel(
            """name: "simple_sequence"
backend: "onnxruntime"
max_batch_size: 8
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] }
  ]
}
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
""",
            """<ir_version: 8, opset_import: ["": 13]>
            sequence (int32[N, 1] INPUT, int32[N, 1] START, int32[N, 1] READY) => (int32[N, 1] OUTPUT) {
                started = Add(INPUT, START) OUTPUT = Mul(started, READY)
            }""",
        ),
    },
    "the conceptual guide": {
        "detection_preprocessing": PublishedModel(
            """name: "detection_preprocessing"
backend: "python"
max_batch_size: 256
input [ { name: "detection_preprocessing_input" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "detection_preprocessing_output" data_type: TYPE_FP32 dims: [ -1, -1, 3 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""
        ),
        "text_detection": PublishedModel(
            """name: "text_detection"
backend: "onnxruntime"
max_batch_size : 256
input [ { name: "input_images:0" data_type: TYPE_FP32 dims: [ -1, -1, 3 ] } ]
output [ { name: "feature_fusion/Conv_7/Sigmoid:0" data_type: TYPE_FP32 dims: [ -1, -1, 1 ] } ]
output [ { name: "feature_fusion/concat_3:0" data_type: TYPE_FP32 dims: [ -1, -1, 5 ] } ]
dynamic_batching { }
""",
            "text_detection",
        ),
        "detection_postprocessing": PublishedModel(
            """name: "detection_postprocessing"
backend: "python"
max_batch_size: 256
input [
  { name: "detection_postprocessing_input_1" data_type: TYPE_FP32 dims: [ -1, -1, 1 ] },
  { name: "detection_postprocessing_input_2" data_type: TYPE_FP32 dims: [ -1, -1, 5 ] },
  { name: "detection_postprocessing_input_3" data_type: TYPE_FP32 dims: [ -1, -1, 3 ] }
]
output [ { name: "detection_postprocessing_output" data_type: TYPE_FP32 dims: [ 1, 32, 100 ] } ]
"""
        ),
        "text_recognition": PublishedModel(
            """name: "text_recognition"
backend: "onnxruntime"
max_batch_size : 256
input [ { name: "input.1" data_type: TYPE_FP32 dims: [ 1, 32, 100 ] } ]
output [ { name: "308" data_type: TYPE_FP32 dims: [ 26, 37 ] } ]
dynamic_batching { }
""",
            "text_recognition",
        ),
        "recognition_postprocessing": PublishedModel(
            """name: "recognition_postprocessing"
backend: "python"
max_batch_size: 256
input [ { name: "recognition_postprocessing_input" data_type: TYPE_FP32 dims: [ 26, 37 ] } ]
output [ { name: "recognition_postprocessing_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
        ),
        "ensemble_model": PublishedModel(
            f"""name: "ensemble_model"
platform: "ensemble"
max_batch_size: 256
input [ {{ name: "input_image" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
output [ {{ name: "recognized_text" data_type: TYPE_STRING dims: [ -1 ] }} ]
ensemble_scheduling {{
  step [
{_TEXT_STEPS}
  ]
}}
""",
            code="",
        ),
    },
    "the Python backend": {
        "add_sub": PublishedModel(
            f"""name: "add_sub"
backend: "python"

# Everything else is as in the quick start.
{_PAIR}
instance_group [{{ kind: KIND_CPU }}]
"""
        ),
        "bls_sync": PublishedModel(
            """name: "bls_sync"
backend: "python"
input [ { name: "MODEL_NAME" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
            + _PAIR.replace("input [", "input [", 1)
        ),
        "square_int32": PublishedModel(
            """name: "square_int32"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [{ kind: KIND_CPU }]
"""
        ),
        "nobatch_auto_complete": PublishedModel(
            'name: "nobatch_auto_complete"\nbackend: "python"\n', code=_COMPLETES
        ),
        "preprocessing": PublishedModel(
            """name: "preprocessing"
backend: "python"
max_batch_size: 256
input [ { name: "INPUT_0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT_0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
instance_group [{ kind: KIND_CPU }]
parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "yes" } }
"""
        ),
    },
}

# Graphs of the text reader, whose tensors have names that onnx's text form cannot spell.
_RENAMED = {
    "text_detection": (
        """<ir_version: 7, opset_import: ["": 12]>
        detection (float[N, H, W, 3] x) => (float[N, H, W, 1] score, float[N, H, W, 5] geometry) {
            score = ReduceMean<axes = [3]>(x)
            geometry = Concat<axis = 3>(score, score, score, score, score)
        }""",
        {
            "x": "input_images:0",
            "score": "feature_fusion/Conv_7/Sigmoid:0",
            "geometry": "feature_fusion/concat_3:0",
        },
    ),
    "text_recognition": (
        """<ir_version: 7, opset_import: ["": 12]>
        recognition (float[N, 1, 32, 100] x, float[3200, 962] w) => (float[N, 26, 37] y) {
            flat = Flatten<axis = 1>(x) product = MatMul(flat, w)
            shape = Constant<value_ints = [-1, 26, 37]>() y = Reshape(product, shape)
        }""",
        {"x": "input.1", "y": "308"},
    ),
}


def write(repository: Path, models: dict[str, PublishedModel]) -> Path:
    """Write a published repository and return it."""
    for name, model in models.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        if model.config is not None:
            (repository / name / "config.pbtxt").write_text(model.config, "utf-8")
        if model.graph:
            (version / "model.onnx").write_bytes(_graph(model.graph))
        elif model.code:
            (version / "model.py").write_text(model.code, "utf-8")
        for file in model.files:
            (repository / name / file).write_text("TENCH\nGOLDFISH\n", "utf-8")
    return repository


def _graph(text: str) -> bytes:
    import numpy as np
    from onnx import numpy_helper, parser

    text, names = _RENAMED.get(text, (text, {}))
    model = parser.parse_model(text)
    for given in [value for value in model.graph.input if value.name == "w"]:  # a weight
        shape = [axis.dim_value for axis in given.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), "w"))
        model.graph.input.remove(given)
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
    return bytes(model.SerializeToString())
