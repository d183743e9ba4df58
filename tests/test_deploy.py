"""The pipeline with stand-ins for torch and Triton: what runs, what is left out and why, what is told, how it fails."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from clip_deploy.artifacts import BuiltPlan
from clip_deploy.cli import main
from clip_deploy.deploy import STEPS, deploy, facts, read
from clip_deploy.deploy.checking import require_gpu
from clip_deploy.deploy.job import Job
from clip_deploy.deploy.state import STATE, alone
from clip_deploy.engines.tensorrt import plan_folder
from clip_deploy.engines.tensorrt.checking import Parsed
from clip_deploy.errors import CheckFailed, ConfigError, ExportError, MissingDependency, ServerError
from clip_deploy.publishing import holdings, rollback
from clip_deploy.report import Check, Report, Status
from clip_deploy.smoke.bars import held_to
from clip_deploy.spec import Tower
from tests.factories import exported, planned
from tests.lint_examples import tower_graph
from tests.test_cli import _fails

pytest.importorskip("onnx")  # the linter reads the graphs

TABLES = {
    "encoder": {"model": "ViT-B-32", "pretrained": "random"},
    "engine": {"backend": "python"},
}
MAKING = ["export", "render-config", "lint", "smoke-test"]


class World:
    """A folder with a clip-deploy.toml; exports and servers are stand-ins, all else is real."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "clip-deploy.toml"
        self.out = folder / "build" / "search"
        self.repository = self.out / "model_repository"
        self.tables = {name: dict(keys) for name, keys in TABLES.items()}
        self.ran: list[str] = []
        self.failures: dict[str, BaseException] = {}
        self.write()

    def write(self, **tables: dict) -> None:
        for table, keys in tables.items():
            self.tables.setdefault(table, {}).update(keys)
        lines = []
        for table, keys in self.tables.items():
            lines.append(f"[search.{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        self.file.write_text("\n".join(lines))

    def deploy(self, **options):
        self.ran = []
        return deploy(read(self.file), **options)

    def outcomes(self, **options) -> dict[str, str]:
        return {row.step: row.outcome.value for row in self.deploy(**options).steps}

    def count(self, step: str) -> None:
        self.ran.append(step)
        if (failure := self.failures.pop(step, None)) is not None:
            raise failure

    def export(self, job: Job) -> str:
        self.count("export")
        for tower in job.deployment.encoder.towers:
            shutil.rmtree(job.out / tower.model_name, ignore_errors=True)
            batch = job.deployment.encoder.max_batch
            exported(job.out, tower, max_batch=batch, graph=tower_graph(tower))
        return "two towers"

    def smoke_test(self, job: Job, name: str = "smoke-test") -> str:
        self.count(name)
        check = Check("answers equal torch's", Status.PASSED, "cosine ≥ 1", "clip_image_encoder")
        job.write_report(
            f"{name}.json", Report("smoke test", {"server": "Triton"}, (check,)).to_json()
        )
        return "1 passed"

    @property
    def versions(self) -> set[str]:
        return {path.name for path in (self.repository / "clip_image_encoder").glob("[0-9]*")}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.chdir(tmp_path)
    real = {name: STEPS[name].run for name in ("render-config", "lint")}

    def counted(name: str):
        def run(job: Job) -> str:
            made.count(name)
            return real[name](job)

        return run

    stand_ins = {
        "export": made.export,
        "rehearse": lambda job: made.smoke_test(job, "rehearse"),
        "smoke-test": made.smoke_test,
        "render-config": counted("render-config"),
        "lint": counted("lint"),
    }
    for name, run in stand_ins.items():
        monkeypatch.setitem(STEPS, name, replace(STEPS[name], run=run))
    monkeypatch.setattr(facts, "gpu", lambda: {"gpu": "none"})
    return made


def test_the_first_time_everything_runs_and_then_nothing(world: World):
    first = world.outcomes()
    assert [name for name, outcome in first.items() if outcome == "ran"] == MAKING
    assert world.ran == MAKING
    second = world.outcomes()
    assert world.ran == []
    assert [name for name, outcome in second.items() if outcome == "up to date"] == MAKING
    assert world.versions == {"1"}


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({"encoder": {"max_batch": 16}}, MAKING),
        ({"encoder": {"force_quick_gelu": True}}, ["export"]),  # the stand-in makes the same
        ({"serving": {"max_queue_delay_us": 1}}, MAKING[1:]),
        ({"serving": {"warmup": False}}, MAKING[1:]),
        ({"checks": {"concurrency": 7}}, ["smoke-test"]),
        ({"checks": {"min_cosine": 0.9}}, ["smoke-test"]),
        ({"checks": {"strict": True}}, ["lint"]),
        ({"checks": {"ignore": ["CD9"]}}, ["lint"]),
        ({"checks": {"require": ["lint"]}}, []),
        ({"server": {"timeout": 100}}, []),
        ({"server": {"launcher": "embedded"}}, ["lint", "smoke-test"]),
    ],
)
def test_a_change_runs_what_reads_it_and_nothing_else(world: World, change: dict, runs: list[str]):
    world.deploy()
    if "ignore" in change.get("checks", {}):
        change = {"checks": {"ignore": ["CD4"]}}
    world.write(**change)
    planned = {
        row.step for row in world.deploy(dry_run=True).steps if row.outcome.value == "would run"
    }
    assert planned == set(runs) or planned <= set(runs)
    report = world.deploy()
    assert report.ok, report.failure
    assert world.ran == runs
    assert world.outcomes()
    assert world.ran == []


def test_files_that_are_named_are_read_each_time(world: World, tmp_path: Path):
    (tmp_path / "tiny.json").write_text("{}")
    (tmp_path / "weights.pt").write_text("one")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("a")
    world.write(
        encoder={"model": "tiny.json", "pretrained": "weights.pt"}, checks={"images": "photos"}
    )
    world.deploy()
    assert world.outcomes()["export"] == "up to date"
    (tmp_path / "weights.pt").write_text("two")
    (row,) = [row for row in world.deploy().steps if row.step == "export"]
    assert (row.outcome.value, row.why) == ("ran", "weights.pt's files changed")
    (tmp_path / "photos" / "b.jpg").write_text("b")
    report = world.deploy()
    assert world.ran == ["smoke-test"]
    assert {row.step: row.why for row in report.steps}[
        "smoke-test"
    ] == "checks.images's files changed"


def test_what_was_made_is_made_again_where_it_is_not_whole(world: World):
    world.deploy()
    config = world.repository / "clip_image_encoder" / "config.pbtxt"
    right = config.read_text()
    config.write_text(right.replace("5000", "9"))
    report = world.deploy()
    assert {row.step: row.why for row in report.steps}["render-config"].endswith(
        "config.pbtxt is not what it made"
    )
    assert config.read_text() == right
    (world.repository / "clip_text_encoder" / "2" / "model.onnx").unlink(missing_ok=True)
    (world.repository / "clip_text_encoder" / "1" / "model.onnx").unlink()
    assert world.outcomes()["render-config"] == "ran"
    assert world.outcomes()["render-config"] == "up to date"


def test_an_export_that_was_edited_by_hand_is_made_again(world: World):
    world.deploy()
    manifest = world.out / "clip_image_encoder" / "manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(data | {"max_batch": 4000}))
    assert world.outcomes()["export"] == "ran"
    assert json.loads(manifest.read_text())["max_batch"] == 32


def test_exporting_again_does_not_trust_an_edited_manifest(world: World, monkeypatch):
    """``export`` itself cannot tell: the key in an edited manifest is still right."""
    from clip_deploy.deploy import making

    world.deploy()
    manifest = world.out / "clip_image_encoder" / "manifest.json"
    text = manifest.read_text()
    job = Job(
        read(world.file)[0],
        __import__("clip_deploy.deploy.state", fromlist=["State"]).State.read(world.out),
    )
    assert not making._is_edited(job)
    manifest.write_text(text.replace('"max_batch": 32', '"max_batch": 64'))
    assert making._is_edited(Job(job.deployment, job.state))


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"schema": 1}', '{"schema": 99, "kind": "deploy-state", "steps": {}}', "\xff"],
)
def test_a_damaged_memory_is_none_and_adds_no_version(world: World, damage: str):
    world.deploy()
    (world.out / STATE).write_bytes(damage.encode("latin-1"))
    report = world.deploy()
    assert world.ran == MAKING
    assert {row.why for row in report.steps if row.why} == {"what was remembered is damaged"} or (
        report.steps[0].why == "what was remembered is damaged"
    )
    assert world.versions == {"1"}


def test_a_memory_edited_by_hand_is_not_believed(world: World):
    world.deploy()
    path = world.out / STATE
    data = json.loads(path.read_text())
    name = next(iter(data["steps"]["render-config"]["makes"]))
    data["steps"]["render-config"]["makes"][name] = "0" * 64
    data["steps"]["lint"]["reads"]["checks.strict"] = 5
    path.write_text(json.dumps(data))
    assert world.outcomes()["lint"] == "ran"
    assert world.ran[0] == "export"


def test_the_first_failure_ends_it_with_its_exit_code_and_the_next_run_goes_on(
    world: World, capsys: pytest.CaptureFixture[str]
):
    world.failures["smoke-test"] = ServerError("it died [x]", remedy="see the log")
    world.write(publish={"destination": "elsewhere"})
    assert main(["deploy"]) == 6
    out, err = capsys.readouterr()
    assert "error: it died [x]\nfix: see the log" in err
    assert "a step before it failed" in " ".join(out.split())
    world.tables.pop("publish")
    world.write()
    assert world.deploy().ok
    assert world.ran == ["smoke-test"]


@pytest.mark.parametrize(
    ("step", "failure"),
    [("export", ExportError), ("rehearse", MissingDependency), ("lint", CheckFailed)],
)
def test_every_kind_of_failure_keeps_its_exit_code(world: World, capsys, step: str, failure: type):
    if step == "rehearse":
        world.write(engine={"backend": "onnxruntime"})
    world.failures[step] = failure("what", remedy="how")
    if step == "rehearse" and STEPS["rehearse"].skipped(Job(read(world.file)[0], None)):
        pytest.skip("the embedded server is not installed")
    assert main(["deploy"]) == failure.exit_code
    report = world.deploy(until="export")
    assert report.ok
    capsys.readouterr()


def test_an_interrupt_keeps_what_is_done(world: World, capsys: pytest.CaptureFixture[str]):
    world.failures["smoke-test"] = KeyboardInterrupt()
    assert main(["deploy"]) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert world.deploy().ok
    assert world.ran == ["smoke-test"]


def test_a_forced_check_that_fails_is_not_remembered_as_passed(world: World):
    world.deploy()
    world.failures["smoke-test"] = CheckFailed("wrong", remedy="look")
    assert not world.deploy(start="smoke-test", force=True).ok
    assert world.ran == ["smoke-test"]
    assert world.outcomes()["smoke-test"] == "ran"


def test_a_full_disk_is_told_in_two_lines_and_nothing_is_half_written(
    world: World, capsys, monkeypatch: pytest.MonkeyPatch
):
    world.deploy()
    before = (world.out / STATE).read_text()

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    world.write(checks={"concurrency": 9})
    with monkeypatch.context() as patched:
        patched.setattr("clip_deploy.deploy.state.write_json", full)
        assert main(["deploy"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (world.out / STATE).read_text() == before
    assert world.outcomes()["smoke-test"] == "ran"


def test_two_at_once_do_not_work_on_one_folder(world: World):
    with alone(world.out):
        report = world.deploy()
    assert world.ran == []
    assert "another clip-deploy deploy is at work" in str(report.failure)


def test_a_place_that_cannot_be_written_to_is_told(world: World, tmp_path: Path):
    (tmp_path / "build").write_text("a file")
    report = world.deploy()
    assert isinstance(report.failure, ConfigError)
    assert "build" in str(report.failure)
    assert {row.outcome.value for row in report.steps} == {"not reached"}


def test_a_model_that_is_no_part_of_it_is_not_served_beside_it(world: World):
    world.deploy()
    world.write(encoder={"towers": ["image"]})
    report = world.deploy()
    assert isinstance(report.failure, ConfigError)
    assert "clip_text_encoder would be served, too" in str(report.failure)


def test_from_and_until_choose_and_contradictions_are_refused(world: World, capsys):
    assert world.outcomes(until="render-config")["lint"] == "not reached"
    assert world.ran == MAKING[:2]
    outcomes = world.outcomes(start="lint", until="lint")
    assert world.ran == ["lint"]
    assert outcomes["export"] == "not reached"
    what, how = _fails(capsys, ["deploy", "--from", "lint", "--until", "export"], 2)
    assert "comes after" in what
    what, how = _fails(capsys, ["deploy", "--until", "test"], 2)
    assert "smoke-test" in how
    what, how = _fails(capsys, ["deploy", "serch"], 2)
    assert how == "did you mean search?"
    what, how = _fails(capsys, ["deploy", "--require", "gpus"], 2)
    assert "tensorrt-check" in how
    what, how = _fails(capsys, ["deploy", "--file", "other.toml"], 2)
    assert "clip-deploy init" in how
    _fails(capsys, ["deploy", "--json", "-", "--github"], 2)


def test_what_is_to_be_published_has_passed_as_it_lies_there(world: World):
    world.write(publish={"destination": "elsewhere"})
    world.deploy(until="lint")
    report = world.deploy(start="publish")
    assert isinstance(report.failure, CheckFailed)
    assert "has not passed smoke-test as it is: it has not run yet" in str(report.failure)
    assert world.deploy(until="smoke-test").ok
    config = world.repository / "clip_image_encoder" / "config.pbtxt"
    config.write_text(config.read_text().replace("5000", "9"))
    report = world.deploy(start="publish")
    assert "has not passed lint as it is" in str(report.failure)
    assert not Path("elsewhere").exists()


def _row(report, step: str = "publish"):
    return next(row for row in report.steps if row.step == step)


def test_what_has_passed_is_published_once_and_again_only_when_it_changed(world: World):
    world.write(publish={"destination": "elsewhere"})
    report = world.deploy()
    assert report.ok, report.failure
    assert _row(report).said == "elsewhere: publication 1"
    assert Path("elsewhere/clip_image_encoder/1/model.onnx").is_file()
    assert _row(world.deploy()).outcome.value == "up to date"
    world.write(serving={"max_queue_delay_us": 1})
    assert _row(world.deploy()).said == "elsewhere: publication 2"
    world.write(publish={"keep": 1}, serving={"max_queue_delay_us": 2})
    assert _row(world.deploy()).said == "elsewhere: publication 3; removed 2"
    shutil.rmtree("elsewhere")
    row = _row(world.deploy())
    assert (row.outcome.value, row.why) == ("ran", "publication 3 does not serve there")


def test_a_publication_that_was_rolled_back_stays_back_until_something_changes(world: World):
    world.write(publish={"destination": "elsewhere"})
    world.deploy()
    world.write(serving={"max_queue_delay_us": 1})
    world.deploy()
    rollback("elsewhere")
    for dry_run in (True, False):
        row = _row(world.deploy(dry_run=dry_run))
        assert row.outcome.value == "skipped"
        assert row.said == ("publication 2 was rolled back to 1 there; --force publishes it again")
    assert holdings("elsewhere").serving == 1
    assert _row(world.deploy(start="publish", force=True)).outcome.value == "ran"
    assert holdings("elsewhere").serving == 3
    rollback("elsewhere")
    world.write(serving={"max_queue_delay_us": 2})
    assert _row(world.deploy()).outcome.value == "ran"
    assert holdings("elsewhere").serving == 4


def test_a_destination_that_is_foreign_ends_it_with_nine(world: World, capsys):
    world.write(publish={"destination": "elsewhere"})
    world.deploy()
    Path("elsewhere/clip_image_encoder/config.pbtxt").write_text("by hand")
    world.write(serving={"max_queue_delay_us": 1})
    assert main(["deploy"]) == 9
    assert "error: " in capsys.readouterr().err
    assert Path("elsewhere/clip_image_encoder/config.pbtxt").read_text() == "by hand"
    assert world.outcomes(until="smoke-test")["smoke-test"] == "up to date"


def test_a_dry_run_says_what_would_run_and_why_and_writes_nothing(world: World, tmp_path: Path):
    report = world.deploy(dry_run=True)
    assert world.ran == []
    assert not (tmp_path / "build").exists()
    assert {row.step: row.outcome.value for row in report.steps}["lint"] == "would run"
    world.deploy()
    state = (world.out / STATE).read_bytes()
    world.write(encoder={"max_batch": 16})
    rows = {row.step: (row.outcome.value, row.said) for row in world.deploy(dry_run=True).steps}
    assert rows["export"] == ("would run", "encoder.max_batch is 16, was 32")
    assert rows["render-config"] == ("may run", "when export makes something else than before")
    assert rows["smoke-test"] == ("may run", "when render-config makes something else than before")
    assert (world.out / STATE).read_bytes() == state


@pytest.mark.processes
def test_a_dry_run_needs_no_torch(world: World):
    blocked = "".join(
        f"sys.modules[{name!r}] = None\n"
        for name in ("torch", "open_clip", "onnxruntime", "openvino", "tensorrt", "numpy.random")[
            :5
        ]
    )
    code = f"import sys\n{blocked}from clip_deploy.cli import main\nsys.exit(main(['deploy', '--dry-run']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=world.file.parent,
    )
    assert done.returncode == 0, done.stderr
    assert "would run" in done.stdout


def test_the_ladder_has_every_rung_and_says_why_one_was_skipped(world: World):
    report = world.deploy()
    rungs = {rung.name: (rung.status.value, rung.said) for rung in report.rungs}
    assert list(rungs) == ["lint", "embedded", "tensorrt-check", "container", "gpu"]
    assert rungs["lint"][0] == rungs["embedded"][0] == "passed"
    assert rungs["tensorrt-check"][0] == rungs["container"][0] == rungs["gpu"][0] == "skipped"
    assert all(said for _, said in rungs.values())
    partly = {rung.name: rung.status.value for rung in world.deploy(until="lint").rungs}
    assert partly["embedded"] == "skipped"


def test_the_server_of_another_backend_is_preceded_by_a_rehearsal(world: World, monkeypatch):
    monkeypatch.setattr(STEPS["rehearse"].skipped.__globals__["install"], "installed", lambda: None)
    monkeypatch.setattr(facts, "has", lambda *modules: True)
    world.write(engine={"backend": "onnxruntime"})
    report = world.deploy()
    assert report.ok, report.failure
    assert "rehearse" in world.ran
    rungs = {rung.name: rung.status.value for rung in report.rungs}
    assert (rungs["embedded"], rungs["container"], rungs["gpu"]) == ("passed", "passed", "skipped")


@pytest.mark.parametrize("seen", [["passed", "skipped"], ["passed", "failed"], []])
def test_a_model_that_was_to_run_on_a_gpu_and_was_not_seen_there_fails(seen: list[str]):
    def told(statuses: list[str]) -> Report:
        return Report(
            "t", {}, tuple(Check("it runs on the GPU", Status(s), "", "m") for s in statuses)
        )

    with pytest.raises(CheckFailed, match="not seen on a GPU"):
        require_gpu(told(seen))
    require_gpu(told(["passed", "passed"]))


def test_the_gpu_rung_is_that_of_the_smoke_test_on_a_machine_that_has_one(
    world: World, monkeypatch
):
    monkeypatch.setattr(facts, "gpu", lambda: {"gpu": "H200"})
    monkeypatch.setattr(facts, "has", lambda *modules: False)
    world.write(
        engine={"backend": "onnxruntime"},
        serving={"instance_kind": "gpu"},
        checks={"ignore": ["CD"], "require": ["gpu", "container"]},
    )
    report = world.deploy()
    assert report.ok
    assert {rung.name: rung.status.value for rung in report.rungs}["gpu"] == "passed"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"require": ["tensorrt-check"]}, "not installed"),
        ({"require": ["embedded"], "until": "lint"}, "--until lint"),
        ({"require": ["gpu"]}, "no GPU"),
    ],
)
def test_a_required_rung_that_would_be_skipped_fails_before_anything_runs(
    world: World, monkeypatch, options: dict, why: str
):
    monkeypatch.setattr(facts, "has", lambda *modules: False)
    report = world.deploy(**options)
    assert world.ran == []
    assert isinstance(report.failure, CheckFailed)
    assert why in str(report.failure)
    (rung,) = [rung for rung in report.rungs if rung.name == options["require"][0]]
    assert rung.status is Status.FAILED
    assert "skipped: " in rung.said


def test_a_plan_is_checked_built_and_rendered_and_built_again_when_it_should_differ(
    world: World, monkeypatch
):
    def build(model, options, *, progress):
        world.count(f"build {model.name} {options.profile} {options.release}")
        shutil.rmtree(plan_folder(model), ignore_errors=True)
        planned(model, str(options.profile or "1:8:32"))
        return BuiltPlan.read(plan_folder(model))

    parsed = Parsed("m", "1.4", 7, ())
    monkeypatch.setattr("clip_deploy.engines.tensorrt.building.build", build)
    monkeypatch.setattr("clip_deploy.engines.tensorrt.checking.check", lambda *given: parsed)
    monkeypatch.setattr(facts, "has", lambda *modules: modules == ("tensorrt_rtx",))
    monkeypatch.setitem(
        STEPS,
        "smoke-test",
        replace(STEPS["smoke-test"], run=lambda job: world.count("smoke-test") or "passed"),
    )
    world.write(
        engine={"backend": "tensorrt"},
        checks={"ignore": ["CD"]},
        server={"triton_release": "25.01"},
        encoder={"towers": ["image"]},
    )
    report = world.deploy(until="lint")
    assert report.ok, report.failure
    built = [step for step in world.ran if step.startswith("build")]
    assert built == ["build clip_image_encoder None 25.01"]
    assert _row(report, "tensorrt-check").said == "m: 7 layers"
    assert (world.repository / "clip_image_encoder/1/model.plan").is_file()
    world.deploy(until="lint")
    assert world.ran == []
    world.write(plan={"batch": "1:4:16"})
    report = world.deploy(until="lint")
    assert "build clip_image_encoder 1:4:16 25.01" in world.ran
    assert "export" not in world.ran
    assert _row(report, "build-trt").why.startswith('plan.batch is "1:4:16"') or (
        _row(report, "build-trt").why == "plan.batch is new"
    )
    monkeypatch.setattr("clip_deploy.engines.tensorrt.container.build", build)
    world.write(plan={"in_container": True})
    assert _row(world.deploy(until="build-trt"), "build-trt").outcome.value == "ran"


def test_a_graph_that_tensorrt_refuses_ends_it_with_five(world: World, monkeypatch, capsys):
    parsed = Parsed("clip_image_encoder", "1.4", 7, ("NonZero 'n': unsupported",))
    monkeypatch.setattr("clip_deploy.engines.tensorrt.checking.check", lambda *given: parsed)
    monkeypatch.setattr(facts, "has", lambda *modules: True)
    assert main(["deploy", "--require", "tensorrt-check"]) == 5
    assert "clip_image_encoder does not build: NonZero 'n'" in capsys.readouterr().err
    report = world.deploy(require=["tensorrt-check"])
    assert {r.name: r.status.value for r in report.rungs}["tensorrt-check"] == "failed"


def test_a_bar_stricter_than_the_tolerance_fails_what_is_below_it():
    checks = (
        Check("answers equal torch's", Status.PASSED, "fine", "m", data={"min_cosine": 0.9996}),
        Check("batches form", Status.PASSED, "fine", "m"),
    )
    report = Report("t", {}, checks)
    assert held_to(report, None) == held_to(report, 0.9996) == report
    (failed,) = held_to(report, 0.9997).failed
    assert "cosine 0.999600, and 0.9997 at least is asked" in failed.figure
    assert "--min-cosine" in failed.remedy


def test_results_for_programs_and_for_people(world: World, tmp_path: Path, capsys, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    world.write(serving={"preferred_batch_sizes": [8]})  # a warning
    files = {name: tmp_path / f"out/{name}" for name in ("json", "junit", "summary", "sarif")}
    arguments = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert main(["deploy", "--github", *arguments]) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith("::") for line in out.splitlines()), out
    assert "next: clip-deploy serve build/search/model_repository" in err

    data = json.loads(files["json"].read_text())
    (search,) = data["deployments"]
    assert (data["ok"], data["exit_code"], data["failure"]) == (True, 0, None)
    assert [row["step"] for row in search["steps"]] == list(STEPS)
    assert {row["rung"]: row["status"] for row in search["ladder"]}["gpu"] == "skipped"

    suites = ElementTree.fromstring(files["junit"].read_text())
    assert [suite.get("name") for suite in suites] == ["deploy", "ladder", "search smoke-test"]
    ladder = suites[1]
    assert ladder.get("skipped") == "3"
    assert len(ladder.findall("testcase/skipped")) == 3

    text = files["summary"].read_text()
    assert "| ➖ | search: gpu |" in text
    assert "| ✅ | search: export |" in text
    assert page.read_text().startswith("before\n## ✅ deploy")

    log = json.loads(files["sarif"].read_text())
    assert len(log["runs"]) == 1
    assert main(["deploy", "--github", *arguments]) == 0  # all up to date: told all the same
    again, _ = capsys.readouterr()
    assert again == out
    assert json.loads(files["sarif"].read_text()) == log


def test_what_the_linter_finds_reaches_code_scanning_when_it_fails(world: World, tmp_path, capsys):
    world.deploy(until="render-config")
    job = Job(read(world.file)[0], None)
    for path in job.deployment.repository.rglob("model.onnx"):
        path.write_bytes(b"no graph")
    sarif = tmp_path / "lint.sarif"
    assert main(["deploy", "--from", "lint", "--sarif", str(sarif)]) == 7
    assert json.loads(sarif.read_text())["runs"][0]["results"]
    assert "would not be served rightly" in capsys.readouterr().err


def test_a_report_of_an_earlier_run_is_not_told_again(world: World, tmp_path, capsys):
    world.deploy()
    world.failures["lint"] = CheckFailed("wrong", remedy="look")
    world.write(checks={"strict": True})
    junit = tmp_path / "r.xml"
    assert main(["deploy", "--junit", str(junit)]) == 7
    names = [suite.get("name") for suite in ElementTree.fromstring(junit.read_text())]
    assert names == ["deploy", "ladder"]
    capsys.readouterr()


def test_two_deployments_live_in_one_file(world: World):
    text = world.file.read_text()
    world.file.write_text(text + "\n" + text.replace("[search.", "[other."))
    report = deploy(read(world.file))
    assert report.ok
    assert [row.deployment for row in report.rungs] == ["search"] * 5 + ["other"] * 5
    assert (world.out.parent / "other" / STATE).is_file()
    world.ran = []
    world.failures["export"] = ExportError("no", remedy="yes")
    report = deploy(read(world.file), force=True)
    assert world.ran == ["export"]
    assert {row.outcome.value for row in report.steps if row.deployment == "other"} == {
        "not reached"
    }


def test_towers_that_were_exported_before_and_are_not_asked_for_do_no_harm(world: World):
    world.write(encoder={"towers": ["image"]})
    exported(world.out, Tower.TEXT, graph=tower_graph(Tower.TEXT))
    assert world.deploy().ok
    assert not (world.repository / "clip_text_encoder").exists()
