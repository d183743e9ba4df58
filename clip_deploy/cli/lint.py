"""``clip-deploy lint``: is a repository right, before any server runs?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clip_deploy.cli.output import plain, say, show, write, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clip_deploy.lint import LintReport, Target

_FORMATS = ("text", "json", "sarif", "junit", "github")


def lint(
    repositories: Annotated[
        Optional[list[Path]],
        typer.Argument(
            metavar="REPOSITORY...", help="Model repositories: folders of models' folders."
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            metavar="cpu|gpu|gpu:9.0|auto",
            help="What they will run on, and its compute capability; auto asks this machine.",
        ),
    ] = "auto",
    triton_release: Annotated[
        Optional[str],
        typer.Option(
            metavar="YY.MM",
            help="The server's release. Without it, graphs are held against 24.10, and plans' versions are left alone.",
        ),
    ] = None,
    backend: Annotated[
        Optional[list[str]],
        typer.Option(metavar="NAME", help="One more backend that the server has. May be repeated."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to say it.")
    ] = "text",
    output: Annotated[
        Optional[Path], typer.Option(metavar="FILE", help="Where to write it; stdout by default.")
    ] = None,
    select: Annotated[
        Optional[list[str]],
        typer.Option(metavar="CODES", help="Look for these only: CD4,CD501. May be repeated."),
    ] = None,
    ignore: Annotated[
        Optional[list[str]],
        typer.Option(metavar="CODES", help="Do not look for these. May be repeated."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    run: Annotated[
        bool,
        typer.Option("--run", help="Also run each graph on the CPU, at several batch sizes."),
    ] = False,
    explain: Annotated[
        Optional[str],
        typer.Option(metavar="CODE|all", help="Say what a rule means, and show it."),
    ] = None,
) -> None:
    """Judge Triton model repositories without a server.

    Nothing in them is executed, unless --run asks for the graphs. Exit code 7 when there is an error, or with --strict a
    warning.
    """
    from clip_deploy.errors import CheckFailed, ConfigError
    from clip_deploy.lint import lint as judge
    from clip_deploy.lint import target as make_target

    if explain is not None:
        sys.stdout.write(_explanation(explain) + "\n")
        return
    if not repositories:
        raise ConfigError("nothing to lint", remedy="name a model repository")
    if format_ not in _FORMATS:
        raise ConfigError(f"--format {format_!r} is unknown", remedy=f"use {', '.join(_FORMATS)}")
    report = judge(
        repositories,
        make_target(target, triton_release, more=backend or ()),
        select=_codes(select),
        ignore=_codes(ignore),
        run=run,
    )
    _print(report, format_, output, strict=strict)
    if not report.ok(strict=strict):
        raise typer.Exit(CheckFailed.exit_code)


def server_target(launcher: str, release_name: str) -> Target:
    """What a launcher's server has."""
    from clip_deploy.deploy.checking import server_target as told

    return told(launcher, release_name)


def require_clean(repository: Path, target: Target, models: Sequence[str] = ()) -> LintReport:
    """Lint a repository before anything is done with it: one line when it is right, all findings when it is not.

    Raises:
        CheckFailed: there is an error.
    """
    from clip_deploy.errors import CheckFailed
    from clip_deploy.lint import Severity
    from clip_deploy.lint import lint as judge
    from clip_deploy.report.findings import findings

    report = judge([repository], target, models=models)
    if not report.ok():
        show(findings(report), beside=Path("-"))
        raise CheckFailed(
            f"{repository} would not be served rightly: {report.summary()}",
            remedy="see the lines marked ✗ above; clip-deploy lint shows them again",
        )
    hint = f"; clip-deploy lint {repository} shows them" if report.count(Severity.WARNING) else ""
    say(f"lint: {report.summary()}{hint}")
    return report


def _print(report: LintReport, format_: str, output: Path | None, *, strict: bool) -> None:
    from clip_deploy.report.findings import as_checks, findings, sarif, workflow_commands
    from clip_deploy.report.junit import junit

    place = output or Path("-")
    if format_ == "json":
        write_json(report.to_json(), place)
    elif format_ == "sarif":
        write_json(sarif(report), place)
    elif format_ == "junit":
        write(junit(as_checks(report, strict=strict)), place)
    elif format_ == "github":
        write(workflow_commands(report), place)
    elif output is None:
        show(findings(report))
    else:
        write(plain(findings(report)), output)


def _codes(given: list[str] | None) -> tuple[str, ...]:
    return tuple(code.strip() for each in given or () for code in each.split(",") if code.strip())


def _explanation(code: str) -> str:
    from clip_deploy.errors import ConfigError
    from clip_deploy.lint import RULES
    from clip_deploy.lint.explain import explanation, ordered

    if code.lower() == "all":
        return "\n\n".join(explanation(rule) for rule in ordered())
    if code.upper() not in RULES:
        raise ConfigError(
            f"there is no rule {code}", remedy="clip-deploy lint --explain all lists them"
        )
    return explanation(RULES[code.upper()])
