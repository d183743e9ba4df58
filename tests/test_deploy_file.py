"""clip-deploy.toml: its keys are the flags, what is wrong in it is named with its line, and init writes one that works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from clip_deploy.cli import app, main
from clip_deploy.deploy import deployments, read
from clip_deploy.deploy.keys import KEYS, TABLES
from clip_deploy.deploy.lines import lines_of
from clip_deploy.deploy.reading import tomllib
from clip_deploy.deploy.schema import schema, starting_file
from clip_deploy.errors import ConfigError
from clip_deploy.spec import BatchProfile, Precision, Tower
from tests.test_cli import _fails

ROOT = Path(__file__).parent.parent
BASE = """[search.encoder]
model = "ViT-B-32"
pretrained = "random"
[search.engine]
backend = "python"
"""
TENSORRT = BASE.replace('"python"', '"tensorrt"')


def _read(tmp_path: Path, text: str):
    path = tmp_path / "clip-deploy.toml"
    path.write_text(text, "utf-8")
    return read(path)


def _commands():
    root = typer.main.get_command(app)
    return root.commands


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_key_is_a_flag_without_dashes_and_has_its_default(key):
    *words, option = key.flag.split(" ")
    command = _commands()[words[0]]
    for word in words[1:]:
        command = command.commands[word]
    found = {name: p for p in command.params for name in (*p.opts, p.name.upper(), p.metavar or "")}
    parameter = found[option]
    singular = (
        key.name.removesuffix("s") if isinstance(key.default_value(), (list, dict)) else key.name
    )
    name = option.removeprefix("--").replace("-", "_").lower()
    assert name in (key.name, singular)
    if key.default or key.path in ("encoder.towers", "server.launcher"):
        return  # places that carry the deployment's name; both towers; the launcher that has the backend
    default = parameter.default
    assert (default or None) == (key.default_value() or None), f"{key.path}: {default}"


def test_every_choice_of_the_api_has_a_key():
    from dataclasses import fields

    from clip_deploy.deploy.key import _CLASSES

    made_up = {
        *("EngineSpec.name", "Deployment.name", "Deployment.said", "Deployment.source"),
        *(f"Deployment.{t}" for t in TABLES),
        "BuildOptions.release",  # the server's
        *(f"ServerOptions.{n}" for n in ("host", "ports", "log", "gpus", "shm_size", "arguments")),
    }
    named = {key.attribute for key in KEYS}
    for name, kind in _CLASSES.items():
        for field in fields(kind):
            assert f"{name}.{field.name}" in named | made_up


def test_a_file_says_what_the_api_says(tmp_path: Path):
    (found,) = _read(
        tmp_path,
        """
        [a.encoder]
        model = "ViT-B-32"
        pretrained = "random:7"
        towers = ["image"]
        precision = "fp16"
        mean = [0.5, 0.5, 0.5]
        images = "photographs"
        [a.engine]
        backend = "tensorrt"
        [a.plan]
        batch = "1:4:16"
        [a.serving]
        max_batch = 8
        max_queue_delay_us = 100
        gpus = [0, 1]
        instance_kind = "gpu"
        parameters = { x = "1" }
        [a.server]
        triton_release = "25.01"
        timeout = 60
        [a.checks]
        min_cosine = 0.99
        require = ["gpu"]
        [a.publish]
        destination = "s3://bucket/models"
        keep = 3
        """,
    )
    assert found.encoder.random_seed() == 7
    assert found.encoder.towers == (Tower.IMAGE,)
    assert found.encoder.precision is Precision.FP16
    assert found.encoder.images == tmp_path / "photographs"
    assert found.plan.profile == BatchProfile(1, 4, 16)
    assert found.plan.release == found.server.release == "25.01"
    assert found.serving.gpus == (0, 1)
    assert dict(found.serving.parameters) == {"x": "1"}
    assert found.server.timeout_s == 60.0
    assert found.checks.require == ("gpu",)
    assert (found.publish.destination, found.publish.keep) == ("s3://bucket/models", 3)
    assert found.out == tmp_path / "build" / "a"
    assert found.starts == "container"


def test_paths_are_relative_to_the_file_and_names_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiny.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    text = BASE.replace('"ViT-B-32"', '"tiny.json"')
    (Path("conf") / "f.toml").write_text(text + '[search.publish]\ndestination = "out"\n')
    (found,) = read(Path("conf/f.toml"))
    assert found.encoder.model == "conf/tiny.json"
    assert found.source == (Path("conf/tiny.json"),)
    assert found.encoder.pretrained == "random"
    assert found.publish.destination == "conf/out"
    assert found.out == Path("conf/build/search")


@pytest.mark.parametrize(
    ("text", "line", "what", "how"),
    [
        (f"{BASE}[search.serving]\nmax_bach = 3\n", 7, "no key 'max_bach'", "max_batch?"),
        (f"{BASE}[search.serving]\nqueue_delay_us = 3\n", 7, "no key", "max_queue_delay_us?"),
        (f"{BASE}[search.serving]\nparameter = 3\n", 7, "no key", "did you mean parameters?"),
        (f"{BASE}[search.serving]\nconcurrency = 3\n", 7, "no key", "into [search.checks]"),
        (f"{BASE}[search.serving]\nmax_batch = true\n", 7, "is not a whole number", "= 8"),
        (f'{BASE}[search.checks]\nstrict = "yes"\n', 7, "is not true or false", "strict = false"),
        (f"{BASE}[search.servng]\nmax_batch = 3\n", 6, "no table 'servng'", "serving?"),
        (f"{BASE}[search.serving]\nmax_batch = 64\n", 7, "64 are served", "max_batch 64"),
        (f'{TENSORRT}[search.server]\nlauncher = "embedded"\n', 5, "cannot load", "container"),
        (f'{BASE}precision = "int8"\n', 6, "precision int8", "add both"),
        (BASE.replace('"python"', '"pyton"'), 5, '"pyton" is unknown', "did you mean python?"),
        ('[encoder]\nmodel = "x"\n', 1, "outside of any deployment", "[search.encoder]"),
        ('model = "x"\n', 1, "outside of any deployment", "[search.encoder]"),
        ('[search.encoder]\npretrained = "random"\n', 1, "has no model", 'model = "ViT-B-32"'),
        (f'{BASE}[search.plan]\nbatch = "1:8:16"\n', 5, "a plan for TensorRT", "tensorrt"),
        (f"{BASE}[search.plan]\nin_container = true\n", 5, "a plan for TensorRT", "tensorrt"),
        (f'{TENSORRT}[search.plan]\nbatch = "8"\n', 7, "batch profile '8'", "MIN:OPT:MAX"),
        (f'{TENSORRT}[search.plan]\nbatch = "1:8:64"\n', 7, "batch 1:8:64", "max_batch 64"),
        (f'{BASE}[search.checks]\nrequire = ["gpus"]\n', 7, '"gpus" is unknown', "mean gpu?"),
        (f'{BASE}[search.checks]\nrequire = ["gpu"]\n', 5, "rung gpu", "instance_kind gpu"),
        (f'{BASE}[search.checks]\nrequire = ["container"]\n', 5, "rung container", "onnxruntime"),
        (f"{BASE}[search.checks]\nmin_cosine = 2\n", 6, "cosine of 2", "0.9999"),
        (f"{BASE}[search.publish]\nkeep = 2\n", 6, "has no destination", "destination = "),
        (f'{BASE}[search.publish]\ndestination = "/d"\nkeep = 0\n', 8, "keep 0", "keep 1"),
        (
            f'{BASE}[search.publish]\ndestination = "s3://u:p@h/x"\n',
            7,
            "a password",
            "AWS_PROFILE",
        ),
        (f'{BASE}[search.publish]\ndestination = "${{D}}"\n', 7, "variable", "relative to"),
        (f'{BASE}[search.server]\ntriton_release = "25.01"\n', 7, "which is 24.10", "container"),
        (f'{BASE}[search.serving]\ninstance_kind = "gpu"\n', 5, "instance kind gpu", "cpu"),
        (f"{BASE}[search.serving]\ncuda_graphs = true\n", 5, "CUDA graphs", "tensorrt"),
        (f"{BASE}[search.serving]\nparameters = {{ a = 1 }}\n", 7, "table of texts", "= {"),
        (f"{BASE}[search.serving]\nqueue_timeout_us = -1\n", 6, "a negative delay", "use 0"),
        (BASE.replace("random", "random:x"), 1, "seed 'x'", "random:7"),
        ('["a/b".encoder]\nmodel = "x"\n', 1, "called 'a/b'", "letters"),
        (f'{BASE}[[search.plan]]\nbatch = "x"\n', 6, "is no table", "[search.plan]"),
        (f"{BASE}[search.engine]\n", 6, "no TOML", "correct"),
        (
            BASE + BASE.replace("search", "b").replace('m"\n', 'm"\nout = "build/search"\n'),
            6,
            "share",
            "of its own",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_what_was_meant(
    tmp_path: Path, text: str, line: int, what: str, how: str
):
    with pytest.raises(ConfigError) as failure:
        _read(tmp_path, text)
    message = str(failure.value)
    assert what in message
    assert f"line {line}" in message, message
    assert how in failure.value.remedy
    assert "--" not in failure.value.remedy or "clip-deploy" in failure.value.remedy


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "no deployment"), (b"\xff\xfe", "cannot be read"), (b"a" * 2**21, "more than 1 MB")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, what: str):
    (tmp_path / "f.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=what):
        read(tmp_path / "f.toml")


def test_hostile_nesting_is_refused(tmp_path: Path):
    for text in (f"a = {'[' * 5000}{']' * 5000}", f"[{'a.' * 3000}b]\nc = 1"):
        with pytest.raises(ConfigError):
            _read(tmp_path, text)


def test_lines_are_found_in_every_way_to_write_a_key():
    found = lines_of(
        'top.a = 1\n[x."y z"]\n# n = 1\nlong = """\nfake = 1\n[fake]\n"""\n'
        "list = [\n  'a', # ]\n  'b',\n]\nb = 1\n[ x . w ]\nin = { deep = 1 }\n"
    )
    assert found["top", "a"] == 1
    assert found["x", "y z", "long"] == 4
    assert found["x", "y z", "list"] == 8
    assert found["x", "y z", "b"] == 12
    assert found["x", "w", "in", "deep"] == 14
    assert not any("fake" in path or "n" in path for path in found)


def test_python_gives_the_same_tables():
    (found,) = deployments(
        {"a": {"encoder": {"model": "ViT-B-32"}, "engine": {"backend": "python"}}}
    )
    assert found.starts == "embedded"
    with pytest.raises(ConfigError, match=r"\[a.engine\] has no key 'bakend'"):
        deployments({"a": {"encoder": {"model": "ViT-B-32"}, "engine": {"bakend": "python"}}})


def test_the_starting_file_shows_every_key_and_each_line_can_be_used():
    text = starting_file("ViT-B-32", "random", "search", ["a note"])
    for key in KEYS:
        assert re.search(rf"^(# )?{key.name} = ", text, re.MULTILINE), key.path
    plain = {"search": tomllib.loads(text)["search"]}
    tables = {k: dict(v) for k, v in plain["search"].items()}
    everything = tomllib.loads(
        "\n".join(re.sub(r"^# (?=\[search|[a-z_]+ = )", "", line) for line in text.splitlines())
    )["search"]
    assert set(everything) == set(TABLES)
    (usual,) = deployments(plain)
    for key in KEYS:
        value = everything[key.table][key.name]
        assert key.kind.holds(value), key.path
        if key.default_value() not in (None, [], {}) and key.path not in ("engine.backend",):
            (same,) = deployments(
                {"search": {**tables, key.table: {**tables.get(key.table, {}), key.name: value}}}
            )
            assert (same.serving, same.server, same.checks) == (
                *(usual.serving, usual.server, usual.checks),
            )


def test_init_writes_a_file_that_reads_and_never_overwrites(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clip_deploy.doctor._output", lambda *command: None)
    monkeypatch.setattr("clip_deploy.doctor.shutil.which", lambda name: None)
    monkeypatch.setattr("clip_deploy.servers.libpython.available", lambda: False)
    assert main(["init"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["clip-deploy.toml", "clip-deploy.schema.json"]
    assert "the vectors mean nothing" in err
    text = Path("clip-deploy.toml").read_text()
    assert text.startswith("#:schema ./clip-deploy.schema.json\n")
    assert "Docker" in text
    (found,) = read(Path("clip-deploy.toml"))
    assert (found.name, found.encoder.pretrained, found.starts) == ("search", "random", "embedded")
    what, how = _fails(capsys, ["init", "RN50"], 2)
    assert "is there already" in what
    assert "--file" in how
    assert Path("clip-deploy.toml").read_text() == text


@pytest.mark.parametrize("name", ["encoder", "a b", "../x"])
def test_init_refuses_a_name_that_would_not_read(tmp_path: Path, capsys, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clip_deploy.deploy.starting.examine", list)
    _fails(capsys, ["init", "--name", name], 2)
    assert not list(tmp_path.iterdir())


def test_init_takes_a_model_as_seen_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clip_deploy.deploy.starting.examine", list)
    (tmp_path / "tiny.json").write_text("{}")
    assert main(["init", "tiny.json", "--file", "conf/clip-deploy.toml"]) == 0
    (found,) = read(Path("conf/clip-deploy.toml"))
    assert found.encoder.model == "tiny.json"


def test_editors_and_the_command_refuse_the_same(tmp_path: Path):
    validator = pytest.importorskip("jsonschema").Draft7Validator
    validator.check_schema(schema())
    check = validator(schema())
    good = [BASE, TENSORRT, (ROOT / "examples/ci/clip-deploy.toml").read_text()]
    good.append(starting_file("ViT-B-32", "random", "search"))
    for text in good:
        assert not list(check.iter_errors(tomllib.loads(text)))
    bad = ["[search.serving]\nmax_bach = 3", "[search.serving]\nmax_batch = true"]
    bad += ["[search.servng]\na = 1", '[search.checks]\nrequire = ["gpus"]', "[search.publish]"]
    for text in [*(BASE + each for each in bad), '[encoder]\nmodel = "x"', "[search.engine]"]:
        assert list(check.iter_errors(tomllib.loads(text))), text
        with pytest.raises(ConfigError):
            _read(tmp_path, text)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["init", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_steps_and_rungs_are_named_alike_everywhere():
    import importlib

    command = importlib.import_module("clip_deploy.cli.deploy")
    from clip_deploy.deploy import RUNGS, STEPS

    assert command._STEPS.split("|") == list(STEPS)
    assert command._RUNGS.split("|") == list(RUNGS)
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \|", page.partition("## Keys")[0], re.MULTILINE)
    assert rows == [*STEPS, *RUNGS]
