"""The GitHub Action, the GitLab template and the workflows: what their publishers' schemas allow, and what exists here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from clip_deploy.cli import app

ROOT = Path(__file__).parent.parent
# A file → its publisher's schema, and a change that the schema must refuse.
FILES = {
    "action.yml": ("vendor.github-actions", "using: composite", "using: nothing"),
    "examples/ci/github-workflow.yml": ("vendor.github-workflows", "runs-on:", "run-on:"),
    "templates/deploy/gitlab-ci.yml": ("vendor.gitlab-ci", "when: always", "when: often"),
    "examples/ci/gitlab-ci.yml": ("vendor.gitlab-ci", "resource_group: publish", "needs: 3"),
}


def _loaded(name: str):
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe", pure=True)
    return yaml.load((ROOT / name).read_text("utf-8"))


@pytest.mark.processes
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_its_publishers_schema_allows(name: str, tmp_path: Path):
    pytest.importorskip("check_jsonschema", reason="pip install 'clip-deploy[dev]'")
    schema, right, wrong = FILES[name]

    def check(path: Path) -> int:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    # A hidden job may hold anything; under its own name it is judged.
    text = (ROOT / name).read_text("utf-8").replace("\n.clip-deploy:", "\nclip-deploy:")
    assert right in text
    copy = tmp_path / Path(name).name
    for content, judged in ((text, True), (text.replace(right, wrong), False)):
        copy.write_text(content)
        assert (check(copy) == 0) is judged, content


def _scripts() -> list[str]:
    found = [step["run"] for step in _loaded("action.yml")["runs"]["steps"] if "run" in step]
    job = _loaded("templates/deploy/gitlab-ci.yml")[".clip-deploy"]
    found += [*job["before_script"], *job["script"]]
    jobs = _loaded("examples/ci/gitlab-ci.yml").values()
    options = [
        j["variables"]["CLIP_DEPLOY_OPTIONS"]
        for j in jobs
        if isinstance(j, dict) and "variables" in j
    ]
    return [*found, *(f"clip-deploy deploy {each}" for each in options)]


def test_every_command_in_them_exists_with_its_options():
    root = typer.main.get_command(app)
    seen = 0
    for script in _scripts():
        for command in re.findall(r"clip-deploy ([a-z][a-z-]*)", script):
            assert command in root.commands, script
            seen += 1
        if "clip-deploy deploy" in script:
            known = {o for p in root.commands["deploy"].params for o in p.opts}
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", script):
                assert option in known, option
    assert seen >= 5


@pytest.mark.processes
def test_every_script_is_one_for_bash():
    for script in _scripts():
        done = subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_inputs_reach_scripts_through_the_environment_only():
    action = _loaded("action.yml")
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", ""), "an input in a script is run as code"
    text = (ROOT / "action.yml").read_text("utf-8")
    assert set(re.findall(r"inputs\.([a-z-]+)", text)) == set(action["inputs"])
    with_ = [
        step["with"]
        for job in _loaded("examples/ci/github-workflow.yml")["jobs"].values()
        for step in job["steps"]
        if step.get("uses", "").startswith("clip-deploy/")
    ]
    assert with_
    for given in with_:
        assert set(given) <= set(action["inputs"])


def test_extras_and_rungs_that_they_name_exist():
    from clip_deploy.deploy import RUNGS, STEPS
    from clip_deploy.deploy.reading import tomllib

    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "optional-dependencies"
        ]
    )
    text = "\n".join((ROOT / name).read_text("utf-8") for name in FILES)
    for found in re.findall(
        r"(?:extras|EXTRAS): ([a-z0-9,-]+)$|^    default: (export[a-z,]+)$", text, re.M
    ):
        assert set("".join(found).split(",")) - {"publish"} <= extras
    for found in re.findall(r"require: ([a-z,-]+)", text):
        assert set(found.split(",")) <= set(RUNGS)
    for found in re.findall(r"until: ([a-z-]+)", text):
        assert found in STEPS


@pytest.mark.processes
def test_the_actions_last_script_asks_for_what_was_chosen(tmp_path: Path):
    """The script itself, with a stand-in for clip-deploy that prints its arguments."""
    script = _loaded("action.yml")["runs"]["steps"][-1]["run"]
    program = tmp_path / "clip-deploy"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    given = {
        "FILE": "a b.toml",
        "NAMES": "one two",
        "UNTIL": "lint",
        "REQUIRE": "",
        "RESULTS": "/r",
    }
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **given},
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.splitlines() == shlex.split(
        "deploy --file 'a b.toml' --github --json /r/deploy.json --junit /r/deploy.xml "
        "--sarif /r/lint.sarif --until lint -- one two"
    )
