"""A real server under load: what is measured there is what was sent, and a benchmark of a sick one says so."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from clip_deploy import repository as repositories
from clip_deploy.bench import costs, measuring, watching
from clip_deploy.bench.figures import Load, Run
from clip_deploy.bench.measuring import measure
from clip_deploy.bench.reports import BenchReport
from clip_deploy.bench.subject import BenchSubject, bench_subject
from clip_deploy.cli import main
from clip_deploy.cli.serving import served
from clip_deploy.client import TritonInferenceClient
from clip_deploy.errors import CheckFailed, ServerError
from clip_deploy.progress import silent
from clip_deploy.resources import photographs_dir
from clip_deploy.servers import ServerHandle, ServerOptions
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import Tower
from tests.interrupts import interrupted

pytestmark = [pytest.mark.server, pytest.mark.export]

QUICK = ["--duration", "0.3", "--warmup", "0.1"]
TWICE = [*QUICK, "--repeats", "2"]
ONCE = [*QUICK, "--repeats", "1"]


def _subject(server: ServerHandle, repository: Path, tower: Tower = Tower.IMAGE) -> BenchSubject:
    with TritonInferenceClient(server.grpc) as client:
        targets = targets_of(client, repositories.read(repository))
        target = next(target for target in targets if target.tower is tower)
        return bench_subject(client, target, pid=server.process.pid)


@pytest.fixture
def subject(tiny_server: ServerHandle, tiny_repository: Path) -> BenchSubject:
    return _subject(tiny_server, tiny_repository)


@pytest.mark.parametrize("tower", Tower)
def test_a_closed_loop_is_answered_rightly_in_batches(
    tiny_server: ServerHandle, tiny_repository: Path, tower: Tower
):
    subject = _subject(tiny_server, tiny_repository, tower)
    run = measure(subject, Load(users=16), duration_s=0.7, warmup_s=0.2)
    assert run.answered == run.sent > 0
    assert (run.wrong, run.errors, run.overloaded, run.backlog) == (0, {}, False, ())
    rows = sum(size * count for size, count in run.histogram.items())
    assert rows == pytest.approx(run.throughput * run.seconds, rel=0.25), (
        "both sides count the same"
    )
    assert max(run.histogram) > 1
    assert 0 < run.queue_s + run.compute_s < run.latency.mean_s
    assert run.server_cores > 0
    assert run.server_memory_mb > 20
    assert run.client_cores > 0
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_an_open_loop_sends_at_its_own_rate(subject: BenchSubject):
    run = measure(subject, Load(rate=80.0), duration_s=1.1, warmup_s=0.1)
    assert run.sent == pytest.approx(88, rel=0.4)
    assert (run.answered, run.wrong, run.overloaded) == (run.sent, 0, False)
    assert len(run.backlog) == 2


def test_wrong_answers_are_counted_and_are_no_throughput(subject: BenchSubject):
    wrong = replace(subject, expected=subject.expected[::-1].copy())
    run = measure(wrong, Load(users=4), duration_s=0.3, warmup_s=0.1)
    assert run.wrong == run.answered > 0
    assert run.throughput == 0


def test_wrong_answers_fail_the_benchmark_after_its_report(
    tiny_server: ServerHandle,
    tiny_repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
):
    def permuted(*args, **kwargs) -> BenchSubject:
        found = bench_subject(*args, **kwargs)
        return replace(found, expected=found.expected[::-1].copy())

    monkeypatch.setattr("clip_deploy.bench.subject.bench_subject", permuted)
    asked = [str(tiny_repository), "--url", tiny_server.grpc, "--concurrency", "2", *ONCE]
    written = tmp_path / "bench.json"
    assert main(["bench", *asked, "--json", str(written)]) == 7
    assert json.loads(written.read_text())["curve"] is None, "nobody plans with wrong answers"
    out, err = capsys.readouterr()
    assert "answers are wrong" in out
    assert "the speed above means nothing" in err


def test_a_model_with_other_weights_is_not_measured_at_all(
    tiny_server: ServerHandle, tiny_repository: Path
):
    with TritonInferenceClient(tiny_server.grpc) as client:
        target = targets_of(client, repositories.read(tiny_repository))[0]
        reference = replace(target.reference, outputs=target.reference.outputs[::-1].copy())
        with pytest.raises(CheckFailed, match="does not give torch's answers"):
            bench_subject(client, replace(target, reference=reference))


def test_a_rate_beyond_the_server_is_an_overload_with_a_growing_queue(
    subject: BenchSubject, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measuring, "_OPEN_PATIENCE_S", 0.5)
    monkeypatch.setattr(measuring, "_MOST_IN_FLIGHT", 200)
    run = measure(subject, Load(rate=8000.0), duration_s=1.2, warmup_s=0.2)
    assert run.overloaded
    assert run.held_back
    assert run.backlog[0] < run.backlog[1]
    assert run.throughput < 0.95 * run.sent / run.seconds
    assert run.latency.greatest_s > 0.5
    again = measure(subject, Load(users=1), duration_s=0.4, warmup_s=0.1)
    assert again.latency.p50_s < 0.5, "what an overload leaves behind is not the next load's"


def test_a_server_that_dies_under_load_ends_the_benchmark(
    tiny_repository: Path, monkeypatch: pytest.MonkeyPatch
):
    """At once where it is ours, and after some silence where nothing is known of its process."""
    monkeypatch.setattr(watching, "_GONE_S", 1.0)
    found, complaints = repositories.read(tiny_repository), {}
    with (
        pytest.raises(ServerError, match="Triton ended with code -9"),
        served("embedded", found, ServerOptions(timeout_s=120), silent) as server,
        ThreadPoolExecutor() as pool,
    ):
        subject = _subject(server, tiny_repository)
        runs = {
            pid: pool.submit(
                measure, replace(subject, pid=pid), Load(users=4), duration_s=60.0, warmup_s=0.2
            )
            for pid in (subject.pid, None)
        }
        time.sleep(0.5)
        models = psutil.Process(server.process.pid).children()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(5)
        for pid, run in runs.items():
            complaints[pid] = run.exception(timeout=60)
        raise complaints[subject.pid]
    ours, theirs = map(str, complaints.values())
    assert "ended under load" in ours
    assert "gave no answer" in theirs
    assert psutil.wait_procs(models, 5)[1] == [], "no process of a model is left behind"


def test_an_interrupt_ends_the_benchmark_and_its_server(
    tiny_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "server.log"
    asked = ["--concurrency", "4", "--duration", "60", "--log", str(log)]
    before = psutil.Process().children()
    with interrupted(lambda: "HTTPService" in log.read_text(), after_s=0.5):
        assert main(["bench", str(tiny_repository), *asked]) == 130
    assert "4 users" not in capsys.readouterr().out
    assert psutil.Process().children() == before, "no server is left behind"


def test_a_benchmark_reports_to_everybody(
    tiny_server: ServerHandle,
    tiny_repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
):
    monkeypatch.setattr(costs, "_WARMUP_S", 0.3, raising=False)
    asked = ["--concurrency", "1,4", "--rate", "30", *TWICE, "--html", str(tmp_path / "b.html")]
    written = ["--json", str(tmp_path / "bench.json")]
    url = ["--url", tiny_server.grpc]
    assert main(["bench", str(tiny_repository), *url, *asked, *written]) == 0
    out, err = capsys.readouterr()
    assert "images per second at 4 users" in out
    assert "30/s, 2 of 2:" in err
    report = BenchReport.read(tmp_path / "bench.json")
    assert [str(each.load) for each in report.loads] == ["1 user", "4 users", "30/s"]
    assert {len(each.repeats) for each in report.loads} == {2}
    assert report.subject["max batch"] == "8"
    assert report.subject["queue delay"] == "5 ms"
    assert "<svg" in (tmp_path / "b.html").read_text()
    assert report.curve.model == Tower.IMAGE.model_name
    assert report.curve.serving.max_batch == 8
    places = ["--from", str(tmp_path / "bench.json"), "--rate", "9", "--p99-ms", "5000"]
    assert main(["capacity", *places]) == 0
    assert "1 box carries 9 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize("tower", ["image", "text"])
def test_pictures_of_the_users_own_are_held_against_the_model_alone(
    tiny_server: ServerHandle, capsys, tower: str
):
    places = ["--url", tiny_server.grpc, "--images", str(photographs_dir()), "--tower", tower]
    asked = ["--concurrency", "4", *ONCE, "--no-curve", "--json", "-"]
    assert main(["bench", *places, *asked]) == 0
    report = BenchReport.from_json(json.loads(capsys.readouterr().out))
    assert report.settings.inputs == 10
    assert report.settings.inputs_are == "inputs of your own, in turn"
    assert report.wrong == 0
    assert report.curve is None
    assert report.loads[0].repeats[0].server_cores is None


def test_two_repositories_are_measured_in_turn(
    tiny_server: ServerHandle,
    tiny_repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
):
    """One server stands for both."""
    module = importlib.import_module(
        "clip_deploy.cli.bench"
    )  # the package has a function of that name
    monkeypatch.setattr(module, "served", lambda *_: nullcontext(tiny_server))
    places = [str(tiny_repository), "--compare", str(tiny_repository)]
    written = ["--json", str(tmp_path / "c.json")]
    assert main(["bench", *places, "--concurrency", "4", *TWICE, *written]) == 0
    out, err = capsys.readouterr()
    order = [line[0] for line in err.splitlines() if "4 users" in line]
    assert order == ["A", "B", "A", "B"]
    assert "B ÷ A" in out
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["kind"] == "comparison"
    assert 0.1 < data["ratios"][0]["throughput"]["median"] < 10
