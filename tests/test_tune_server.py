"""The tuner on a real server: settings go in through the load API, and what was found serves right answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from clip_deploy import repository as repositories
from clip_deploy.bench.figures import Load
from clip_deploy.bench.subject import bench_subject
from clip_deploy.cli import main
from clip_deploy.client import Connection, TritonInferenceClient
from clip_deploy.errors import ServerError
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import Tower
from clip_deploy.triton_schema import as_json
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
def served(repository: Path, server) -> TunedModel:
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
    served(Settings(0, 1, 0, 8), FOUR)
    with pytest.raises(Unservable, match="intra_op_thread_count is '-1'"):
        served(Settings(0, 1, -1, 8), FOUR)
    assert served(Settings(0, 1, 0, 8), FOUR).answered > 0


def test_a_batch_of_one_with_its_warmup_is_servable(served: TunedModel):
    assert max(served(Settings(0, 1, 0, 1), FOUR).histogram) == 1


def test_a_server_that_is_not_ours_gets_its_config_back(served: TunedModel):
    theirs = replace(served, handle=None)
    with pytest.raises(KeyboardInterrupt), theirs.restored():
        theirs(Settings(0, 1, 0, 2), FOUR)
        raise KeyboardInterrupt
    with Connection(served.url) as connection:
        assert Settings.of(connection.config(NAME)) == Settings(SLOW, 1, 0, 8)


def test_a_server_that_may_not_load_says_so(tiny_server):
    with Connection(tiny_server.grpc) as connection, pytest.raises(ServerError, match="explicit"):
        connection.load(NAME)


def test_what_was_found_is_written_and_serves_right_answers(
    repository: Path, served: TunedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Begun, interrupted, and begun again."""
    mine, page = tmp_path / "models", tmp_path / "page.html"
    shutil.copytree(repository, mine)
    before = ConfigFile.read(repositories.read(mine))
    study = tmp_path / "s.jsonl"
    arguments = [
        *("tune", str(mine), "--p99-ms", "1500", "--concurrency", "4", "--duration", "0.3"),
        *("--trials", "2", "--study", str(study), "--apply"),
        *("--json", "-", "--html", str(page)),
    ]
    with interrupted(lambda: study.read_text().count("\n") > 1):
        assert main(arguments) == 130
    measured = study.read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert "the same command goes on from there" in err
    assert ConfigFile.read(repositories.read(mine)) == before

    assert main(arguments) == 0
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
    with TritonInferenceClient(served.url) as client:
        client.connection.load(NAME, as_json(after.config))
        (target,) = targets_of(client, repositories.read(mine))
        assert target.served.max_batch == after.config.max_batch_size
        bench_subject(client, target)  # raises where an answer is not torch's
