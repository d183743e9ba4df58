"""Plans on a real server: its curve is measured, and a repository becomes an answer."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from clip_deploy import repository as repositories
from clip_deploy.bench import costs, others
from clip_deploy.bench.box import Box, read_box, serving_of
from clip_deploy.bench.curve import BatchCurve
from clip_deploy.bench.subject import bench_subject
from clip_deploy.capacity import checking, planning
from clip_deploy.capacity.checking import check
from clip_deploy.cli import main
from clip_deploy.client import TritonInferenceClient
from clip_deploy.servers import ServerHandle
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import Tower

SLEEPS = """

class TritonPythonModel(TritonPythonModel):
    def embed(self, inputs):
        import time

        time.sleep(0.010 + 0.010 * sum(map(len, inputs)))
        return super().embed(inputs)
"""

pytestmark = [pytest.mark.server, pytest.mark.export]


@pytest.fixture
def sleeping(tiny_repository: Path, tmp_path: Path) -> Path:
    """The tiny repository, whose text model takes 10 ms and 10 ms more for each row."""
    models = tmp_path / "models"
    shutil.copytree(tiny_repository, models)
    with (models / Tower.TEXT.model_name / "1" / "model.py").open("a", encoding="utf-8") as code:
        code.write(SLEEPS)
    return models


def test_a_repository_becomes_a_plan_that_later_ones_can_start_from(
    sleeping: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(costs, "_WARMUP_S", 0.5)
    monkeypatch.setattr(others, "_ATTEMPTS", 1)
    monkeypatch.setattr(planning, "forecast", partial(planning.forecast, requests=1000))
    out = tmp_path / "capacity.json"
    arguments = ["capacity", str(sleeping), "--tower", "text", "--duration", "5"]
    assert main([*arguments, "--rate", "9", "--p99-ms", "5000", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["curve"]["model"] == Tower.TEXT.model_name
    assert (data["plan"]["replicas"], data["plan"]["holds"]) == (1, True)
    assert "1 box carries 9 requests/s" in capsys.readouterr().out
    box = read_box(out)
    curve, serving = box.curve, box.serving
    assert box.capacity == pytest.approx(data["capacity"])
    assert (serving.max_batch, serving.queue_delay_us, serving.instances) == (8, 5000, 1)
    assert sorted(curve.times_s) == [1, 2, 3, 4, 6, 8]
    assert all(0.010 * size < curve.mean_s(size) < 5 for size in curve.times_s)
    assert 0 < curve.overhead_s < 5


def test_a_prediction_is_held_against_the_server_under_load(
    tiny_server: ServerHandle, tiny_repository: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checking, "_WARMUP_S", 0.5)
    with TritonInferenceClient(tiny_server.grpc) as client:
        target = targets_of(client, repositories.read(tiny_repository))[0]
        serving = serving_of(client.connection.config(target.name))
        slow = BatchCurve({1: (0.1,), 8: (0.1,)}, 0.0, 0.0)  # as it is not: 80 requests/s at most
        box = Box(target.name, serving, slow)
        (compared,) = check(
            bench_subject(client, target), box, lambda: box, levels=[0.5], duration_s=1.0
        )
    assert compared.measured.load.rate == pytest.approx(40)
    assert compared.measured.wrong == 0
    assert compared.p99_error > 0.2  # the curve claims far more than the tiny model takes
    assert not compared.holds
    assert json.dumps(compared.to_json())
