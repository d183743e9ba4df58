"""``clip-deploy lint`` as a person and as a pipeline run it: formats, exit codes, and the commands that lint first."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from clip_deploy.cli import main
from clip_deploy.lint import RULES, Example

from .factories import exported
from .lint_examples import CONFIG, build, merged, tower_graph

pytest.importorskip("onnx")

BATCHING = "dynamic_batching { max_queue_delay_microseconds: 5000 }"
WRONG = "dynamic_batching { preferred_batch_size: [ 8, 16 ] }"


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return build(Example(BATCHING), tmp_path / "clean")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """One error in a config, with a corrected line."""
    return build(Example(WRONG), tmp_path / "wrong: a,b%")


@pytest.fixture
def warned(tmp_path: Path) -> Path:
    return build(Example("dynamic_batching { preferred_batch_size: [ 4 ] }"), tmp_path / "w")


def _lint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["lint", *map(str, arguments), "--target", "cpu"])
    return (code, *capsys.readouterr())


def test_a_clean_repository_is_one_line_and_zero(clean: Path, capsys):
    code, out, err = _lint(capsys, clean)
    assert code == 0
    assert out.splitlines()[0] == "lint: nothing to complain about in 1 model"
    assert "not looked at: graphs were not run" in out
    assert err == ""


def test_an_error_is_shown_with_its_place_and_the_corrected_line(wrong: Path, capsys):
    code, out, _ = _lint(capsys, wrong)
    assert code == 7
    assert str(wrong / "clip_image" / "config.pbtxt") in out
    assert "6:20 ✗ CD501 preferred batch size 16 with max_batch_size 8" in out
    assert f"- {WRONG}" in out
    assert "+ dynamic_batching { preferred_batch_size: [ 8 ] }" in out
    assert "lint: 1 error in 1 model" in out
    assert "--explain CD501" in out


def test_strict_makes_warnings_fail(warned: Path, capsys):
    assert _lint(capsys, warned)[0] == 0
    assert _lint(capsys, warned, "--strict")[0] == 7


def test_select_and_ignore_decide_the_exit_code(wrong: Path, capsys):
    assert _lint(capsys, wrong, "--ignore", "CD5")[0] == 0
    assert _lint(capsys, wrong, "--select", "CD1,CD2")[0] == 0
    assert _lint(capsys, wrong, "--select", "CD501")[0] == 7


def test_several_repositories_in_one_run(clean: Path, wrong: Path, capsys):
    code, out, _ = _lint(capsys, clean, wrong)
    assert code == 7
    assert "in 2 models" in out


def test_json(wrong: Path, capsys):
    code, out, err = _lint(capsys, wrong, "--format", "json")
    assert code == 7
    assert err == ""
    report = json.loads(out)
    (finding,) = [f for f in report["findings"] if f["severity"] == "error"]
    assert finding == {
        "code": "CD501",
        "name": "preferred-above-max",
        "severity": "error",
        "model": "clip_image",
        "path": str(wrong / "clip_image" / "config.pbtxt"),
        "line": 6,
        "column": 20,
        "message": "preferred batch size 16 with max_batch_size 8",
        "fix": "dynamic_batching { preferred_batch_size: [ 8 ] }",
    }
    assert report["summary"]["error"] == 1
    assert report["unseen"]


def test_json_has_null_where_a_place_has_no_line(tmp_path: Path, capsys):
    repository = build(Example(files={"1/model.onnx": "missing"}), tmp_path / "r")
    report = json.loads(_lint(capsys, repository, "--format", "json")[1])
    finding = next(f for f in report["findings"] if f["code"] == "CD701")
    assert finding["line"] is None
    assert finding["column"] is None


def test_sarif(wrong: Path, monkeypatch, capsys):
    """What code scanning reads: results point at rules, and at files relative to where the command ran."""
    monkeypatch.chdir(wrong.parent)
    code, out, _ = _lint(capsys, wrong.name, "--format", "sarif")
    assert code == 7
    log = json.loads(out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len(rules) == len({rule["id"] for rule in rules})
    for result in run["results"]:
        rule = rules[result["ruleIndex"]]
        assert rule["id"] == result["ruleId"]
        assert result["level"] == rule["defaultConfiguration"]["level"]
        assert result["level"] in ("error", "warning", "note")
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "wrong%3A%20a%2Cb%25/clip_image/config.pbtxt"
        assert place["region"]["startLine"] >= 1
    assert any("Fix: dynamic_batching" in r["message"]["text"] for r in run["results"])


def test_github_annotations(wrong: Path, monkeypatch, capsys):
    """Workflow commands end a property at a comma or a colon, so these are escaped."""
    monkeypatch.chdir(wrong.parent)
    _, out, _ = _lint(capsys, wrong.name, "--format", "github")
    (line,) = [line for line in out.splitlines() if "CD501" in line]
    start = "::error file=wrong%3A a%2Cb%25/clip_image/config.pbtxt,line=6,col=20,title=CD501 "
    assert line.startswith(start)
    assert "%0AFix: dynamic_batching" in line


def test_junit(wrong: Path, warned: Path, capsys):
    _, out, _ = _lint(capsys, wrong, warned, "--format", "junit")
    cases = list(ET.fromstring(out).iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert failed == ["CD501 preferred-above-max"]
    _, out, _ = _lint(capsys, wrong, warned, "--format", "junit", "--strict")
    assert len(list(ET.fromstring(out).iter("failure"))) > 1


@pytest.mark.parametrize("format_", ["text", "json", "sarif", "junit", "github"])
def test_output_goes_to_a_file(format_: str, wrong: Path, tmp_path: Path, capsys):
    _, shown, _ = _lint(capsys, wrong, "--format", format_)
    file = tmp_path / "report"
    code, out, _ = _lint(capsys, wrong, "--format", format_, "--output", str(file))
    assert code == 7
    assert out == ""
    written = file.read_text("utf-8")
    assert "CD501" in written
    assert "\x1b" not in written
    if format_ not in ("text", "junit"):
        assert written == shown


def test_explain(capsys):
    assert main(["lint", "--explain", "cd501"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## CD501 preferred-above-max")
    assert "Wrong:" in out
    assert main(["lint", "--explain", "all"]) == 0
    out = capsys.readouterr().out
    assert all(f"## {code} " in out for code in RULES)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "nothing to lint"),
        (["nowhere"], "no model repository at nowhere"),
        (["--explain", "CD77"], "there is no rule CD77"),
        ([".", "--format", "xml"], "--format 'xml' is unknown"),
        ([".", "--select", "CD77"], "there is no rule CD77"),
        ([".", "--triton-release", "24.99"], "Triton release '24.99' is not known"),
        ([".", "--target", "tpu"], "target 'tpu' is unknown"),
        ([".", "--target", "gpu:nine"], "target 'gpu:nine' is unknown"),
    ],
)
def test_bad_arguments_are_two_lines(arguments: list[str], what: str, capsys):
    assert main(["lint", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "fix: "))]
    assert len(lines) == 2
    assert what in lines[0]


def test_a_backend_of_ones_own_is_named(tmp_path: Path, capsys):
    repository = build(Example('backend: "shop_ranker"'), tmp_path / "r")
    code, out, _ = _lint(capsys, repository)
    assert code == 7
    assert "--backend shop_ranker" in out
    assert _lint(capsys, repository, "--backend", "shop_ranker")[0] == 0


# --- commands that lint first ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "smoke-test", "bench", "capacity"])
def test_a_server_is_not_started_on_errors(command: str, tmp_path: Path, monkeypatch, capsys):
    """No process is started: tests of this tier may not, and say so."""
    config = merged(CONFIG, f'backend: "python"\n{WRONG}')
    repository = build(Example(config, files={"1/model.py": "python"}), tmp_path / "r")
    assert main([command, str(repository)]) == 7
    out, err = capsys.readouterr()
    assert "CD501" in err
    assert "would not be served rightly: 1 error in 1 model" in err
    assert out == ""


def test_rendering_lints_what_it_wrote_and_nothing_else(wrong: Path, tmp_path: Path, capsys):
    from clip_deploy.spec import Tower

    exported(tmp_path / "build", graph=tower_graph(Tower.IMAGE))
    arguments = ["render-config", str(tmp_path / "build"), "--repository", str(wrong)]
    assert main(arguments) == 0
    assert "lint: nothing to complain about in 1 model" in capsys.readouterr().err


def test_rendering_fails_on_a_template_of_ones_own_that_is_wrong(tmp_path: Path, capsys):
    from clip_deploy.resources import templates_dir
    from clip_deploy.spec import Tower

    exported(tmp_path / "build", graph=tower_graph(Tower.IMAGE))
    templates = tmp_path / "templates"
    templates.mkdir()
    text = (templates_dir() / "config.pbtxt.j2").read_text("utf-8")
    (templates / "config.pbtxt.j2").write_text(text + 'instance_group { profile: "0" }\n')
    code = main(
        [
            *("render-config", str(tmp_path / "build"), "--repository", str(tmp_path / "models")),
            *("--templates", str(templates)),
        ]
    )
    assert code == 7
    assert "CD605" in capsys.readouterr().err
