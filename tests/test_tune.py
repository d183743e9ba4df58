"""The tuner without a server: what is tried, how the best is found, what is kept, and what config.pbtxt becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clip_deploy.bench.figures import Load
from clip_deploy.errors import CheckFailed, ConfigError, ServerError
from clip_deploy.report.tunes import line, result
from clip_deploy.repository.rendering import parse_config
from clip_deploy.tune.config import difference, edited, replace_config
from clip_deploy.tune.report import ConfigFile
from clip_deploy.tune.search import (
    FINALISTS,
    ROUNDS,
    Progress,
    Unservable,
    planned_trials,
    search,
)
from clip_deploy.tune.space import ALONE, Settings, Space, Surroundings, fixed_knobs
from clip_deploy.tune.trials import Goal, Phase, Study, Trial
from tests.synthetic import SyntheticServer, run

pytest.importorskip("optuna", reason="needs optuna: pip install 'clip-deploy[tune]'")

DEFAULT = Settings(queue_delay_us=5000, instances=1, threads=0, max_batch=32)
USERS = Load(users=32)
GOAL = Goal(USERS, 0.8)
CONFIG = """\
# Written by hand.
name: "clip_image_encoder"
backend: "python"
max_batch_size: 32  # as checked

instance_group [
  {
    count: 1  # one is enough
    kind: KIND_CPU
  }
]

# A request waits up to 5000 µs for company, then leaves with whoever came.
dynamic_batching {
  max_queue_delay_microseconds: 5000
  preferred_batch_size: [ 8, 32 ]
}

model_warmup {
  name: "batch of 1"
  batch_size: 1
}

model_warmup {
  name: "batch of 32"
  batch_size: 32
}
parameters { key: "intra_op_thread_count" value { string_value: "2" } }  # both cores
parameters { key: "clip_deploy.mean" value { string_value: "0.5,0.5,0.5" } }
"""


def _space(cores: int = 2, users: int | None = 32, budget_s: float = 1.0, **changes) -> Space:
    return Space.around(Surroundings(DEFAULT, cores, users, budget_s * 1e6, **changes))


def _searched(server, *, goal: Goal = GOAL, trials: int = 12, study=None, **changes):
    space = changes.pop("space", None) or _space(budget_s=goal.p99_s)
    return search(space, goal, server, study or Study(None, {}), trials=trials, **changes)


# --- the space ---


def test_a_space_has_each_choice_once_and_the_default_among_them():
    space = _space()
    settings = list(space)
    assert len(settings) == len(set(settings))
    assert space.default in settings


def test_two_threads_of_two_cores_are_what_sharing_gives():
    space = _space(cores=2)
    assert space.plain(Settings(0, 1, 2, 8)) == Settings(0, 1, 0, 8)
    assert Settings(0, 1, 2, 8) not in set(space)


def test_a_delay_means_nothing_where_nobody_can_join():
    assert {s.queue_delay_us for s in _space() if s.max_batch == 1} == {0}


def test_threads_of_all_instances_stay_near_the_cores():
    assert all(s.instances * max(s.threads, 1) <= 6 for s in _space(cores=4))
    assert Settings(0, 4, 4, 8) not in set(_space(cores=4))


def test_delays_beyond_the_budget_are_not_tried():
    assert (
        max(_space(budget_s=0.004).values["queue_delay_us"]) == 5000
    )  # the default's, which may stay
    assert 2000 in _space(budget_s=0.004).values["queue_delay_us"]
    assert 10000 not in _space(budget_s=0.004).values["queue_delay_us"]


def test_batches_beyond_the_users_are_not_tried():
    assert _space(users=6).values["max_batch"] == (1, 2, 4, 8, 32)


def test_a_model_without_batching_keeps_its_batching():
    config = parse_config('backend: "python"', "x")
    assert fixed_knobs(config) == {"queue_delay_us", "max_batch"}
    space = Space.around(Surroundings(Settings.of(config), 2, 32, 1e6, fixed_knobs(config)))
    assert {(s.queue_delay_us, s.max_batch) for s in space} == {(ALONE, 0)}


def test_threads_of_a_plan_are_nothing_to_turn():
    assert fixed_knobs(parse_config('backend: "tensorrt" max_batch_size: 8', "x")) == {"threads"}


# --- config.pbtxt ---


def test_settings_are_read_from_a_config_and_written_into_it():
    config = parse_config(CONFIG, "x")
    assert Settings.of(config) == Settings(5000, 1, 2, 32)
    wanted = Settings(500, 2, 1, 4)
    assert Settings.of(wanted.written(config)) == wanted
    assert Settings.of(config) == Settings(5000, 1, 2, 32)  # a copy was written


def test_nothing_that_a_batch_may_not_exceed_stays_above_it():
    written = Settings(500, 2, 1, 4).written(parse_config(CONFIG, "x"))
    assert [sample.batch_size for sample in written.model_warmup] == [1, 4]
    assert list(written.dynamic_batching.preferred_batch_size) == []


def test_an_edit_changes_only_the_lines_concerned():
    after = edited(CONFIG, Settings(500, 2, 1, 16).written(parse_config(CONFIG, "x")))
    before, now = CONFIG.splitlines(), after.splitlines()
    assert len(before) == len(now)
    assert [pair for pair in zip(before, now) if pair[0] != pair[1]] == [
        ("max_batch_size: 32  # as checked", "max_batch_size: 16  # as checked"),
        ("    count: 1  # one is enough", "    count: 2  # one is enough"),
        (
            "# A request waits up to 5000 µs for company, then leaves with whoever came.",
            "# A request waits up to 500 µs for company, then leaves with whoever came.",
        ),
        ("  max_queue_delay_microseconds: 5000", "  max_queue_delay_microseconds: 500"),
        ("  preferred_batch_size: [ 8, 32 ]", "  preferred_batch_size: [ 8 ]"),
        ('  name: "batch of 32"', '  name: "batch of 16"'),
        ("  batch_size: 32", "  batch_size: 16"),
        tuple(
            f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{n}" }} }}  # both cores'
            for n in (2, 1)
        ),
    ]


def test_an_edit_adds_what_is_absent_and_removes_what_goes():
    text = '# mine\nbackend: "python"\nmax_batch_size: 8  # checked\n'
    added = edited(text, Settings(0, 2, 1, 8).written(parse_config(text, "x")))
    assert added.startswith(text.rstrip())
    assert Settings.of(parse_config(added, "x")) == Settings(0, 2, 1, 8)
    gone = edited(added, Settings(ALONE, 2, 0, 8).written(parse_config(added, "x")))
    assert "dynamic_batching" not in gone
    assert "intra_op_thread_count" not in gone
    assert gone.startswith(text.rstrip())


@pytest.mark.parametrize(
    "text",
    [
        'backend: "python" max_batch_size: 8 instance_group { count: 1 } dynamic_batching { }',
        'max_batch_size: 8\r\ninstance_group [ { } ]\r\ndynamic_batching <>\r\nbackend: "python"\r\n',
        "backend: 'python', max_batch_size: 8; instance_group: [ { count: 3 }, ]".replace(
            ", ]", " ]"
        ),
        'parameters [ { key: "intra_op_thread_count" value: { string_value: "2" } } ] max_batch_size: 8',
    ],
)
@pytest.mark.parametrize("wanted", [Settings(100, 2, 1, 4), Settings(0, 1, 3, 1)])
def test_any_way_to_write_a_config_can_be_edited(text: str, wanted: Settings):
    after = edited(text, wanted.written(parse_config(text, "x")))
    assert Settings.of(parse_config(after, "x")) == wanted


def test_what_cannot_be_edited_safely_is_refused():
    text = 'parameters [ { key: "intra_op_thread_count" value { string_value: "2" } }, { key: "a" value { } } ]'
    wanted = Settings(ALONE, 1, 0, 0).written(parse_config(text, "x"))
    with pytest.raises(ConfigError, match="cannot be edited safely"):
        edited(text, wanted)


def test_a_difference_shows_changed_lines_and_cuts_long_ones():
    shown = difference(f"a: 1\nb: {'x' * 500}\n", f"a: 2\nb: {'x' * 500}\n", "m/config.pbtxt")
    assert "-a: 1\n+a: 2\n" in shown
    assert max(map(len, shown.splitlines())) == 100


def test_a_config_that_changed_meanwhile_is_left_alone(tmp_path: Path):
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_size: 4\n")
    with pytest.raises(ConfigError, match="was changed while"):
        replace_config(path, "max_batch_size: 8\n", "max_batch_size: 2\n")
    assert path.read_text() == "max_batch_size: 4\n"


# --- the search ---


@pytest.mark.parametrize(("cores", "users"), [(2, 8), (2, 32), (4, 8)])
def test_a_third_of_the_grid_finds_nearly_its_best(cores: int, users: int):
    load, space = Load(users=users), _space(cores, users, 0.8)
    size = len(list(space))
    for seed in range(4):
        server = SyntheticServer(cores=cores, serial=0.3, seed=seed)
        goal = Goal(load, 0.8)
        outcome = _searched(server, goal=goal, trials=planned_trials(space), space=space, seed=seed)
        truth = {s: server.truth(s, load) for s in space}
        best = max(throughput for throughput, p99_s in truth.values() if p99_s <= goal.p99_s)
        assert truth[space.default][0] < 0.9 * best  # doing nothing does not pass
        chosen = (outcome.winner or outcome.default).settings
        assert truth[chosen][0] >= 0.95 * best
        assert len(server.asked) <= size / 3


def test_the_default_is_measured_first_and_no_settings_are_searched_twice():
    server = SyntheticServer()
    outcome = _searched(server)
    searched = [trial.settings for trial in outcome.trials if trial.phase is Phase.SEARCH]
    assert searched[0] == DEFAULT
    assert len(searched) == len(set(searched)) == 12


def test_the_best_and_the_default_are_measured_in_turn():
    outcome = _searched(SyntheticServer())
    finals = [trial.settings for trial in outcome.trials if trial.phase is Phase.FINAL]
    assert len(finals) == ROUNDS * (FINALISTS + 1)
    lined_up = finals[: FINALISTS + 1]
    assert finals == lined_up + lined_up[::-1] + lined_up


def test_all_of_a_small_space_is_measured_once():
    space = _space(fixed=frozenset({"queue_delay_us", "max_batch"}))
    outcome = _searched(SyntheticServer(), space=space, trials=100)
    searched = [trial.settings for trial in outcome.trials if trial.phase is Phase.SEARCH]
    assert set(searched) == set(space)


def test_nothing_beats_a_default_that_is_best():
    def server(settings: Settings, load: Load):
        return run(load, 50.0 if settings == DEFAULT else 40.0, 0.5)

    outcome = _searched(server)
    assert outcome.winner is None
    assert [contender.is_better for contender in outcome.contenders] == [False, False]


def test_one_lucky_trial_changes_nothing():
    lucky = Settings(0, 1, 0, 32)
    seen: list[Settings] = []

    def server(settings: Settings, load: Load):
        seen.append(settings)
        return run(load, 90.0 if settings == lucky and seen.count(lucky) == 1 else 50.0, 0.5)

    outcome = _searched(server)
    assert lucky in [contender.settings for contender in outcome.contenders]
    assert outcome.winner is None


def test_settings_that_keep_a_budget_which_the_default_breaks_win_though_slower():
    def server(settings: Settings, load: Load):
        return run(load, 60.0, 2.0) if settings == DEFAULT else run(load, 30.0, 0.4)

    outcome = _searched(server)
    assert outcome.winner is not None
    assert not outcome.default.fits


def test_at_a_rate_the_least_latency_wins():
    def server(settings: Settings, load: Load):
        return run(load, 20.0, 0.1 if settings.queue_delay_us == 0 else 0.3)

    outcome = _searched(server, goal=Goal(Load(rate=20), 0.8))
    assert outcome.winner is not None
    assert outcome.winner.settings.queue_delay_us == 0
    assert outcome.winner.gain == pytest.approx(3)


@pytest.mark.parametrize(
    "changes", [{"wrong": 1}, {"errors": {"no": 2}}, {"overloaded": True}, {"latency": None}]
)
def test_speed_without_right_answers_in_time_counts_for_nothing(changes: dict):
    def server(settings: Settings, load: Load):
        return run(load, 50, 0.5) if settings == DEFAULT else run(load, 500, 0.1, **changes)

    assert _searched(server).winner is None


def test_settings_that_are_refused_are_not_tried_again():
    asked: list[Settings] = []

    def server(settings: Settings, load: Load):
        asked.append(settings)
        if settings.instances == 2:
            raise Unservable("no room for it")
        return run(load, 50, 0.5)

    outcome = _searched(server, trials=20)
    refused = [trial for trial in outcome.trials if trial.failure]
    assert refused
    assert {trial.failure for trial in refused} == {"no room for it"}
    assert all(asked.count(trial.settings) == 1 for trial in refused)


def test_a_default_that_does_not_work_is_no_ground_to_search_on(tmp_path: Path):
    study = Study.open(tmp_path / "s.jsonl", {})

    def server(settings: Settings, load: Load):
        raise Unservable("its answers are wrong")

    with pytest.raises(CheckFailed, match="settings as they are cannot be measured: its answers"):
        _searched(server, study=study)
    assert study.trials == []  # once it is repaired, it is measured again


def test_a_budget_below_what_one_user_alone_waits_is_impossible():
    server = SyntheticServer(noise=0)
    least = server.truth(_space().least, Load(users=1))[1]
    with pytest.raises(CheckFailed, match=f"waits {least * 1e3:.1f} ms") as failure:
        _searched(server, goal=Goal(USERS, least / 2))
    assert failure.value.exit_code == 7
    assert len(server.asked) <= 3  # the default, one user alone, and no search


def test_a_budget_that_only_fewer_users_could_keep_names_the_least_that_was_seen():
    server = SyntheticServer(noise=0)
    with pytest.raises(CheckFailed, match=r"none of 12 settings keeps p99 ≤ 100 ms at 32 users"):
        _searched(server, goal=Goal(USERS, 0.1))


# --- what is kept ---


def _interrupting(server: SyntheticServer, after: int):
    def measure(settings: Settings, load: Load):
        if len(server.asked) == after:
            raise KeyboardInterrupt
        return server(settings, load)

    return measure


@pytest.mark.parametrize("after", [1, 7, 14])
def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, after: int):
    whole, first, second = (SyntheticServer(noise=0) for _ in range(3))
    expected = _searched(whole)
    path = tmp_path / "s.jsonl"
    with pytest.raises(KeyboardInterrupt):
        _searched(_interrupting(first, after), study=Study.open(path, {"model": "a"}))
    outcome = _searched(second, study=Study.open(path, {"model": "a"}))
    assert len(first.asked) + len(second.asked) == len(whole.asked)
    assert outcome.winner == expected.winner or outcome.winner.gain == pytest.approx(
        expected.winner.gain, rel=0.03
    )


def test_a_finished_search_is_not_measured_again(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    expected = _searched(SyntheticServer(), study=Study.open(path, {}))
    idle = SyntheticServer()
    assert _searched(idle, study=Study.open(path, {})) == expected
    assert idle.asked == []


def test_a_crash_in_the_middle_of_a_line_costs_that_line_only(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    _searched(SyntheticServer(), study=Study.open(path, {}))
    kept = path.read_bytes()
    path.write_bytes(kept[:-20])
    study = Study.open(path, {})
    assert len(study.trials) == len(kept.splitlines()) - 2
    study.add(study.trials[0])
    assert len(Study.open(path, {}).trials) == len(study.trials)


def test_settings_that_end_the_server_are_not_tried_again(tmp_path: Path):
    path, deadly = tmp_path / "s.jsonl", Settings(0, 1, 0, 32)

    def server(settings: Settings, load: Load):
        if settings == deadly:
            raise ServerError("it ended with code 137", remedy="read its log")
        return run(load, 50, 0.5)

    with pytest.raises(ServerError, match="code 137"):
        _searched(server, study=Study.open(path, {}))
    assert _searched(server, study=Study.open(path, {})).winner is None


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"model": "other"}, "another model: other, not mine"),
        ({"p99_ms": 50}, "another p99 ms: 50, not 100"),
    ],
)
def test_the_study_of_something_else_is_refused(tmp_path: Path, found: dict, what: str):
    path = tmp_path / "s.jsonl"
    mine = {"model": "mine", "p99_ms": 100}
    Study.open(path, mine | found)
    with pytest.raises(ConfigError, match=what):
        Study.open(path, mine)


@pytest.mark.parametrize("text", ["{}\n", "no json\n", "[1]\n", '{"kind": "bench"}\n', "cut"])
def test_a_file_that_is_no_study_is_refused_and_kept(tmp_path: Path, text: str):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no study"):
        Study.open(path, {})
    assert path.read_text() == text


def test_a_trial_that_was_tampered_with_is_refused(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    Study.open(path, {})
    with path.open("a") as file:
        file.write(json.dumps({"phase": "search", "settings": {}}) + "\n")
    with pytest.raises(ConfigError, match="is no study"):
        Study.open(path, {})


# --- what is told ---


def test_a_trial_is_told_in_one_line():
    goal = Goal(USERS, 0.8)
    good = Trial(Phase.SEARCH, DEFAULT, run(USERS, 42.0, 0.7))
    assert line(good, Progress(3, 27, good), goal) == (
        "   3/27  delay 5000 µs, 1 instance, cores shared, max batch 32: ✓ 42.0/s, p99 700.0 ms  best 42.0/s"
    )
    slow = Trial(Phase.SEARCH, DEFAULT, run(USERS, 42.0, 0.9))
    assert result(slow, goal) == "✗ 42.0/s, p99 900.0 ms, over the budget"
    assert result(Trial(Phase.SEARCH, DEFAULT, None, "refused"), goal) == "✗ refused"


def _written_config(tmp_path: Path) -> ConfigFile:
    path = tmp_path / "clip_image_encoder" / "config.pbtxt"
    path.parent.mkdir()
    path.write_text(CONFIG)
    return ConfigFile(path, CONFIG, parse_config(CONFIG, path))


def test_a_winner_is_written_only_when_it_is_asked_for(tmp_path: Path):
    before = _written_config(tmp_path)
    outcome = _searched(SyntheticServer(cores=4), space=_space(cores=4), trials=30)
    assert outcome.winner is not None
    shown = before.settled(outcome, {"CPU": "a good one"}, apply=False)
    assert before.path.read_text() == CONFIG
    applied = before.settled(outcome, {"CPU": "a good one"}, apply=True)
    assert applied.difference == shown.difference
    assert Settings.of(parse_config(before.path.read_text(), "x")) == outcome.winner.settings
    assert json.loads(json.dumps(applied.to_json()))["applied"] is True


def test_where_nothing_wins_nothing_is_written_and_the_report_says_so(tmp_path: Path):
    before = _written_config(tmp_path)
    outcome = _searched(lambda settings, load: run(load, 50.0, 0.5))
    report = before.settled(outcome, {"CPU": "a good one"}, apply=True)
    assert report.verdict.startswith("nothing beats the settings as they are")
    assert (report.difference, report.applied) == ("", False)
    assert before.path.read_text() == CONFIG


@pytest.mark.processes  # the first use of matplotlib asks the system for its fonts
def test_the_page_shows_every_trial_and_needs_no_network(tmp_path: Path):
    from clip_deploy.report.tune_page import page

    def server(settings: Settings, load: Load):
        if settings.max_batch == 1:
            raise Unservable("<no> & never")
        return formula(settings, load)

    before, formula = _written_config(tmp_path), SyntheticServer(cores=4)
    outcome = _searched(server, space=_space(cores=4), trials=30)
    text = page(before.settled(outcome, {"CPU": "a good one"}, apply=False))
    for trial in outcome.trials:
        assert str(trial.settings) in text
    assert "&lt;no&gt; &amp; never" in text
    assert text.count("<svg") == 2
    assert "a good one" in text
    assert not re.search(r'(?:src|href)="(?!#)', text.replace("xlink:href", "href"))
