"""Loads and what is made of them, with no server: a fake one answers when and what it is told to."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from clip_deploy.bench.box import Box, read_box
from clip_deploy.bench.counting import Requests, Served, each_second
from clip_deploy.bench.curve import BatchCurve
from clip_deploy.bench.figures import Latency, Load, Run
from clip_deploy.bench.load import (
    Caller,
    Judge,
    Ledger,
    Window,
    closed_loop,
    open_loop,
    poisson,
    together,
)
from clip_deploy.bench.measuring import measure
from clip_deploy.bench.reports import (
    BenchReport,
    Comparison,
    LoadResult,
    Settings,
    Spread,
)
from clip_deploy.bench.stored import SCHEMA
from clip_deploy.bench.watching import watch
from clip_deploy.errors import ConfigError, ServerError, ServerUnavailable
from clip_deploy.report.loads import headline, remarks, table, verdict
from clip_deploy.spec import TOLERANCES, Precision, ServingSpec, Tower

LIMITS = TOLERANCES[Precision.FP32, Tower.IMAGE]
EXPECTED = np.eye(4, 16, dtype=np.float32)
WINDOW = Window(0.05, 0.35, 1.0)


async def right(row: int) -> bytes:
    await asyncio.sleep(0.005)
    return EXPECTED[row].tobytes()


def put(send, load: Load, window: Window = WINDOW, most: int = 100) -> Ledger:
    """A load on a fake server."""

    async def run() -> Ledger:
        loop = asyncio.get_running_loop()
        zero = loop.time()
        ledger = Ledger(Judge(EXPECTED, LIMITS), window, lambda: loop.time() - zero)
        call = Caller(send, ledger, len(EXPECTED))
        if load.users:
            putting = closed_loop(call, load.users)
        else:
            putting = open_loop(call, poisson(load.rate, window.give_up_s, 0), most)
        await together(putting, watch(ledger, None, "fake", 0.01))
        ledger.judge.close()
        return ledger

    return asyncio.run(run())


def test_each_user_waits_for_an_answer_before_asking_again():
    busy, most = 0, 0

    async def send(row: int) -> bytes:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        answer = await right(row)
        busy -= 1
        return answer

    requests = Requests.of(put(send, Load(users=3)))
    assert most == 3
    assert requests.answered[requests.started_in(WINDOW)].all()
    assert not requests.wrong.any()


def test_an_open_loop_waits_for_no_answer():
    """Twenty requests per second to a server that needs a second for each: they overlap."""
    busy, most = 0, 0

    async def send(row: int) -> bytes:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.4)
        busy -= 1
        return EXPECTED[row].tobytes()

    put(send, Load(rate=50.0))
    assert most > 10


@pytest.mark.parametrize("most", [1000, 2])
def test_latency_counts_from_the_intended_start(most: int):
    """A server that stalls holds up everybody who should have come meanwhile, sent or not."""
    window, began = Window(0.0, 0.8, 3.0), []

    async def send(row: int) -> bytes:
        loop = asyncio.get_running_loop()
        began.append(loop.time())
        if (left := began[0] + 0.5 - loop.time()) > 0:
            await asyncio.sleep(left)
        return EXPECTED[row].tobytes()

    latency = Requests.of(put(send, Load(rate=200.0), window, most)).latency(window)
    assert latency.p90_s > 0.35, (
        "most of those that came in the first half second waited for its end"
    )
    assert latency.p50_s > 0.1


def test_a_request_that_was_given_up_counts_with_its_age():
    requests = Requests(
        np.array([1.0, 1.5, 1.9]),
        np.array([1.1, np.nan, 2.0]),
        np.array([1, 0, 1], bool),
        np.zeros(3, bool),
    )
    assert requests.latency(Window(1.0, 2.0, 12.0)).greatest_s == pytest.approx(10.5)


def test_a_request_that_failed_has_no_latency_of_an_answer():
    requests = Requests(
        np.array([1.0, 1.0]), np.array([1.2, 1.001]), np.array([1, 0], bool), np.zeros(2, bool)
    )
    assert requests.latency(Window(1.0, 2.0, 3.0)).p50_s == pytest.approx(0.2)


def test_what_came_before_the_measured_time_is_not_counted():
    ledger = put(right, Load(users=2))
    requests = Requests.of(ledger)
    assert requests.starts_s.min() < WINDOW.begin_s
    assert 0 < requests.started_in(WINDOW).sum() < len(requests.starts_s)


@pytest.mark.parametrize(
    "answer",
    [
        EXPECTED[1].tobytes(),
        (EXPECTED[0] * 1.1).astype(np.float32).tobytes(),
        np.full(16, np.nan, np.float32).tobytes(),
        np.zeros(16, np.float32).tobytes(),
        b"",
        EXPECTED[0].tobytes() * 2,
    ],
    ids=["another row", "longer", "not a number", "nothing", "empty", "two rows"],
)
def test_a_wrong_answer_is_found_among_right_ones(answer: bytes):
    judge = Judge(EXPECTED, LIMITS)
    for number in range(600):
        judge.add(number, number % 4, EXPECTED[number % 4].tobytes() if number != 300 else answer)
    judge.close()
    assert judge.wrong == [300]


def test_errors_are_counted_by_what_they_say():
    calls = 0

    async def send(row: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise ServerError("the queue is full", remedy="wait")
        return await right(row)

    ledger = put(send, Load(users=2))
    requests = Requests.of(ledger)
    measured = requests.started_in(WINDOW)
    assert set(ledger.errors) == {"the queue is full"}
    assert ledger.errors.total() == (measured & ~requests.answered).sum() > 0


def test_a_server_that_refuses_connections_ends_the_run():
    async def send(row: int) -> bytes:
        raise ServerUnavailable("no server answers", remedy="start one")

    with pytest.raises(ServerError, match=r"no answer for 2\.\d s under load: no server answers"):
        put(send, Load(users=2), Window(0, 60, 90))


def test_a_server_that_only_keeps_us_waiting_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clip_deploy.bench.watching._SILENT_S", 0.3)

    async def send(row: int) -> bytes:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(ServerError, match="gave no answer"):
        put(send, Load(rate=50.0), Window(0, 60, 90))


def test_arrivals_are_random_and_the_same_for_a_seed():
    times = poisson(100, 50, seed=3)
    assert (times == poisson(100, 50, seed=3)).all()
    assert len(times) == pytest.approx(5000, rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "as Poisson arrivals are"
    assert times.max() < 50


# A queue that grows


def _steady(answered_per_second: float, sent_per_second: float = 100.0) -> Requests:
    """Ten seconds of a server that answers in order, at its own pace."""
    starts = np.arange(0, 10, 1 / sent_per_second)
    ends = np.maximum(starts + 0.01, np.arange(len(starts)) / answered_per_second)
    return Requests(starts, ends, np.ones(len(starts), bool), np.zeros(len(starts), bool))


@pytest.mark.parametrize(
    ("pace", "overload"),
    [(200.0, False), (100.0, False), (97.0, False), (90.0, True), (10.0, True)],
)
def test_an_overload_is_arrivals_that_outrun_answers(pace: float, overload: bool):
    assert _steady(pace).outran(Window(0.0, 10.0, 20.0)) is overload


def test_a_stall_that_the_server_makes_up_for_is_no_overload():
    requests = _steady(200.0)
    requests.ends_s[300:500] = np.maximum(requests.ends_s[300:500], 5.2)
    assert not requests.outran(Window(0.0, 10.0, 20.0))


def test_a_backlog_counts_what_has_no_answer_yet():
    requests = Requests(
        np.array([0.0, 0.5, 1.5]),
        np.array([0.6, np.nan, 2.5]),
        np.array([1, 0, 1], bool),
        np.zeros(3, bool),
    )
    assert requests.backlog(each_second(Window(0.0, 3.0, 9.0))).tolist() == [1, 2, 1]


def test_the_servers_counters_are_differences():
    def statistics(sizes: dict[int, int], count: int, ns: int) -> SimpleNamespace:
        part = SimpleNamespace(count=count, ns=ns)
        rows = [
            SimpleNamespace(batch_size=s, compute_infer=SimpleNamespace(count=c))
            for s, c in sizes.items()
        ]
        parts = dict.fromkeys(("queue", "compute_input", "compute_infer", "compute_output"), part)
        return SimpleNamespace(batch_stats=rows, inference_stats=SimpleNamespace(**parts))

    served = Served.between(
        statistics({1: 5, 8: 1}, 13, 10**9), statistics({1: 5, 8: 3, 4: 1}, 33, 3 * 10**9)
    )
    assert served == Served({4: 1, 8: 2}, 0.1, pytest.approx(0.3))


def test_a_run_that_cannot_be_kept_is_refused():
    with pytest.raises(ConfigError, match="requests"):
        measure(None, Load(rate=1e6), duration_s=10, warmup_s=1)
    with pytest.raises(ConfigError, match="a run of 0 s"):
        measure(None, Load(users=1), duration_s=0, warmup_s=1)


# Reports


def run(load: Load, throughput: float, p50_s: float = 0.01, **changes) -> Run:
    values = {
        "load": load,
        "seconds": 10.0,
        "sent": 100,
        "answered": 100,
        "wrong": 0,
        "errors": {},
        "throughput": throughput,
        "latency": Latency(p50_s, p50_s, 2 * p50_s, 3 * p50_s, 4 * p50_s, 5 * p50_s),
        "histogram": {1: 4, 8: 12},
        "queue_s": 0.002,
        "compute_s": 0.005,
        "server_cores": 1.5,
        "server_memory_mb": 150.0,
        "client_cores": 0.1,
    }
    return Run(**(values | changes))  # fmt: skip


def report(*throughputs: float, name: str = "ViT-B-32", **changes) -> BenchReport:
    users, fast = Load(users=8), Load(rate=500.0)
    closed = LoadResult(users, tuple(run(users, each, **changes) for each in throughputs))
    over = run(
        fast,
        50.0,
        2.0,
        overloaded=True,
        held_back=True,
        backlog=(400, 900),
        errors={"late": 3},
        answered=60,
    )
    subject = dict.fromkeys(
        ("weights", "precision", "input", "backend", "max batch", "queue delay"), "x"
    )
    subject |= {
        "model": name,
        "tower": "image",
        "instances": "1",
        "parameters": "none",
        "server": "Triton",
    }
    machine = {"CPU": "a CPU", "cores": "2 of 2", "memory": "16 GiB"}
    settings = Settings(10.0, 2.0, len(throughputs), 10, "real inputs")
    return BenchReport(
        "2026-01-01T00:00:00+00:00", machine, subject, settings, (closed, LoadResult(fast, (over,)))
    )


def test_a_report_survives_its_file(tmp_path: Path):
    path = tmp_path / "bench.json"
    curve = BatchCurve({1: (0.02, 0.03), 8: (0.09,)}, overhead_s=0.001, stolen_s=0.0)
    box = Box("clip_image_encoder", ServingSpec(max_batch=8, queue_delay_us=5000), curve)
    for found in (report(40.0, 42.0, 41.0), replace(report(40.0), curve=box)):
        path.write_text(json.dumps(found.to_json()))
        assert BenchReport.read(path) == found
    assert read_box(path) == box, "capacity --from reads what bench --json wrote"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no benchmark"),
        ('{"title": "smoke test"}', "holds no benchmark"),
        (json.dumps({"kind": "bench", "schema": SCHEMA - 1}), f"has schema {SCHEMA - 1}"),
        (json.dumps({"kind": "bench", "schema": SCHEMA}), "is damaged"),
        (json.dumps({"kind": "comparison", "schema": SCHEMA}), "a comparison, not a bench"),
        (
            json.dumps(report(1.0).to_json() | {"loads": [{"load": {"users": 0}, "repeats": []}]}),
            "a load of",
        ),
    ],
)
def test_a_damaged_or_older_file_is_refused(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        BenchReport.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        BenchReport.read(tmp_path / "absent.json")


def test_noise_is_shown_as_the_range_of_the_repeats():
    found = report(40.0, 42.0, 41.0)
    assert found.loads[0].throughput == Spread(41.0, 40.0, 42.0)
    assert found.loads[0].mean_batch == pytest.approx(100 / 16)
    text = _printed(table(found))
    assert "41.0 (40.0–42.0)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_headline_leaves_out_what_the_server_did_not_carry():
    assert headline(report(41.0)).startswith(
        "41.0 images per second at 8 users: half of them within 10 ms"
    )


def test_what_went_wrong_is_said_beside_the_table():
    closed, over = report(41.0, wrong=2, client_cores=0.95).loads
    assert remarks(closed)[0] == "2 of 100 answers are wrong"
    assert "load generator was busy" in remarks(closed)[1]
    assert [each.split(":")[0] for each in remarks(over)[:1]] == ["overload"]
    assert "3 × late" in remarks(over)
    assert "37 of 100 requests were given up; they count with their age" in remarks(over)


def test_ratios_are_of_repeats_that_ran_in_turn():
    """Both are twice as fast in the second repeat: the machine was, and the ratio is not."""
    found = Comparison(report(20.0, 40.0), report(30.0, 60.0))
    assert found.ratios[0].throughput == Spread(1.5, 1.5, 1.5)
    assert verdict(found) == "B is faster than A, at 8 users: B ÷ A is 1.50."
    assert found.to_json()["ratios"][0]["throughput"]["median"] == 1.5


def test_a_difference_within_the_noise_is_no_difference():
    found = Comparison(report(40.0, 40.0, 40.0), report(38.0, 41.0, 42.0))
    assert verdict(found).startswith("No difference in throughput that the repeats agree on")


def test_one_repeat_is_no_verdict():
    found = Comparison(report(40.0), report(20.0))
    assert verdict(found).startswith("One measurement of each tells no difference from noise")


def test_a_ratio_of_nothing_is_not_a_number_but_none():
    found = Comparison(report(40.0), report(0.0, latency=None))
    assert found.ratios[0].throughput is None
    assert found.ratios[0].p50 is None


def _printed(renderable) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


# The page


@pytest.mark.processes  # matplotlib asks for the system's fonts, once per machine
def test_the_page_needs_no_network():
    from clip_deploy.report.load_page import comparison_page, page

    for text in (
        page(report(41.0, 42.0)),
        comparison_page(Comparison(report(1.0), report(2.0)), "AB"),
    ):
        assert "http" not in text
        assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", text)
        assert text.count("<svg") >= 4


@pytest.mark.processes  # matplotlib asks for the system's fonts, once per machine
def test_the_page_escapes_what_it_is_told():
    from clip_deploy.report.load_page import comparison_page, page

    nasty = "<script>alert('$x_1$')</script>"
    found = report(41.0, name=nasty, errors={nasty: 1})
    for text in (page(found), comparison_page(Comparison(found, found), (nasty, nasty))):
        assert "<script" not in text
        assert "&lt;script&gt;" in text


@pytest.mark.processes  # matplotlib asks for the system's fonts, once per machine
def test_wrong_answers_head_the_page():
    from clip_deploy.report.load_page import page

    assert "2 of 160 answers under load were wrong" in page(report(41.0, wrong=2))


@pytest.mark.processes  # matplotlib asks for the system's fonts, once per machine
def test_a_page_of_nothing_but_overload_has_its_charts():
    from clip_deploy.report.load_page import page

    found = report(41.0, overloaded=True, backlog=(1, 5))
    assert "Every load was beyond this server" in page(found)


# A folder as it was


@pytest.mark.processes
def test_a_folder_of_a_git_revision_is_what_it_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from clip_deploy.cli.revisions import folder_of

    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.email=a@b", "-c", "user.name=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.pbtxt").write_text("old")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "old"], check=True)
    (tmp_path / "models" / "config.pbtxt").write_text("new")
    with folder_of("HEAD:models") as folder:
        assert (folder / "config.pbtxt").read_text() == "old"
    assert not folder.exists()
    with folder_of("models") as folder:
        assert (folder / "config.pbtxt").read_text() == "new"
    for text in ("HEAD:absent", "nothing:models", "--output=x:models"):
        with pytest.raises(ConfigError, match="there is no"), folder_of(text):
            pass
