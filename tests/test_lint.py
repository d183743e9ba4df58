"""The linter against what a real server did, and against everything that is no model repository."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from clip_deploy.errors import ConfigError
from clip_deploy.lint import RULES, Severity, lint, target
from clip_deploy.lint.text import read

from . import factories
from .lint_examples import CONFIG, POINTER, build, merged
from .published import PUBLISHED, write

pytest.importorskip("onnx")

CASES = Path(__file__).parent / "cases"
REPOSITORIES = sorted(path.parent for path in CASES.glob("lint/*/case.json"))
CONFIGS = json.loads((CASES / "configs.json").read_text("utf-8"))
CPU = target("cpu", "24.10")

# Case → the rules that name its true cause; the others have none.
CAUSES = {
    "055-folder-differs-from-name": {"CD105"},
    "058-field-invented-optimization": {"CD203"},
    "060-enum-type-float32": {"CD204"},
    "062-syntax-trailing-comma-list": {"CD202"},
    "066-duplicate-field": {"CD205"},
    "071-encoding-utf8-bom": {"CD201"},
    "073-batch-axis-in-dims": {"CD405"},
    "085-input-name-wrong": {"CD401"},
    "090-fixed-batch-1": {"CD406"},
    "094-batch-baked-hidden": {"CD951"},
    "099-preferred-above-max": {"CD501"},
    "103-preferred-without-need": {"CD502"},
    "104-kind-gpu-on-cpu": {"CD601"},
    "107-parameter-misspelt": {"CD511"},
    "114-model-file-lfs-pointer": {"CD703"},
    "115-external-data-missing": {"CD705"},
    "129-config-misnamed": {"CD101"},
    "137-onnx-ir-too-new": {"CD709"},
    "139-backend-onnx": {"CD301"},
    "144-warmup-wrong-shape": {"CD851"},
    "148-ensemble-model-missing": {"CD801"},
    "154-python-syntax-error": {"CD305"},
}


def _codes(report, *severities: Severity) -> set[str]:
    return {f.code for f in report.findings if not severities or f.severity in severities}


@pytest.mark.parametrize("case", REPOSITORIES, ids=lambda path: path.name)
def test_a_real_servers_verdict(case: Path):
    said = json.loads((case / "case.json").read_text("utf-8"))
    needs_run = said["detect"] == "run-graph"
    if needs_run:
        pytest.importorskip("onnxruntime")
    report = lint([case / "model_repository"], CPU, run=needs_run)
    errors, warnings = _codes(report, Severity.ERROR), _codes(report, Severity.WARNING)
    wanted = CAUSES.get(case.name, set())
    if said["severity"] == "error":
        assert errors == wanted
    else:
        assert not errors
        assert warnings == wanted


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_configs_that_a_real_server_took_or_refused(name: str, tmp_path: Path):
    case = CONFIGS[name]
    folder = tmp_path / "model_repository" / name.replace("-", "_")
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, r): ...\n"
    )
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["config"].encode()
    (folder / "config.pbtxt").write_bytes(data)
    report = lint([folder.parent], CPU)
    assert (not _codes(report, Severity.ERROR)) == case["loads"], report.findings


@pytest.mark.parametrize("kind", ["bad", "good"])
@pytest.mark.parametrize("code", sorted(RULES))
def test_every_rule_finds_its_bad_example_and_not_its_good_one(
    code: str, kind: str, tmp_path: Path
):
    rule = RULES[code]
    if rule.runs:
        pytest.importorskip("onnxruntime")
    example = getattr(rule, kind)
    repository = build(example, tmp_path / "model_repository")
    report = lint([repository], target("gpu:9.0" if example.gpu else "cpu", "24.10"), run=rule.runs)
    if kind == "good":
        assert not _codes(report, Severity.ERROR, Severity.WARNING)
        assert code not in _codes(report)
    else:
        assert code in _codes(report), report.findings
        assert not {f.code for f in report.findings if f.severity is Severity.ERROR} - {
            code,
            *ALSO.get(code, ()),
        }


# Rules whose bad example breaks others, too, because one thing follows from another.
ALSO = {"CD802": {"CD805"}, "CD905": {"CD901", "CD903"}}


@pytest.mark.parametrize("code", sorted(RULES))
def test_every_rule_says_why_and_gives_a_place(code: str, tmp_path: Path):
    rule = RULES[code]
    assert rule.why.endswith(".")
    assert len(rule.why) < 200
    if rule.runs:
        pytest.importorskip("onnxruntime")
    repository = build(rule.bad, tmp_path / "model_repository")
    report = lint(
        [repository], target("gpu:9.0" if rule.bad.gpu else "cpu", "24.10"), run=rule.runs
    )
    for finding in report.findings:
        assert os.path.lexists(finding.path)
        if finding.line is not None:
            lines = Path(finding.path).read_text("utf-8", "replace").split("\n")
            assert 1 <= finding.line <= len(lines)
            assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1


@pytest.mark.parametrize("code", sorted(RULES))
def test_the_corrected_line_is_right(code: str, tmp_path: Path):
    """Put every fix in place of its line, and the finding is gone."""
    rule = RULES[code]
    if rule.runs:
        pytest.importorskip("onnxruntime")
    repository = build(rule.bad, tmp_path / "model_repository")
    where = target("gpu:9.0" if rule.bad.gpu else "cpu", "24.10")
    fixes = [f for f in lint([repository], where, select=[code]).findings if f.fix is not None]
    for finding in reversed(fixes):
        path = Path(finding.path)
        lines = path.read_text("utf-8").split("\n")
        assert lines[finding.line - 1] == finding.source
        lines[finding.line - 1] = finding.fix
        path.write_text("\n".join(lines), "utf-8")
    if fixes:
        assert not lint([repository], where, select=[code]).findings


def _repository(tmp_path: Path, config: str | bytes = CONFIG) -> Path:
    """A repository of one model, with that config."""
    from clip_deploy.lint import Example

    repository = build(Example(), tmp_path / "model_repository")
    data = config if isinstance(config, bytes) else config.encode()
    (repository / "clip_image" / "config.pbtxt").write_bytes(data)
    return repository


def test_a_suppression_needs_its_code_and_a_reason(tmp_path: Path):
    quiet = "max_batch_size: 8  # clip-deploy: ignore CD508 whole batches arrive"
    cases = (
        (quiet, set()),
        ("max_batch_size: 8  # clip-deploy: ignore CD508", {"CD508", "CD209"}),
        ("max_batch_size: 8  # clip-deploy: ignore CD999 because", {"CD508", "CD209"}),
        ("# clip-deploy: ignore CD508 whole batches arrive\nmax_batch_size: 8", set()),
        ("max_batch_size: 8\n# clip-deploy: ignore CD508 too late", {"CD508"}),
    )
    for number, (comment, codes) in enumerate(cases):
        repository = _repository(tmp_path / str(number), merged(CONFIG, comment))
        report = lint([repository], CPU)
        assert _codes(report) == codes, comment


def test_a_suppression_above_the_first_field_speaks_for_the_whole_model(tmp_path: Path):
    repository = _repository(tmp_path, "# clip-deploy: ignore CD703 CD508 fetched later\n" + CONFIG)
    (repository / "clip_image" / "1" / "model.onnx").write_text(POINTER)
    report = lint([repository], CPU)
    assert not report.findings
    assert report.suppressed == 2


def test_select_and_ignore_take_beginnings_of_codes(tmp_path: Path):
    repository = _repository(tmp_path, merged(CONFIG, "instance_group { kind: KIND_GPU count: 2 }"))
    assert _codes(lint([repository], CPU)) == {"CD508", "CD601", "CD604"}
    assert _codes(lint([repository], CPU, select=["CD6"])) == {"CD601", "CD604"}
    assert _codes(lint([repository], CPU, ignore=["cd60"])) == {"CD508"}
    assert not _codes(lint([repository], CPU, select=["CD6"], ignore=["CD60"]))
    with pytest.raises(ConfigError, match="CD77"):
        lint([repository], CPU, select=["CD77"])


def test_the_target_decides(tmp_path: Path):
    repository = _repository(
        tmp_path, merged(CONFIG, "instance_group { kind: KIND_GPU gpus: [ 0 ] }")
    )
    assert "CD601" in _codes(lint([repository], CPU))
    assert _codes(lint([repository], target("gpu", "24.10"))) == {"CD508", "CD603"}
    embedded = target("gpu", "24.10", backends=frozenset({"python"}))
    assert "CD303" in _codes(lint([repository], embedded), Severity.ERROR)


def test_what_was_not_looked_at_is_said(tmp_path: Path):
    repository = _repository(tmp_path)
    assert any("--run" in sentence for sentence in lint([repository], CPU).unseen)
    pytest.importorskip("onnxruntime")
    assert not lint([repository], CPU, run=True).unseen


def test_rendered_models_are_right(tmp_path: Path):
    """What render-config writes has nothing to complain about, on every backend it knows."""
    from clip_deploy.engines import BACKENDS
    from clip_deploy.repository import assemble
    from clip_deploy.spec import ServingSpec, Tower

    from .lint_examples import tower_graph

    for backend in BACKENDS:
        repository = tmp_path / backend
        for tower in Tower:
            folder = tmp_path / f"{backend} {tower.value}"
            model = factories.exported(folder, tower, graph=tower_graph(tower))
            assemble(factories.built(backend, model), ServingSpec(), repository)
        where = target("gpu:9.0") if backend == "tensorrt" else CPU
        report = lint([repository], where)
        assert not report.findings, backend
        assert len(report.models) == 2


# --- what is no repository -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["missing", "file", "empty", "a model's folder"])
def test_a_path_that_is_no_repository_is_two_lines(what: str, tmp_path: Path):
    path = tmp_path / "here"
    if what == "file":
        path.write_text("hello")
    elif what == "empty":
        path.mkdir()
    elif what == "a model's folder":
        path = _repository(tmp_path) / "clip_image"
    with pytest.raises(ConfigError) as caught:
        lint([path], CPU)
    assert caught.value.remedy


@pytest.mark.parametrize("seed", range(60))
def test_rubbish_is_a_finding(seed: int, tmp_path: Path):
    """Random bytes, and good configs with pieces cut out, doubled and changed: never an exception, never silence."""
    shuffler = random.Random(seed)
    if seed % 3 == 0:
        data = shuffler.randbytes(shuffler.randrange(1, 4000))
    else:
        data = bytearray(
            (
                CASES / "lint/026-instance-groups-several/model_repository/clip_image/config.pbtxt"
            ).read_bytes()
        )
        for _ in range(shuffler.randrange(1, 6)):
            at = shuffler.randrange(len(data))
            piece = shuffler.choice(
                [b"", b"{", b"}", b"[", b'"', b"\\", b"#", b":", b"\0", b"-", b"\xff", data[:at]]
            )
            data[at : at + shuffler.randrange(4)] = piece
    repository = _repository(tmp_path, bytes(data))
    report = lint([repository], CPU)
    json.dumps(report.to_json())
    if seed % 3 == 0:
        assert _codes(report, Severity.ERROR)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_graph_is_a_finding(seed: int, tmp_path: Path):
    repository = _repository(tmp_path)
    graph = repository / "clip_image" / "1" / "model.onnx"
    shuffler, data = random.Random(seed), bytearray(graph.read_bytes())
    if seed % 2:
        data = data[: shuffler.randrange(len(data) - 4)]
    else:
        for _ in range(20):
            data[shuffler.randrange(len(data))] = shuffler.randrange(256)
    graph.write_bytes(bytes(data))
    report = lint([repository], CPU)
    if seed % 2:
        assert _codes(report, Severity.ERROR)


def test_the_text_reader_ends_on_every_text():
    """Any text ends in a document, in time that grows with its length."""
    shuffler = random.Random(1)
    marks = [
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        ":",
        ",",
        ";",
        '"',
        "'",
        "\\",
        "#",
        "\n",
        "a",
        "1",
        "-",
        " ",
        "é",
    ]
    for _ in range(3000):
        text = "".join(shuffler.choices(marks, k=shuffler.randrange(60)))
        document = read(text)
        assert all(1 <= problem.place.line <= text.count("\n") + 1 for problem in document.problems)
    for text in ("{" * 100_000, "[" * 100_000, "a {" * 100_000, '"' * 100_001, "a: " * 50_000):
        assert read(text).problems


def test_symlinks_that_lead_in_a_circle_or_nowhere(tmp_path: Path):
    repository = _repository(tmp_path)
    model = repository / "clip_image"
    (model / "loop").symlink_to(model)
    (model / "1" / "deep").symlink_to(repository)
    (model / "1" / "nowhere").symlink_to("nowhere")
    assert not _codes(lint([repository], CPU), Severity.ERROR, Severity.WARNING)
    (model / "self").symlink_to("self")
    (model / "2").symlink_to("nowhere")
    (repository / "away").symlink_to("nowhere")
    broken = [f for f in lint([repository], CPU).findings if f.code == "CD107"]
    assert sorted(Path(f.path).name for f in broken) == ["2", "away", "self"]
    (repository / "again").symlink_to(repository)
    assert "CD102" in _codes(lint([repository], CPU))


def test_a_file_of_ten_gigabytes_is_not_read(tmp_path: Path):
    import resource

    repository = _repository(tmp_path)
    for name in ("model.onnx", "model.onnx.data"):
        with (repository / "clip_image" / "1" / name).open("ab") as file:
            file.truncate(10 * 2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = lint([repository], CPU)
    assert "CD702" in _codes(report)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_config_of_ten_gigabytes_is_not_read(tmp_path: Path):
    repository = _repository(tmp_path)
    with (repository / "clip_image" / "config.pbtxt").open("ab") as file:
        file.truncate(10 * 2**30)
    assert "CD208" in _codes(lint([repository], CPU))


def test_special_files_are_not_opened(tmp_path: Path):
    """A pipe that nobody writes to would block for ever."""
    names = ("config.pbtxt", "1/model.onnx", "1/model.py", "1/model.plan", "1/manifest.json")
    for name in names:
        for backend in ("onnxruntime", "python", "tensorrt"):
            repository = _repository(
                tmp_path / f"{backend} {Path(name).name}",
                merged(CONFIG, f'backend: "{backend}"'),
            )
            path = repository / "clip_image" / name
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            report = lint([repository], CPU)
            assert ("CD208" in _codes(report)) == (name == "config.pbtxt")


def test_thousands_of_models(tmp_path: Path):
    repository = tmp_path / "model_repository"
    for number in range(2000):
        folder = repository / f"model_{number}"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text('backend: "python"\n')
    report = lint([repository], CPU, select=["CD701"])
    assert len(report.models) == len(report.findings) == 2000


def test_nothing_in_a_repository_is_executed(tmp_path: Path):
    repository = _repository(tmp_path, 'backend: "python"\n')
    code = repository / "clip_image" / "1" / "model.py"
    code.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass TritonPythonModel:\n    def execute(self, r): ...\n"
    )
    lint([repository], CPU)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("version", "is_right"), [("-1", True), ("1", True), ("2", False), ("0", False), (None, False)]
)
def test_a_step_names_a_version_that_is_served(version: str | None, is_right: bool, tmp_path: Path):
    """A step without model_version asks for version 0, which no model has: seen on a real server."""
    from clip_deploy.lint.rules.ensembles import HEAD, STEP

    repository = _repository(tmp_path)
    folder = repository / "clip_pipeline"
    (folder / "1").mkdir(parents=True)
    step = STEP.replace(" model_version: -1", f" model_version: {version}" if version else "")
    (folder / "config.pbtxt").write_text(HEAD + step)
    report = lint([repository], CPU, select=["CD801"])
    assert (not report.findings) == is_right
    for finding in report.findings:
        assert "model_version: -1" in (finding.fix or finding.remedy or "")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_examples_have_no_error(name: str, tmp_path: Path):
    repository = write(tmp_path / "model_repository", PUBLISHED[name])
    report = lint([repository], CPU, run=importlib.util.find_spec("onnxruntime") is not None)
    assert not _codes(report, Severity.ERROR), report.findings
    assert len(report.models) == len(PUBLISHED[name])
