"""One deployment all the way, with a real export and a real Triton, and once more when nothing has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clip_deploy.cli import main
from clip_deploy.deploy import deploy, deployments
from clip_deploy.report import Status

pytestmark = [pytest.mark.export, pytest.mark.server]

MODEL = Path(__file__).parent / "models" / "tiny-clip.json"


def _tables(backend: str, **checks) -> dict:
    return {
        "tiny": {
            "encoder": {
                "model": str(MODEL),
                "pretrained": "random",
                "towers": ["image"],
                "max_batch": 8,
            },
            "engine": {"backend": backend},
            "checks": {"concurrency": 16, **checks},
        }
    }


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory):
    """A folder in which the tiny model was deployed, and what became of it."""
    folder = tmp_path_factory.mktemp("deployed")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        return folder, deploy(deployments(_tables("python", require=["lint", "embedded"])))


def test_a_model_goes_all_the_way_and_up_the_ladder(deployed):
    folder, report = deployed
    assert report.ok, report.failure
    ran = [row.step for row in report.steps if row.outcome.value == "ran"]
    assert ran == ["export", "render-config", "lint", "smoke-test"]
    assert {r.name: r.status for r in report.rungs}["embedded"] is Status.PASSED
    (details,) = report.details
    assert any(check.name == "answers equal torch's" for check in details.checks)
    assert (folder / "build/tiny/model_repository/clip_image_encoder/1/model.onnx").is_file()


def test_the_second_time_nothing_runs_although_the_server_left_compiled_code(
    deployed, monkeypatch: pytest.MonkeyPatch
):
    folder, _ = deployed
    monkeypatch.chdir(folder)
    report = deploy(deployments(_tables("python")))
    outcomes = {row.step: row.outcome.value for row in report.steps}
    assert outcomes["smoke-test"] == outcomes["render-config"] == outcomes["lint"] == "up to date"
    assert outcomes["export"] == "up to date"


def test_a_bar_that_no_answer_reaches_fails_the_smoke_test(deployed, tmp_path, monkeypatch):
    shutil.copytree(deployed[0] / "build", tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clip_deploy.deploy.nouns.Checks.__post_init__", lambda self: None)
    report = deploy(deployments(_tables("python", min_cosine=1.1)), start="smoke-test")
    assert report.failure.exit_code == 7
    assert "1.1 at least is asked" in str(report.failure)


def test_for_a_container_the_graphs_are_rehearsed_here_and_no_docker_ends_it(
    deployed, tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(deployed[0] / "build", tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clip_deploy.servers.container.shutil.which", lambda name: None)
    shutil.rmtree(tmp_path / "build/tiny/model_repository")
    lines = [
        f"[tiny.{t}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in keys.items())
        for t, keys in _tables("onnxruntime")["tiny"].items()
    ]
    Path("clip-deploy.toml").write_text("\n".join(lines))
    assert main(["deploy", "--json", "r.json"]) == 3
    assert "there is no docker command" in capsys.readouterr().err
    (tiny,) = json.loads(Path("r.json").read_text())["deployments"]
    assert {row["step"]: row["outcome"] for row in tiny["steps"]} == {
        "export": "up to date",
        "convert": "skipped",
        "rehearse": "ran",
        "tensorrt-check": "skipped",
        "build-trt": "skipped",
        "render-config": "ran",
        "lint": "ran",
        "smoke-test": "failed",
        "publish": "not reached",
    }
    rungs = {row["rung"]: row["status"] for row in tiny["ladder"]}
    assert (rungs["embedded"], rungs["container"]) == ("passed", "failed")


def test_openvinos_networks_are_made_once(deployed, tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    shutil.copytree(deployed[0] / "build", tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    tables = _tables("python")
    tables["tiny"]["engine"] |= {"engine": "openvino", "precision": "fp32"}
    report = deploy(deployments(tables), until="lint")
    assert report.ok, report.failure
    rows = {row.step: row for row in report.steps}
    assert (rows["convert"].outcome.value, rows["convert"].said) == (
        *("ran", "clip_image_encoder in fp32"),
    )
    assert rows["render-config"].said == "clip_image_encoder version 2 (new)"
    again = {row.step: row.outcome.value for row in deploy(deployments(tables), until="lint").steps}
    assert again["convert"] == again["render-config"] == "up to date"
