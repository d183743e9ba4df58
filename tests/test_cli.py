"""Commands as a person runs them: exit codes, two lines per failure, results on stdout and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_deploy import __version__
from clip_deploy.cli import main
from clip_deploy.errors import ClipDeployError, ServerError
from clip_deploy.spec import Tower
from tests.factories import exported
from tests.lint_examples import tower_graph


def _fails(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> tuple[str, str]:
    """Run a command that must fail with two lines; returns what they say."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "fix: "))]
    assert len(lines) == 2, err
    assert "Traceback" not in err
    return lines[0].removeprefix("error: "), lines[1].removeprefix("fix: ")


def test_the_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        *(
            "export",
            "build-trt",
            "inspect",
            "render-config",
            "lint",
            "serve",
            "smoke-test",
            "bench",
            "tune",
            "capacity",
            "gateway",
            "render-deploy",
            "doctor",
            "init",
            "deploy",
        ),
        *("server", "server install", "publish"),
        *("index", "index add", "index stats", "index search"),
        *("published", "published list", "published rollback", "published prune"),
        *("published verify", "published unlock"),
    ],
)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str):
    assert main([*command.split(), "--help"]) == 0
    assert "Usage: clip-deploy" in capsys.readouterr().out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "render-config" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["exprot"],
        ["export"],
        ["export", "ViT-B-32", "--what"],
        ["serve", "x", "--grpc-port", "99999"],
    ],
)
def test_a_command_that_does_not_parse_exits_with_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_rendering_prints_what_it_would_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for tower in Tower:
        exported(tmp_path / "build", tower)
    assert (
        main(
            [
                "render-config",
                str(tmp_path / "build"),
                "--stdout",
                "--repository",
                str(tmp_path / "models"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert 'name: "clip_image_encoder"' in out
    assert 'name: "clip_text_encoder"' in out
    assert not (tmp_path / "models").exists()


def test_rendering_writes_a_repository_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("onnx")  # the linter reads the graph
    exported(tmp_path / "build", graph=tower_graph(Tower.IMAGE))
    models = tmp_path / "models"
    arguments = [
        "render-config",
        str(tmp_path / "build"),
        "--repository",
        str(models),
        "--backend",
        "python",
    ]
    assert main(arguments) == 0
    assert main([*arguments, "--max-batch", "4", "--parameter", "intra_op_thread_count=1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{models}/clip_image_encoder version 1 (python)",
        f"{models}/clip_image_encoder version 2 (python)",
    ]
    text = (models / "clip_image_encoder" / "config.pbtxt").read_text()
    assert "max_batch_size: 4" in text
    assert '"intra_op_thread_count"' in text


@pytest.mark.parametrize(
    ("arguments", "what", "how"),
    [
        (
            ["--backend", "onnx"],
            "backend 'onnx' is unknown",
            "onnxruntime, python, openvino, tensorrt",
        ),
        (["--max-batch", "64"], "checked up to 32", "--max-batch 64"),
        (["--gpus", "0,x"], "'0,x' is not a list of GPU ids", "0,1"),
        (["--gpus", "0"], "gpu ids with instance kind auto", "--instance-kind gpu"),
        (["--parameter", "threads"], "'threads' is not KEY=VALUE", "intra_op_thread_count=4"),
        (["--version-policy", "first"], "version policy 'first'", "latest:N"),
        (["--templates", "/nowhere"], "holds no template", "config.pbtxt.j2"),
    ],
)
def test_rendering_refuses_in_two_lines(
    tmp_path: Path, capsys, arguments: list[str], what: str, how: str
):
    exported(tmp_path / "build")
    message, remedy = _fails(
        capsys,
        ["render-config", str(tmp_path / "build"), "--repository", str(tmp_path / "m"), *arguments],
        2,
    )
    assert what in message
    assert how in remedy
    assert not (tmp_path / "m").exists()


def test_a_build_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    message, remedy = _fails(capsys, ["render-config", str(tmp_path)], 2)
    assert "holds no exported model" in message
    assert "clip-deploy export" in remedy


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["serve", "nowhere"], 2, "there is no model repository at nowhere"),
        (["serve", ".", "--launcher", "podman"], 2, "launcher 'podman' is unknown"),
        (["smoke-test"], 2, "nothing to test"),
        (["bench"], 2, "nothing to measure"),
        (["bench", "nowhere"], 2, "there is no model repository at nowhere"),
        (["bench", "m", "--concurrency", "1.5"], 2, "--concurrency '1.5'"),
        (["bench", "m", "--rate", "0"], 2, "a load of 0/s"),
        (["bench", "--url", "h:1", "--compare", "b"], 2, "--compare with --url"),
        (["smoke-test", "nowhere"], 2, "there is no model repository at nowhere"),
        (["smoke-test", "--url", "localhost"], 2, "'localhost' is no gRPC address"),
        (["export", "ViT-B-32", "--tower", "audio"], 2, "tower 'audio' is unknown"),
        (["export", "ViT-B-32", "--pretrained", "random:x"], 2, "random weights with seed 'x'"),
        (["export", "ViT-B-32", "--max-batch", "0"], 2, "max batch 0"),
        (
            ["export", "ViT-B-32", "--mean", "0.5;0.5"],
            2,
            "--mean '0.5;0.5' is not a list of numbers",
        ),
    ],
)
def test_commands_refuse_in_two_lines(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, what: str
):
    message, remedy = _fails(capsys, arguments, code)
    assert what in message
    assert remedy


def test_failures_with_square_brackets_are_printed_as_they_are(
    capsys, monkeypatch: pytest.MonkeyPatch
):
    def fail(path: Path) -> None:
        raise ServerError("dims [ 3, 224 ] [bold]", remedy="pip install 'clip-deploy[export]'")

    monkeypatch.setattr("clip_deploy.repository.read", fail)
    assert _fails(capsys, ["serve", "x"], 6) == (
        "dims [ 3, 224 ] [bold]",
        "pip install 'clip-deploy[export]'",
    )


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clip_deploy.repository.read", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve", "x"])


def test_exit_codes_come_from_the_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for kind in ClipDeployError.__subclasses__():

        def fail(path: Path, kind=kind) -> None:
            raise kind("what", remedy="how")

        monkeypatch.setattr("clip_deploy.repository.read", fail)
        assert main(["serve", "x"]) == kind.exit_code
    capsys.readouterr()


def test_doctor_names_every_row_and_json_goes_to_stdout_alone(
    capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("clip_deploy.doctor._output", lambda *command: None)
    monkeypatch.setattr("clip_deploy.doctor.shutil.which", lambda name: None)
    monkeypatch.setattr("clip_deploy.servers.libpython.available", lambda: False)
    assert main(["doctor", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    findings = {finding["name"]: finding for finding in json.loads(out)}
    names = [
        "Python",
        "export",
        "client",
        "libpython",
        "embedded server",
        "GPU",
        "driver",
        "CUDA",
        "TensorRT",
        "Docker",
        "disk",
    ]
    assert all(name in findings and name in err for name in names)
    for finding in findings.values():
        assert finding["found"] or finding["remedy"]
    assert findings["Docker"]["found"] is False
    assert "clip-deploy server install" in findings["libpython"]["remedy"]
