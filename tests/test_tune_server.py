"""The tuner on a real server: settings go in through the load API, and what was found serves right answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clip_deploy import repository as repositories
from clip_deploy.bench.figures import Load
from clip_deploy.bench.subject import bench_subject
from clip_deploy.cli import main
from clip_deploy.client import Connection, TritonInferenceClient
from clip_deploy.errors import ServerError
from clip_deploy.servers import LAUNCHERS, ServerHandle, ServerOptions
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import Tower
from clip_deploy.triton_schema import as_json
from clip_deploy.tune import search
from clip_deploy.tune.config import difference
from clip_deploy.tune.report import ConfigFile
from clip_deploy.tune.search import Unservable
from clip_deploy.tune.serving import TunedModel, server_arguments
from clip_deploy.tune.space import Settings
from tests.interrupts import interrupted

pytest.importorskip("optuna", reason="needs optuna: pip install 'clip-deploy[tune]'")
pytestmark = pytest.mark.server

NAME = Tower.IMAGE.model_name
SLOW = 100_000  # µs; so long a delay loses to anything, whatever the machine is doing
FOUR = Load(users=4)


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image tower, waiting far too long for company."""
    path = tmp_path_factory.mktemp("tuned") / "model_repository"
    shutil.copytree(tiny_repository / NAME, path / NAME)
    config = path / NAME / "config.pbtxt"
    text = config.read_text("utf-8")
    assert "microseconds: 5000" in text
    config.write_text(text.replace("microseconds: 5000", f"microseconds: {SLOW}"), "utf-8")
    return path


@pytest.fixture(scope="module")
def server(repository: Path):
    options = ServerOptions(timeout_s=120, arguments=server_arguments(NAME))
    with LAUNCHERS["embedded"].start(repositories.read(repository), options) as handle:
        yield handle


@pytest.fixture
def served(repository: Path, server: ServerHandle) -> TunedModel:
    found = repositories.read(repository)
    config = ConfigFile.read(found).config
    return TunedModel(server.grpc, found, config, server, duration_s=0.3, warmup_s=0.1)


def test_settings_go_to_the_server_without_a_restart(served: TunedModel):
    wanted = Settings(queue_delay_us=500, instances=2, threads=1, max_batch=4)
    run = served(wanted, FOUR)
    assert run.answered > 0
    assert run.wrong == 0
    with Connection(served.url) as connection:
        config = connection.config(NAME)
    assert Settings.of(config) == wanted
    assert max(run.histogram) <= 4


def test_settings_that_the_server_refuses_fail_alone(served: TunedModel):
    with pytest.raises(Unservable, match="intra_op_thread_count is '-1'"):
        served(Settings(0, 1, -1, 8), FOUR)
    alone = served(Settings(0, 1, 0, 1), FOUR)  # a batch of one with its warm-up
    assert max(alone.histogram) == 1


def test_a_server_that_may_not_load_says_so(tiny_server):
    with Connection(tiny_server.grpc) as connection, pytest.raises(ServerError, match="explicit"):
        connection.load(NAME)


def test_what_was_found_is_written_and_serves_right_answers(
    repository: Path,
    server: ServerHandle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Begun on a server that is not ours, interrupted there, and finished on one of our own."""
    monkeypatch.setattr(search, "ROUNDS", 1)
    mine, page = tmp_path / "models", tmp_path / "page.html"
    shutil.copytree(repository, mine)
    before = ConfigFile.read(repositories.read(mine))
    with Connection(server.grpc) as connection:
        connection.load(NAME, as_json(before.config))  # whatever other tests have left there
    study = tmp_path / "s.jsonl"
    arguments = [
        *("--p99-ms", "1500", "--concurrency", "4", "--duration", "0.2"),
        *("--trials", "2", "--study", str(study), "--apply"),
        *("--json", "-", "--html", str(page)),
    ]
    with interrupted(lambda: study.read_text().count("\n") > 1):
        assert main(["tune", str(repository), "--url", server.grpc, *arguments]) == 130
    measured = study.read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert "the same command goes on from there" in err
    with Connection(server.grpc) as connection:
        assert Settings.of(connection.config(NAME)) == Settings(SLOW, 1, 0, 8), "as it was"

    assert main(["tune", str(mine), *arguments]) == 0
    assert study.read_text().startswith(measured)
    report = json.loads(capsys.readouterr().out)
    after = ConfigFile.read(repositories.read(mine))
    assert report["applied"]
    assert Settings.of(after.config).to_json() == report["winner"]["settings"]
    assert report["difference"] == difference(before.text, after.text, f"{NAME}/config.pbtxt")
    assert f"-  max_queue_delay_microseconds: {SLOW}" in report["difference"]
    assert report["winner"]["gain"] > 1.5
    assert NAME in page.read_text("utf-8")

    assert main(["lint", str(mine)]) == 0
    with TritonInferenceClient(server.grpc) as client:
        client.connection.load(NAME, as_json(after.config))
        (target,) = targets_of(client, repositories.read(mine))
        assert target.served.max_batch == after.config.max_batch_size
        bench_subject(client, target)  # raises where an answer is not torch's
