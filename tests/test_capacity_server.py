"""Plans on a real server: its curve is measured, and a repository becomes an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_deploy import repository as repositories
from clip_deploy.bench.box import Box, read_box, serving_of
from clip_deploy.bench.costs import measure_box
from clip_deploy.bench.curve import BatchCurve
from clip_deploy.bench.subject import bench_subject
from clip_deploy.capacity.checking import check
from clip_deploy.cli import main
from clip_deploy.client import TritonInferenceClient
from clip_deploy.servers import ServerHandle
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import Tower

pytestmark = [pytest.mark.server, pytest.mark.export]


def test_a_curve_is_measured_from_the_servers_own_statistics(
    tiny_server: ServerHandle, tiny_repository: Path
):
    with TritonInferenceClient(tiny_server.grpc) as client:
        target = targets_of(client, repositories.read(tiny_repository))[0]
        subject = bench_subject(client, target, pid=tiny_server.process.pid)
        box = measure_box(subject, seconds=2.0)
    curve, serving = box.curve, box.serving
    assert (serving.max_batch, serving.queue_delay_us, serving.instances) == (8, 5000, 1)
    assert sorted(curve.times_s) == [1, 2, 3, 4, 6, 8]
    assert all(0 < min(times) <= max(times) < 5 for times in curve.times_s.values())
    assert 0 < curve.overhead_s < 5


def test_a_repository_becomes_a_plan_that_later_ones_can_start_from(
    tiny_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "capacity.json"
    arguments = ["capacity", str(tiny_repository), "--tower", "text", "--duration", "5"]
    assert main([*arguments, "--rate", "9", "--p99-ms", "5000", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["curve"]["model"] == Tower.TEXT.model_name
    assert (data["plan"]["replicas"], data["plan"]["holds"]) == (1, True)
    assert read_box(out).capacity == pytest.approx(data["capacity"])
    assert "1 box carries 9 requests/s" in capsys.readouterr().out


def test_a_prediction_is_held_against_the_server_under_load(
    tiny_server: ServerHandle, tiny_repository: Path
):
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
