"""config.pbtxt: golden files, every choice, and Triton's own schema as the judge."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ConfigError
from clip_deploy.repository import render
from clip_deploy.repository.rendering import parse_config
from clip_deploy.resources import templates_dir
from clip_deploy.spec import ServingSpec, Tower
from tests.factories import built, exported, word_tokenizer

GOLDEN = Path(__file__).parent / "golden"

# What an engineer writes by hand today for ViT-B-32's image tower.
BY_HAND = """
name: "clip_image_encoder"
backend: "onnxruntime"
max_batch_size: 32
input [ { name: "pixel_values" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "image_embeds" data_type: TYPE_FP32 dims: [ 512 ] } ]
dynamic_batching { max_queue_delay_microseconds: 5000 }
"""


def _config(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _rendered(
    folder: Path, tower: Tower = Tower.IMAGE, backend: str = "onnxruntime", **choices
) -> model_config_pb2.ModelConfig:
    return _config(render(built(backend, exported(folder, tower)), ServingSpec(**choices)))


def test_the_image_tower_equals_the_configuration_written_by_hand(tmp_path: Path):
    config = _rendered(tmp_path)
    assert len(config.instance_group) == 1
    assert len(config.model_warmup) == 2
    assert all(key.startswith("clip_deploy.") for key in config.parameters)
    for ours in ("instance_group", "model_warmup", "parameters"):
        config.ClearField(ours)
    assert config == _config(BY_HAND)


# Digests of what NumPy and tokenizers write, which differ between their versions.
_DIGESTS = re.compile(
    r'[0-9a-f]{64}|(?<=-)[0-9a-f]{12}(?=\.bin)|(?<="clip_deploy.tokenizer" value { string_value: ")[^"]+'
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tower", Tower)
def test_rendered_text_is_the_golden_file(tmp_path: Path, tower: Tower, backend: str, bless: bool):
    text = render(built(backend, exported(tmp_path, tower)), ServingSpec())
    text = _DIGESTS.sub("DIGEST", text)
    golden = GOLDEN / f"{tower.model_name}.{backend}.pbtxt"
    if bless:
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8"), "run pytest --bless and look at the difference"


def test_every_choice_arrives_in_the_message(tmp_path: Path):
    config = _rendered(
        tmp_path,
        max_batch=16,
        queue_delay_us=0,
        instances=3,
        kind="gpu",
        gpus=(0, 2),
        preferred_batch_sizes=(8, 16),
        max_queue_size=64,
        queue_timeout_us=250_000,
        timeout_action="delay",
        warmup=False,
        version_policy="specific:1,3",
        parameters={"intra_op_thread_count": "4", "note": 'say "hi" \\ ü\n'},
    )
    group, batching = config.instance_group[0], config.dynamic_batching
    policy = batching.default_queue_policy
    assert config.max_batch_size == 16
    assert (group.count, group.kind, list(group.gpus)) == (3, group.KIND_GPU, [0, 2])
    assert batching.max_queue_delay_microseconds == 0
    assert list(batching.preferred_batch_size) == [8, 16]
    assert (policy.max_queue_size, policy.default_timeout_microseconds, policy.timeout_action) == (
        64,
        250_000,
        policy.DELAY,
    )
    assert list(config.model_warmup) == []
    assert list(config.version_policy.specific.versions) == [1, 3]
    assert config.parameters["intra_op_thread_count"].string_value == "4"
    assert config.parameters["note"].string_value == 'say "hi" \\ ü\n'


@pytest.mark.parametrize(
    ("policy", "field"), [("latest:3", "latest"), ("all", "all"), ("specific:2", "specific")]
)
def test_version_policies_are_rendered(tmp_path: Path, policy: str, field: str):
    assert (
        _rendered(tmp_path, version_policy=policy).version_policy.WhichOneof("policy_choice")
        == field
    )


def test_a_model_without_batching_says_zero_and_carries_the_batch_axis_itself(tmp_path: Path):
    build = BACKENDS["onnxruntime"].build(exported(tmp_path))
    text = render(build, ServingSpec(max_batch=0))
    config = _config(text)
    assert "max_batch_size: 0" in text
    assert list(config.input[0].dims) == [-1, 3, 224, 224]
    assert list(config.output[0].dims) == [-1, 512]
    assert not config.HasField("dynamic_batching")
    assert [list(s.inputs["pixel_values"].dims) for s in config.model_warmup] == [[1, 3, 224, 224]]


def test_a_batch_of_one_needs_no_dynamic_batching(tmp_path: Path):
    assert not _rendered(tmp_path, max_batch=1).HasField("dynamic_batching")


def test_warmup_covers_one_row_and_the_largest_batch(tmp_path: Path):
    assert [sample.batch_size for sample in _rendered(tmp_path, max_batch=8).model_warmup] == [1, 8]


def test_a_text_model_carries_its_tokenizer(tmp_path: Path):
    from clip_deploy.contract import unpack

    config = _rendered(tmp_path, Tower.TEXT)
    assert unpack(config.parameters["clip_deploy.tokenizer"].string_value) == word_tokenizer()[0]


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"max_batch": 64}, "was checked up to 32"),
        ({"preferred_batch_sizes": (64,)}, "preferred batch size 64"),
        ({"max_batch": 8, "preferred_batch_sizes": (4, 16)}, "preferred batch size 16"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, choices: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        _rendered(tmp_path, **choices)


def test_the_python_backend_runs_on_the_cpu_and_refuses_a_gpu(tmp_path: Path):
    assert _rendered(tmp_path / "a", backend="python").instance_group[0].kind == 2  # KIND_CPU
    with pytest.raises(ConfigError, match="does not run as instance kind gpu"):
        _rendered(tmp_path / "b", backend="python", kind="gpu")


def _with_template(tmp_path: Path, name: str, text: str) -> str:
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / name).write_text(text, "utf-8")
    return render(
        BACKENDS["onnxruntime"].build(exported(tmp_path)), ServingSpec(), templates=folder
    )


def test_a_users_template_replaces_the_shipped_one(tmp_path: Path):
    shipped = (templates_dir() / "config.pbtxt.j2").read_text("utf-8")
    text = _with_template(
        tmp_path, "config.pbtxt.j2", shipped + 'metric_tags { key: "team" value: "search" }\n'
    )
    assert _config(text).metric_tags["team"] == "search"


def test_a_template_of_one_backend_extends_the_shared_one(tmp_path: Path):
    template = '{% extends "config.pbtxt.j2" %}{% block settings %}\noptimization { priority: PRIORITY_MAX }\n{% endblock %}'
    assert (
        _config(_with_template(tmp_path, "onnxruntime.pbtxt.j2", template)).optimization.priority
        == 1
    )


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{% if %}", "line 1"),
        ("nonsense: 3", 'line 1, column 1: .*no field named "nonsense"'),
        ("name: {{ name | quoted }}\nmax_batch_size: 5.5", "line 2, column 17"),
        ('name: "other"', "says name 'other'"),
        (
            "name: {{ name | quoted }} backend: {{ backend | quoted }} max_batch_size: 99",
            "says max_batch_size 99",
        ),
        (
            "name: {{ name | quoted }} backend: {{ backend | quoted }} max_batch_size: {{ max_batch }}",
            "says input",
        ),
    ],
)
def test_a_wrong_template_is_refused_with_its_place(tmp_path: Path, template: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        _with_template(tmp_path, "config.pbtxt.j2", template)


def test_a_folder_without_templates_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no template"):
        _with_template(tmp_path, "notes.txt", "")


def test_parse_errors_name_file_line_and_column():
    with pytest.raises(ConfigError, match=r"a\.pbtxt, line 2, column 3"):
        parse_config('name: "x"\n  wrong: 1', "a.pbtxt")
