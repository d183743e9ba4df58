"""What a repository may hold by malice, accident or right: no traceback, no endless work, no false error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from clip_deploy.cli import main
from clip_deploy.lint import Example, Severity, lint, target

from .lint_examples import CONFIG, build, merged

onnx = pytest.importorskip("onnx")

CPU = target("cpu", "24.10")
GPU = target("gpu:9.0")
ENSEMBLE = """name: "clip_pipeline"
platform: "ensemble"
max_batch_size: 8
input { name: "raw" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step { model_name: "clip_image" model_version: -1
  input_map { key: "pixel_values" value: "raw" } output_map { key: "image_embeds" value: "embedding" } } }
"""


def _codes(report, severity: Severity = Severity.ERROR) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity is severity}


def _repository(tmp_path: Path, config: str = "", files: dict | None = None) -> Path:
    return build(Example(config, files=files or {}), tmp_path / "model_repository")


def _judged(tmp_path: Path, config: str = "", files: dict | None = None, where=CPU):
    report = lint([_repository(tmp_path, config, files)], where)
    json.dumps(report.to_json())
    return report


# --- no traceback, and no rule that fails ----------------------------------------------------------------------------

_STEP = "sequence_batching {{ {} }}"
HOSTILE = {
    "an input's type": "input { name: 'pixel_values' data_type: 99 dims: [ 3, 8, 8 ] }",
    "a warmup's type": "model_warmup { name: 'w' batch_size: 1 inputs { key: 'pixel_values' value "
    "{ data_type: 99 dims: [ 3, 8, 8 ] zero_data: true } } }",
    "a control's kind": _STEP.format(
        "control_input { name: 'S' control { kind: 99 fp32_false_true: [ 0, 1 ] } }"
    ),
    "a state's type": _STEP.format("state { input_name: 'a' output_name: 'b' data_type: 99 dims: [ 1 ] }"),
    "a batch input's type": "batch_input { kind: BATCH_ELEMENT_COUNT target_name: 'c' data_type: 99 source_input: 'pixel_values' }",
    "a kind of instances": "instance_group { kind: 99 gpus: [ 0 ] }",
    "a number of digits": f"max_batch_size: {'1' * 5000}",
    "an absolute file": 'default_model_filename: "/etc/hostname"',
    "a file with a null": 'default_model_filename: "a\\000b"',
    "an endless contract": 'parameters { key: "clip_deploy.contract" value { string_value: "1" } }\n'
    'parameters { key: "clip_deploy.fill_color" value { string_value: "inf" } }',
    "a warmup of many axes": "model_warmup { name: 'w' batch_size: 1 inputs { key: 'pixel_values' value "
    f"{{ data_type: TYPE_FP32 dims: [ {', '.join(['9223372036854775807'] * 300)} ] input_data_file: 'x' }} }} }}",
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_strange_values_are_judged(what: str, tmp_path: Path):
    report = _judged(tmp_path, HOSTILE[what], {"warmup/x": "768 bytes"})
    assert not [f for f in report.findings if "could not be judged" in f.message], report.findings


def _graph_with(**changes) -> bytes:
    """A graph whose names, weights or external data are strange."""
    from .lint_examples import GRAPHS

    model = GRAPHS["graph"].model()
    weight = model.graph.initializer[0]
    if "dims" in changes:
        weight.dims[:] = changes["dims"]
    if "external" in changes:
        weight.ClearField("raw_data")
        weight.data_location = 1
        for key, value in changes["external"].items():
            weight.external_data.add(key=key, value=value)
    data = model.SerializeToString()
    for old, new in changes.get("bytes", {}).items():
        data = data.replace(old, new)
    return data


GRAPHS = {
    "names that are no text": {"bytes": {b"pixel_values": b"pixel_\xff\xfelues"}},
    "weights of impossible sizes": {"dims": [-1] + [2**62] * 40},
    "an offset of many digits": {"external": {"location": "w.bin", "offset": "9" * 5000}},
    "a negative offset": {"external": {"location": "w.bin", "offset": "-5"}},
    "an offset in other digits": {"external": {"location": "w.bin", "offset": "٣"}},
    "a location that is no text": {
        "external": {"location": "w@@@bin"},
        "bytes": {b"w@@@bin": b"w\xff\xff\xffbin"},
    },
    "a location with a null": {"external": {"location": "w\0.bin"}},
    "no location": {"external": {"offset": "0"}},
}


@pytest.mark.parametrize("what", GRAPHS)
def test_strange_graphs_are_judged(what: str, tmp_path: Path):
    repository = _repository(tmp_path, files={"1/w.bin": "4000 bytes"})
    (repository / "clip_image" / "1" / "model.onnx").write_bytes(_graph_with(**GRAPHS[what]))
    (repository / "clip_pipeline" / "1").mkdir(parents=True)
    (repository / "clip_pipeline" / "config.pbtxt").write_text(ENSEMBLE)
    report = lint([repository], CPU)
    json.dumps(report.to_json())
    assert not [f for f in report.findings if "could not be judged" in f.message], report.findings
    if "offset" in what and what != "no location":
        assert "CD707" in _codes(report)


def test_a_rule_that_fails_is_a_finding_and_the_others_go_on(tmp_path: Path, monkeypatch):
    from dataclasses import replace

    from clip_deploy.lint import RULES

    def broken(model, target):
        raise TypeError("of a kind that nobody expected")

    monkeypatch.setitem(RULES, "CD404", replace(RULES["CD404"], check=broken))
    report = _judged(tmp_path, "dynamic_batching { preferred_batch_size: [ 99 ] }")
    assert {"CD208", "CD501"} <= _codes(report)
    assert any("CD404 could not be judged (TypeError" in f.message for f in report.findings)


@pytest.mark.parametrize("format_", ["text", "json", "sarif", "junit", "github"])
@pytest.mark.parametrize("to_file", [False, True])
def test_names_that_are_no_text_are_printed(format_: str, to_file: bool, tmp_path: Path, capsys):
    repository = tmp_path / "model_repository"
    (repository / "bad\udcff" / "1").mkdir(parents=True)
    (repository / "bad\udcff" / "config.pbtxt").write_text(CONFIG)
    output = ["--output", str(tmp_path / "out")] if to_file else []
    assert main(["lint", str(repository), "--format", format_, *output]) == 7
    text = (tmp_path / "out").read_text("utf-8") if to_file else capsys.readouterr().out
    text.encode("utf-8")
    assert "CD105" in text


@pytest.mark.parametrize("where", ["in the repository", "in the model"])
def test_a_link_that_cannot_be_followed_hides_nothing_else(where: str, tmp_path: Path):
    repository = _repository(tmp_path)
    folder = repository if where == "in the repository" else repository / "clip_image"
    (folder / "x").symlink_to("a" * 300)
    report = lint([repository], CPU)
    assert report.models == ("clip_image",)
    assert "CD102" not in _codes(report)


def test_a_name_that_no_path_can_have_is_two_lines(capsys):
    assert main(["lint", "x" * 300]) == 2
    assert "Traceback" not in capsys.readouterr().err


# --- work that ends --------------------------------------------------------------------------------------------------

LONG = {
    "an open string of escaped quotes": '"' + '\\"' * 20_000,
    "thousands of inputs": "input { } " * 2000,
    "thousands of groups": "instance_group { count: 2 } " * 3000,
    "thousands of steps": "ensemble_scheduling { step { model_name: 'm' } } " * 1000,
    "thousands of values": "a: 1 " * 20_000,
}


@pytest.mark.parametrize("what", LONG)
def test_long_configs_take_time_that_grows_with_their_length(what: str, tmp_path: Path):
    """Four times the text takes about four times the time; work that grows with its square would take sixteen."""
    text, seconds = LONG[what], []
    for part in (text[: len(text) // 4], text):
        (tmp_path / str(len(part))).mkdir()
        repository = _repository(
            tmp_path / str(len(part)), 'backend: "python"', {"1/model.py": "python"}
        )
        (repository / "clip_image" / "config.pbtxt").write_text('backend: "python"\n' + part)
        start = time.process_time()
        lint([repository], CPU)
        seconds.append(time.process_time() - start)
    assert seconds[1] < max(9 * seconds[0], 2.0), seconds


def test_long_code_takes_time_that_grows_with_its_length(tmp_path: Path):
    code = "class TritonPythonModel:\n    def execute(self, r): ...\n" + "x = 1\n" * 60_000
    start = time.process_time()
    _judged(tmp_path, 'backend: "python"', {"1/model.py": code})
    assert time.process_time() - start < 20  # a list as a queue took minutes


def test_a_small_graph_that_stands_for_a_huge_tensor_is_not_computed(tmp_path: Path):
    import resource

    graph = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    clip (float[batch, 3, 8, 8] pixel_values) => (float[batch, 4] image_embeds) {
        zero = Constant<value_int = 0>() end = Constant<value_int = 300000000>() one = Constant<value_int = 1>()
        r = Range(zero, end, one) s = Cast<to = 1>(r) image_embeds = Mul(s, s) }""")
    repository = _repository(tmp_path)
    (repository / "clip_image" / "1" / "model.onnx").write_bytes(graph.SerializeToString())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lint([repository], CPU)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


# --- no false error --------------------------------------------------------------------------------------------------

_DYNAMIC = """<ir_version: 8, opset_import: ["": 17]>
clip (float[batch, 3, 8, 8] pixel_values) => (float[batch, n] image_embeds) {
    i = Constant<value_int = 2>() z = Constant<value_ints = [0]>() m1 = Constant<value_ints = [-1]>()
    s = Shape(pixel_values) g = Gather(s, i) q = Unsqueeze(g, z) c = Concat<axis = 0>(m1, q)
    image_embeds = Reshape(pixel_values, c) }"""
_FOREIGN = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
clip (float[batch, 3, 8, 8] pixel_values) => (float[batch, n] image_embeds) {
    flat = Flatten<axis = 1>(pixel_values) image_embeds = com.microsoft.Gelu(flat) }"""


@pytest.mark.parametrize(
    ("graph", "dims"), [(_DYNAMIC, "[ -1 ]"), (_FOREIGN, "[ 192 ]"), (_FOREIGN, "[ -1 ]")]
)
def test_an_axis_that_servers_may_see_either_way_is_no_error(graph: str, dims: str, tmp_path: Path):
    """ONNX Runtime 1.19 was seen to report the first one as free, and the second one as 192."""
    output = f'output {{ name: "image_embeds" data_type: TYPE_FP32 dims: {dims} }}'
    repository = _repository(tmp_path, output)
    model = onnx.parser.parse_model(graph)
    (repository / "clip_image" / "1" / "model.onnx").write_bytes(model.SerializeToString())
    assert not _codes(lint([repository], CPU))


RIGHT = {
    "PyTorch with code of its own": ('backend: "pytorch" runtime: "model.py"', {"1/model.py": "python"}),
    "a backend that lies in the model's folder": ('backend: "mine" runtime: "libfoo.so"', {"libfoo.so": "9 bytes"}),
    "a saved model of TensorFlow": ('backend: ""', {"1/model.savedmodel/saved_model.pb": "9 bytes", "1/model.onnx": "missing"}),
    "a Python model that adds an input and batches": (
        'backend: "python"\nmax_batch_size: 0\ninput { name: "a" data_type: TYPE_FP32 dims: [ 1 ] }\n'
        "model_warmup { name: 'w' batch_size: 1 inputs { key: 'b' value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }",
        {"1/model.py": "class TritonPythonModel:\n    def auto_complete_config(c): ...\n    def execute(self, r): ...\n"},
    ),
    "a backend that completes its tensors": ('backend: "dali"\ninput { name: "X" }', {"1/model.dali": "9 bytes"}),
    "long gaps between strings": (
        'metric_tags { key: "a" value: "b" }' + " " * 5000 + 'metric_tags { key: "c" value: "d" }', {}
    ),
    "a file with a slash before it": ('default_model_filename: "/model.onnx"', {}),
    "code for another Python": (
        'backend: "python"\nparameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env.tar.gz" } }',
        {"1/model.py": "type X = int\nclass TritonPythonModel:\n    def execute(self, r): ...\n"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_what_triton_takes_is_no_error(what: str, tmp_path: Path):
    config, files = RIGHT[what]
    report = _judged(tmp_path, config, files, GPU)
    assert not _codes(report), report.findings


def test_an_ensembles_model_may_lie_in_another_repository(tmp_path: Path):
    first = _repository(tmp_path)
    second = tmp_path / "second"
    (second / "clip_pipeline" / "1").mkdir(parents=True)
    (second / "clip_pipeline" / "config.pbtxt").write_text(ENSEMBLE)
    assert not _codes(lint([first, second], CPU))
    assert _codes(lint([second], CPU)) == {"CD801"}


# --- what was missed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    ["", "version_policy: { latest: { num_versions: 2 } }", "version_policy: { specific: { versions: [ 2, 1 ] } }"],
)  # fmt: skip
def test_the_newest_version_is_the_one_that_is_compared(policy: str, tmp_path: Path):
    repository = _repository(tmp_path, policy, {"2/model.onnx": "graph with two inputs"})
    assert "CD402" in _codes(lint([repository], CPU))


def test_a_pipe_in_place_of_a_model_is_no_model(tmp_path: Path):
    import os

    repository = _repository(tmp_path, files={"1/model.onnx": "missing"})
    os.mkfifo(repository / "clip_image" / "1" / "model.onnx")
    assert "CD701" in _codes(lint([repository], CPU))


@pytest.mark.parametrize(
    "group", ["kind: KIND_CPU, gpus: [ 0 ], count: 1", "kind: KIND_CPU gpus: 0; count: 1"]
)
def test_a_field_that_is_taken_out_takes_its_separator_along(group: str, tmp_path: Path):
    repository = _repository(tmp_path, f"instance_group {{ {group} }}")
    (finding,) = lint([repository], CPU, select=["CD602"]).findings
    config = repository / "clip_image" / "config.pbtxt"
    config.write_text(config.read_text().replace(finding.source, finding.fix))
    assert not _codes(lint([repository], CPU))


def test_merged_configs_are_what_they_look_like():
    assert merged(CONFIG, "max_batch_size: 4").count("max_batch_size") == 1
