"""``clip-deploy init`` and ``clip-deploy deploy``: the whole way, from one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.options import JsonFile, JunitFile
from clip_deploy.cli.output import say, show, write, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clip_deploy.deploy import DeployReport

_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
_STEPS = "export|convert|rehearse|tensorrt-check|build-trt|render-config|lint|smoke-test|publish"
_RUNGS = "lint|embedded|tensorrt-check|container|gpu"

File = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="The file that describes the deployments.")
]


def init(
    model: Annotated[
        str,
        typer.Argument(
            help="An open_clip architecture, hf-hub:org/name, a checkpoint folder, or your model config (.json)."
        ),
    ] = "ViT-B-32",
    pretrained: Annotated[
        Optional[str],
        typer.Option(
            metavar="SOURCE",
            help="An open_clip tag, a checkpoint file or folder, or random[:SEED]. By default random for what has no weights of its own.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="What the deployment is called.")
    ] = "search",
    file: File = Path("clip-deploy.toml"),
    print_schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON schema for editors, and write nothing."),
    ] = False,
) -> None:
    """Write a clip-deploy.toml to begin with.

    It works as it stands with the embedded server. Every other key is a comment with its default, and so is what this
    machine has. What is there already is never overwritten.
    """
    from clip_deploy.deploy.schema import schema
    from clip_deploy.deploy.starting import start

    if print_schema:
        write_json(schema(), Path("-"))
        return
    if pretrained is None and _needs_weights(model):
        pretrained = "random"
        say(
            "random weights: everything works, and the vectors mean nothing. Name real ones with --pretrained, or in the file."
        )
    for path in start(file, model, pretrained, name):
        typer.echo(str(path))
    where = "" if file == Path("clip-deploy.toml") else f" --file {file}"
    say(f"next: clip-deploy deploy --dry-run{where}")


def _needs_weights(model: str) -> bool:
    has_own = model.startswith(("hf-hub:", "local-dir:")) or Path(model).is_dir()
    return not has_own


def deploy(
    names: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[NAME]...", help="Deployments of the file; all by default."),
    ] = None,
    file: File = Path("clip-deploy.toml"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and why, and run nothing.")
    ] = False,
    start: Annotated[
        Optional[str],
        typer.Option(
            "--from", metavar=_STEPS, help="The first step; what lies before it is taken as it is."
        ),
    ] = None,
    until: Annotated[
        Optional[str], typer.Option("--until", metavar="STEP", help="The last step.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run every chosen step, although nothing has changed.")
    ] = False,
    require: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar=_RUNGS,
            help="A rung of the ladder that must not be skipped, beside those that the file requires. May be repeated.",
        ),
    ] = None,
    json_file: JsonFile = None,
    junit_file: JunitFile = None,
    summary: Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="Also write the result as Markdown (- for stdout)."),
    ] = None,
    sarif: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE", help="Also write what the linter found as SARIF (- for stdout)."
        ),
    ] = None,
    github: Annotated[
        bool,
        typer.Option(
            "--github",
            help="In a job of GitHub Actions: put the result on the job's page, and what the linter found beside its lines.",
        ),
    ] = False,
) -> None:
    """Take a model all the way, from one file.

    export → convert → rehearse → tensorrt-check → build-trt → render-config → lint → smoke-test → publish; a step is left
    out when nothing that it reads has changed. The first failure ends it, with the exit code of its kind.
    """
    from clip_deploy.cli.progress import LiveSteps
    from clip_deploy.deploy import chosen, read
    from clip_deploy.deploy import deploy as run
    from clip_deploy.errors import ConfigError

    places = (json_file, junit_file, summary, sarif)
    if sum(str(place) == "-" for place in places) + github > 1:
        raise ConfigError("two results for stdout", remedy="write all but one of them to files")
    found = chosen(read(file), names or ())
    try:
        with LiveSteps(quiet=dry_run) as watch:
            report = run(
                found,
                start=start,
                until=until,
                force=force,
                dry_run=dry_run,
                require=_known_rungs(require or []),
                watch=watch,
            )
    except KeyboardInterrupt:
        say("interrupted; what is done is kept, and the same command goes on from there")
        raise typer.Exit(_INTERRUPTED) from None
    stdout = any(str(place) == "-" for place in places) or github
    show(_table(report), beside=Path("-") if stdout else None)
    _write(report, json_file, junit_file, summary, sarif)
    if github:
        _tell_github(report)
    if report.failure is not None:
        raise report.failure
    for line in _next(report):
        say(f"next: {line}")


def _known_rungs(names: list[str]) -> list[str]:
    from clip_deploy.deploy import RUNGS
    from clip_deploy.errors import ConfigError

    given = [name for each in names for name in each.split(",")]
    for name in given:
        if name not in RUNGS:
            raise ConfigError(f"the ladder has no rung {name!r}", remedy=f"use {', '.join(RUNGS)}")
    return given


def _write(
    report: DeployReport,
    json_file: Path | None,
    junit_file: Path | None,
    summary: Path | None,
    sarif_file: Path | None,
) -> None:
    from clip_deploy.report.junit import junit

    write_json(report.to_json(), json_file)
    write(junit(*report.reports()), junit_file)
    write(_markdown(report), summary)
    if sarif_file is not None:
        write_json(_sarif(report), sarif_file)


def _markdown(report: DeployReport) -> str:
    from clip_deploy.report.markdown import markdown

    return markdown(report.reports(), folded=[each.title for each in report.details])


def _sarif(report: DeployReport) -> dict[str, object]:
    """What the linter found in every deployment, as one log: a run each, and none where it was not asked."""
    import json

    from clip_deploy.deploy.job import LINT_SARIF, REPORTS
    from clip_deploy.report.findings import empty_sarif

    log = empty_sarif()
    for each in report.deployments:
        path = each.out / REPORTS / LINT_SARIF
        if report.reached(each.name, "lint") and path.is_file():
            log["runs"] += json.loads(path.read_text("utf-8"))["runs"]
    return log


def _tell_github(report: DeployReport) -> None:
    """Annotations to stdout, where the runner reads them; the table to the job's page, where there is one."""
    import sys

    from clip_deploy.deploy.job import LINT_NOTES, REPORTS
    from clip_deploy.errors import ConfigError
    from clip_deploy.files import storage

    for each in report.deployments:
        path = each.out / REPORTS / LINT_NOTES
        if report.reached(each.name, "lint") and path.is_file():
            sys.stdout.write(path.read_text("utf-8"))
    if place := os.environ.get("GITHUB_STEP_SUMMARY"):
        with storage(Path(place), ConfigError), Path(place).open("a", encoding="utf-8") as file:
            file.write(_markdown(report) + "\n")


def _next(report: DeployReport) -> list[str]:
    """What to do now, for each deployment that went all the way."""
    if report.dry_run:
        return ["clip-deploy deploy"]
    lines = []
    for each in report.deployments:
        if not report.reached(each.name, "smoke-test"):
            lines.append(f"clip-deploy deploy {each.name}")
        elif each.publish is not None:
            lines.append(f"clip-deploy published list {each.publish.destination}")
        else:
            launcher = "" if each.starts == "embedded" else f" --launcher {each.starts}"
            lines.append(f"clip-deploy serve {each.repository}{launcher} --grpc-port 8001")
    return lines


def _table(report: DeployReport) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from clip_deploy.report.grid import grid
    from clip_deploy.report.table import LOOKS

    rows = grid("", "step", "", "seconds", "")
    for step in report.steps:
        mark, style, _ = LOOKS[step.outcome.status]
        name = f"{step.deployment}: {step.step}" if len(report.deployments) > 1 else step.step
        seconds = f"{step.seconds:.1f}" if step.seconds >= 0.05 else ""
        rows.add_row(
            Text(mark, style), Text(name), Text(step.outcome.value, style), seconds, Text(step.said)
        )
    if report.dry_run:
        return rows
    ladder = grid("", "rung", "", "")
    for rung in report.rungs:
        mark, style, _ = LOOKS[rung.status]
        name = f"{rung.deployment}: {rung.name}" if len(report.deployments) > 1 else rung.name
        ladder.add_row(
            Text(mark, style), Text(name), Text(rung.status.value, style), Text(rung.said)
        )
    return Group(rows, ladder)
