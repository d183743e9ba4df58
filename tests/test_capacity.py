"""The simulated batcher against what can be computed by hand, and the plans that are made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.bench.box import Box, read_box, serving_of
from clip_deploy.bench.counting import Requests
from clip_deploy.bench.curve import BatchCurve, joined
from clip_deploy.bench.pace import began_s, divided, pace_of
from clip_deploy.capacity import planning
from clip_deploy.capacity.batcher import simulate, simulate_users
from clip_deploy.capacity.clocks import PacedClock
from clip_deploy.capacity.planning import arrivals, forecast, forecast_users, greatest_rate, plan
from clip_deploy.cli import main
from clip_deploy.errors import ConfigError
from clip_deploy.spec import ServingSpec
from clip_deploy.triton_schema import ModelConfig

# 10 ms and 10 ms more for each row, as a model on a CPU; nothing else costs anything.
CURVE = BatchCurve({n: (0.010 + 0.010 * n,) for n in (1, 8)}, overhead_s=0.0, stolen_s=0.0)
SERVING = ServingSpec(max_batch=8, queue_delay_us=5000)
GREEDY = replace(SERVING, queue_delay_us=0)
SINGLE = ServingSpec(max_batch=1, queue_delay_us=0)
BOX = Box("model", SERVING, CURVE)


@pytest.fixture
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the requests: a test of a decision needs no smooth figures."""
    monkeypatch.setattr(planning, "forecast", partial(forecast, requests=2000))


short = pytest.mark.usefixtures("short_simulations")


def _poisson(rate: float, requests: int = 60_000) -> np.ndarray:
    return arrivals(rate, requests, seed=3)


def _throughput(run) -> float:
    return len(run.start_s) / (run.batch_start_s[-1] + run.busy_s[-1])


def _sizes(run) -> list[int]:
    return run.batch_size.tolist()


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_without_batching_the_mean_wait_is_that_of_an_m_d_1_queue(load):
    run = simulate(SINGLE, CURVE, _poisson(load / 0.020))
    expected_s = 0.020 * load / (2 * (1 - load))
    assert run.latency_s.mean() - 0.020 == pytest.approx(expected_s, rel=0.05)


def test_many_users_get_full_batches_and_the_throughput_that_these_give():
    run = simulate_users(SERVING, CURVE, users=40, requests=4000)
    assert set(_sizes(run)[5:-5]) == {8}
    assert _throughput(run) == pytest.approx(8 / 0.090, rel=0.01)


def test_a_lone_request_waits_exactly_the_delay():
    run = simulate(SERVING, CURVE, np.array([1.0]))
    assert run.latency_s.tolist() == pytest.approx([0.005 + 0.020], abs=2e-6)


def test_without_a_delay_a_lone_request_waits_for_nothing():
    assert simulate(GREEDY, CURVE, np.array([1.0])).latency_s.tolist() == pytest.approx([0.020])


def test_a_full_batch_leaves_before_the_delay_is_over():
    run = simulate(SERVING, CURVE, np.full(8, 1.0))
    assert _sizes(run) == [8]
    assert run.latency_s.max() == pytest.approx(0.090)


def test_the_delay_counts_from_the_oldest_request():
    run = simulate(SERVING, CURVE, np.array([1.0, 1.004]))
    assert _sizes(run) == [2]
    assert run.latency_s.tolist() == pytest.approx([0.035, 0.031], abs=2e-6)


def test_a_preferred_size_leaves_at_once_and_others_after_the_delay():
    serving = replace(SERVING, preferred_batch_sizes=(4, 8))
    assert simulate(serving, CURVE, np.full(4, 1.0)).latency_s.max() == pytest.approx(0.050)
    assert simulate(serving, CURVE, np.full(3, 1.0)).latency_s.max() == pytest.approx(0.045)


def test_without_a_delay_whatever_came_while_a_batch_ran_goes_together():
    run = simulate(GREEDY, CURVE, np.array([0.0, 0.001, 0.002, 0.019]))
    assert _sizes(run) == [1, 3]


def test_with_a_delay_requests_that_come_while_a_batch_runs_may_wait_for_the_next_but_one():
    # The second waits as a payload of its own, and the batcher sleeps: nothing wakes it before the first batch ends.
    # Where it then happens to be faster than the instance, the others join.
    starts = np.array([0.0, 0.006, 0.012, 0.013, 0.014])
    runs = {tuple(_sizes(simulate(SERVING, CURVE, starts, seed=seed))) for seed in range(30)}
    assert runs == {(1, 1, 3), (1, 4)}


def test_two_instances_carry_twice_as_much():
    two = Box("model", replace(SERVING, instances=2), CURVE)
    assert two.capacity == pytest.approx(2 * BOX.capacity)
    run = simulate_users(two.serving, CURVE, users=80, requests=8000)
    assert _throughput(run) == pytest.approx(two.capacity, rel=0.01)
    one_each = simulate(replace(SINGLE, instances=2), CURVE, np.array([0.0, 0.0, 0.0]))
    assert one_each.latency_s.tolist() == pytest.approx([0.020, 0.020, 0.040])


def test_a_single_user_is_always_alone():
    each = forecast_users(BOX, 1, seeds=1, requests=500)
    assert each.throughput == pytest.approx(1 / 0.025, rel=0.01)
    assert each.histogram == {1: 1.0}


def test_a_full_queue_refuses_and_an_expired_request_is_refused():
    limited = replace(SERVING, max_queue_size=4)
    run = simulate(limited, CURVE, np.full(100, 1.0))
    assert np.isnan(run.latency_s).sum() >= 100 - 8
    hurried = replace(SERVING, queue_timeout_us=30_000)
    late = simulate(hurried, CURVE, np.linspace(0, 0.1, 60))
    assert 0 < np.isnan(late.latency_s).sum() < 60
    assert np.nanmax(late.latency_s) < 0.030 + 0.090 + 0.001


def test_requests_that_share_the_cores_make_batches_longer():
    shared = replace(CURVE, stolen_s=0.005)
    run = simulate(SINGLE, shared, np.array([0.0, 0.001, 0.002]))
    assert run.latency_s[0] == pytest.approx(0.020 + 2 * 0.005)
    box = Box("model", SERVING, shared)
    assert box.capacity == pytest.approx(8 / (0.090 + 8 * 0.005))
    full = simulate_users(SERVING, shared, users=40, requests=4000)
    assert _throughput(full) == pytest.approx(box.capacity, rel=0.02)


def test_the_overhead_is_added_to_every_latency():
    slow = replace(CURVE, overhead_s=0.1)
    assert simulate(GREEDY, slow, np.array([0.0])).latency_s[0] == pytest.approx(0.120)


def test_every_request_is_answered_once_and_the_same_seed_gives_the_same():
    noisy = replace(CURVE, times_s={1: (0.015, 0.02, 0.03), 8: (0.08, 0.09, 0.1)})
    starts = _poisson(60, 5000)
    first, again, other = (simulate(SERVING, noisy, starts, seed=seed) for seed in (1, 1, 2))
    assert first.batch_size.sum() == 5000
    assert not np.isnan(first.latency_s).any()
    assert np.array_equal(first.latency_s, again.latency_s)
    assert not np.array_equal(first.latency_s, other.latency_s)


def test_a_machine_that_stalls_stalls_whatever_runs_and_goes_on_where_it_was():
    clock = PacedClock(
        ((0.9, 1.0), (0.1, 0.1)), offset_s=0.0
    )  # of each second, 0.1 at a tenth of the speed
    assert clock.end(0, 500_000_000) == 500_000_000
    assert clock.end(800_000_000, 105_000_000) == 950_000_000
    assert clock.end(800_000_000, 1_010_000_000) == pytest.approx(1_900_000_000)
    assert clock.end(3_800_000_000, 105_000_000) == pytest.approx(3_950_000_000)


def test_a_long_slow_spell_makes_a_longer_queue_than_as_much_slowness_in_short_ones():
    starts = _poisson(45, 8000)
    long, brief = (
        simulate(SERVING, CURVE.paced(((4 * n, 1.2), (n, 0.2)), 0.0), starts) for n in (2.0, 0.1)
    )
    assert np.percentile(long.latency_s, 99) > 2 * np.percentile(brief.latency_s, 99)


def test_the_pace_goes_into_the_times_on_average_and_a_full_server_answers_as_many():
    curve = replace(CURVE, stolen_s=0.002).paced(((3.0, 0.5), (1.0, 0.9)), overhead_s=0.004)
    assert (curve.mean_s(8), curve.stolen_s) == (pytest.approx(0.15), pytest.approx(0.002 / 0.6))
    assert curve.overhead_s == 0.004
    assert BatchCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve
    run = simulate_users(SERVING, curve, users=40, requests=6000)
    assert _throughput(run) == pytest.approx(Box("model", SERVING, curve).capacity, rel=0.02)
    twice = joined([curve, curve.paced(((1.0, 0.5),), 0.004)])
    speeds = [speed for _, speed in twice.pace]
    assert speeds[0] / speeds[2] == pytest.approx(2 * 0.5 / 0.6)  # the second was half as fast
    assert joined([curve, CURVE]).pace == ()


def _answered(run) -> Requests:
    """A simulated run, as a load generator sees it that gets the answers of a batch one after another."""
    ends = (
        run.start_s + run.latency_s + np.random.default_rng(0).uniform(0, 0.001, len(run.start_s))
    )
    yes = np.ones(len(ends), bool)
    return Requests(run.start_s, ends, yes, ~yes)


def test_the_pace_is_read_from_the_answers_of_a_load():
    spells = ((4.0, 1.2), (1.0, 0.2))
    run = simulate(
        SERVING, replace(CURVE, overhead_s=0.003).paced(spells, 0.003), _poisson(55, 4000)
    )
    histogram = dict(zip(*(n.tolist() for n in np.unique(run.batch_size, return_counts=True))))
    read = pace_of(_answered(run), histogram, BOX, overhead_s=0.0035)
    lasted_s, speed = np.array(read).T
    assert lasted_s.sum() == pytest.approx(run.start_s[-1], rel=0.01)
    slow_s = lasted_s[speed < 0.5].sum() / lasted_s.sum()
    assert slow_s == pytest.approx(0.2, abs=0.04)
    assert np.median(speed[speed > 0.5]) == pytest.approx(1.2, rel=0.03)


def test_a_run_at_its_own_pace_moment_by_moment_is_the_run_again():
    spells, starts = ((9.0, 1.2), (1.0, 0.2)), _poisson(55, 4000)
    run = simulate(SERVING, CURVE.paced(spells, 0.003), starts, offset_s=4.0)
    requests = _answered(run)
    histogram = dict(zip(*(n.tolist() for n in np.unique(run.batch_size, return_counts=True))))
    pace = pace_of(requests, histogram, BOX, overhead_s=0.0035)
    began = began_s(pace, requests)
    again, elsewhere = (
        simulate(SERVING, CURVE.paced(pace, 0.0035), starts, seed=5, offset_s=offset_s).latency_s
        for offset_s in (-began, 5.0 - began)
    )
    assert np.corrcoef(run.latency_s, again)[0, 1] > 0.95
    assert np.percentile(again, 99) == pytest.approx(np.percentile(run.latency_s, 99), rel=0.03)
    assert np.corrcoef(run.latency_s, elsewhere)[0, 1] < 0.3


def test_no_pace_is_read_where_the_server_counted_other_batches_than_can_be_told_apart():
    run = simulate(SERVING, CURVE, _poisson(55, 1000))
    count = len(run.batch_size)
    assert pace_of(_answered(run), {1: count}, BOX, overhead_s=0.0) == ()


def test_answers_of_two_batches_that_a_stall_held_back_together_are_still_as_much_work():
    run = simulate(SERVING, CURVE, _poisson(80, 2000))
    requests = _answered(run)
    stalled = (requests.ends_s > 9.0) & (requests.ends_s < 9.3)
    held = replace(requests, ends_s=np.where(stalled, 9.3, requests.ends_s))
    histogram = dict(zip(*(n.tolist() for n in np.unique(run.batch_size, return_counts=True))))
    lasted_s, speed = np.array(pace_of(held, histogram, BOX, overhead_s=0.0)).T
    assert float(lasted_s @ speed) == pytest.approx(run.busy_s.sum(), rel=0.03)
    assert lasted_s @ speed / lasted_s.sum() == pytest.approx(1.0, rel=0.03)


def test_answers_are_divided_at_the_widest_gaps():
    ends = np.array([0.0, 0.001, 0.1, 0.101, 0.102, 0.3])
    assert [batch.tolist() for batch in divided(ends, 3)] == [[0, 1], [2, 3, 4], [5]]
    assert len(divided(ends, 1)) == 1
    assert divided(ends[:0], 3) == []


def test_a_curve_interpolates_and_refuses_what_was_not_measured():
    assert CURVE.mean_s(4) == pytest.approx(0.050)
    with pytest.raises(ConfigError, match="batches of 16, where 1 to 8 were measured"):
        Box("model", replace(SERVING, max_batch=16), CURVE)
    with pytest.raises(ConfigError, match="without batches of one"):
        BatchCurve({8: (0.1,)}, 0.0, 0.0)
    assert BatchCurve.from_json(json.loads(json.dumps(CURVE.to_json()))) == CURVE
    both = joined([CURVE, replace(CURVE, overhead_s=0.002)])
    assert (both.overhead_s, both.times_s[1]) == (0.001, (0.020, 0.020))


@short
def test_more_load_never_needs_fewer_boxes():
    counts = [plan(BOX, rate, 0.150).replicas for rate in (20, 120, 50_000)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] > 600


@short
def test_a_plan_keeps_its_latency_and_one_box_less_does_not():
    found = plan(BOX, 400, 0.150)
    assert found.holds
    assert not plan(BOX, 400, 0.150, replicas=found.replicas - 1).holds
    assert found.headroom >= 0
    assert f"{found.replicas} boxes carry 400 requests/s with p99 ≤ 150 ms" in found.sentence()


def test_boxes_that_take_turns_answer_sooner_than_those_that_are_dealt_to_by_chance():
    turns, chance = (forecast(BOX, 60, turns=count, seeds=1) for count in (10, 1))
    assert turns.latency.p99_s < chance.latency.p99_s


@short
def test_the_greatest_rate_is_within_the_latency_and_below_the_capacity():
    rate = greatest_rate(BOX, 0.150)
    assert forecast(BOX, rate, seeds=2).latency.p99_s <= 0.150
    assert 0.4 * BOX.capacity < rate < BOX.capacity


@short
def test_a_fixed_number_of_boxes_that_is_too_small_is_an_overload_with_a_growing_queue():
    found = plan(BOX, 2 * BOX.capacity, 0.150, replicas=1)
    assert found.each.overloaded
    assert found.each.growth == pytest.approx(BOX.capacity, rel=0.05)
    assert found.each.throughput == pytest.approx(BOX.capacity, rel=0.02)
    assert "its queue grows by" in found.sentence()


def test_a_latency_below_that_of_one_request_alone_is_refused_with_the_least_possible():
    with pytest.raises(ConfigError, match="one request alone takes 25 ms") as error:
        plan(BOX, 10, 0.020)
    assert "at least 25 ms" in error.value.remedy


def test_settings_are_read_from_a_served_config():
    config = ModelConfig(max_batch_size=16)
    config.instance_group.add(count=2)
    config.dynamic_batching.max_queue_delay_microseconds = 700
    config.dynamic_batching.preferred_batch_size.extend([8, 16])
    config.dynamic_batching.default_queue_policy.max_queue_size = 30
    assert serving_of(config) == ServingSpec(
        16, 700, 2, preferred_batch_sizes=(8, 16), max_queue_size=30
    )
    assert serving_of(ModelConfig(max_batch_size=16)).max_batch == 1


def _file(folder: Path, **changes: object) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps({"schema": 1, "kind": "bench", "curve": BOX.to_json()} | changes))
    return path


@short
def test_the_command_answers_from_a_benchmark_in_one_sentence(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["capacity", "--from", str(_file(tmp_path)), "--rate", "400", "--p99-ms", "150"]
    assert main([*arguments, "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["plan"]["sentence"].split(";")[0] in " ".join(capsys.readouterr().out.split())
    assert [level["growth"] for level in data["levels"]] == [0.0] * 3
    assert read_box(out) == BOX


@short
def test_the_command_reports_an_overload_of_fixed_boxes_without_failing(tmp_path, capsys):
    source = _file(tmp_path)
    assert (
        main(
            [
                "capacity",
                "--from",
                str(source),
                "--rate",
                "400",
                "--p99-ms",
                "150",
                "--replicas",
                "2",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert "2 boxes cannot carry 400 requests/s" in " ".join(printed.out.split())
    assert "would carry it" in printed.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "smoke"}, "holds a smoke, not a bench or capacity"),
        ({"schema": 0}, "has schema 0; this version reads 1"),
        ({"curve": None}, "holds no batch-latency curve"),
        ({"curve": {"serving": {"max_batch": 8}}}, "is damaged"),
        ({"curve": BOX.to_json() | {"times_s": {"1": ["x"]}}}, "is damaged"),
        ({"curve": BOX.to_json() | {"times_s": {"1": [-1]}}}, "times that cannot be"),
    ],
)
def test_old_foreign_and_damaged_files_are_refused(tmp_path, capsys, changes, message):
    source = _file(tmp_path, **changes)
    assert main(["capacity", "--from", str(source), "--rate", "1", "--p99-ms", "99"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a plan needs a repository to measure"),
        (["models", "--rate", "3"], "needs both a rate and a latency"),
        (["--from", "b.json"], "nothing to plan"),
        (
            ["--from", "b.json", "--check", "--rate", "3", "--p99-ms", "9"],
            "--check without a server",
        ),
        (["--from", "nowhere.json", "--rate", "3", "--p99-ms", "9"], "cannot be read as JSON"),
        (["--from", "b", "--rate", "3", "--p99-ms", "9", "--balancing", "x"], "balancing 'x'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(capsys, arguments, message):
    assert main(["capacity", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_impossible_latency_ends_with_code_2(tmp_path, capsys):
    assert main(["capacity", "--from", str(_file(tmp_path)), "--rate", "9", "--p99-ms", "3"]) == 2
    assert "at least 25 ms" in capsys.readouterr().err
