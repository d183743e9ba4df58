"""A model repository judged before any server runs: rules in a table, findings with places. Nothing is executed."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import ConfigError
from clip_deploy.lint import rules as _rules  # noqa: F401  # fills the table
from clip_deploy.lint.disk import exists, folders, is_folder
from clip_deploy.lint.findings import RULES, Example, Finding, Hit, Rule, Severity
from clip_deploy.lint.model import CONFIG, Model, Repository
from clip_deploy.lint.suppression import suppressions
from clip_deploy.lint.target import Target, target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "RULES",
    "Example",
    "Finding",
    "LintReport",
    "Rule",
    "Severity",
    "Target",
    "lint",
    "target",
]

# Rules that make sense although the config cannot be parsed.
_WITHOUT_CONFIG = ("CD101", "CD103", "CD2")


@dataclass(frozen=True, slots=True)
class LintReport:
    """What was found, and what was not looked at.

    ``unseen`` says in sentences which kinds of defects this run cannot have found.
    """

    findings: tuple[Finding, ...]
    models: tuple[str, ...]
    suppressed: int
    unseen: tuple[str, ...]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    def ok(self, *, strict: bool = False) -> bool:
        """No errors; with ``strict`` no warnings either."""
        return not self.count(Severity.ERROR) and not (strict and self.count(Severity.WARNING))

    def summary(self) -> str:
        counts = [(self.count(s), s.value) for s in Severity]
        parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in counts if n]
        models = f"{len(self.models)} model{'s' * (len(self.models) != 1)}"
        return f"{', '.join(parts) or 'nothing to complain about'} in {models}"

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "summary": {s.value: self.count(s) for s in Severity}
            | {"models": len(self.models), "suppressed": self.suppressed},
            "unseen": list(self.unseen),
        }


def lint(
    paths: Sequence[Path],
    target: Target,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    models: Sequence[str] = (),
    run: bool = False,
) -> LintReport:
    """Judge model repositories.

    Args:
        paths: the repositories.
        target: what they are meant for.
        select: codes, or beginnings of codes, to look for; all by default.
        ignore: codes, or beginnings of codes, to leave out.
        models: names of the models to judge, among all that lie there; all by default.
        run: also run the graphs on the CPU, which needs onnxruntime.

    Raises:
        ConfigError: a path is no repository, or a code is unknown.
    """
    chosen = _chosen(select, ignore, run=run)
    findings: list[Finding] = []
    judged: list[str] = []
    backends: set[str] = set()
    suppressed = 0
    repositories = [_opened(path) for path in paths]
    everything = {k: m for each in reversed(repositories) for k, m in each.models.items()}
    for repository in repositories:
        repository.known = everything | repository.models
        for model in repository.models.values():
            if models and model.name not in models:
                continue
            judged.append(model.name)
            kept, dropped = _lint_model(model, target, chosen, backends)
            findings += kept
            suppressed += dropped
            model.forget()
    return LintReport(
        tuple(findings), tuple(judged), suppressed, tuple(_unseen(backends, run=run, target=target))
    )


def _chosen(select: Sequence[str], ignore: Sequence[str], *, run: bool) -> list[Rule]:
    for code in (*select, *ignore):
        if not any(known.startswith(code.upper()) for known in RULES):
            raise ConfigError(
                f"there is no rule {code}",
                remedy="see docs/lint.md, or clip-deploy lint --explain all",
            )
    wanted, unwanted = tuple(c.upper() for c in select) or ("CD",), tuple(c.upper() for c in ignore)
    rows = [
        rule
        for code, rule in sorted(RULES.items())
        if code.startswith(wanted) and not (unwanted and code.startswith(unwanted))
    ]
    return [rule for rule in rows if run or not rule.runs]


def _opened(path: Path) -> Repository:
    if not is_folder(path):
        raise ConfigError(
            f"there is no model repository at {path}",
            remedy="name the folder that holds the models' folders",
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be read", remedy="check its permissions")
    if exists(path / CONFIG) and not any(exists(each / CONFIG) for each in folders(path)):
        raise ConfigError(
            f"{path} is a model's folder, not a repository",
            remedy=f"name its parent, {path.resolve().parent}",
        )
    repository = Repository(path)
    if not repository.models:
        raise ConfigError(
            f"{path} holds no models", remedy="name the folder that holds the models' folders"
        )
    return repository


def _lint_model(
    model: Model, target: Target, rules: list[Rule], backends: set[str]
) -> tuple[list[Finding], int]:
    """(findings, how many were suppressed); the model's backend joins ``backends``."""
    kept: list[Finding] = []
    try:
        silenced = list(suppressions(model.document)) if model.has_config else []
        backends.add(model.backend)
    except _SURPRISES as error:
        return [_not_judged("the model", model, error)], 0
    dropped = 0
    for rule in rules:
        if model.has_config and not model.is_parsed and not rule.code.startswith(_WITHOUT_CONFIG):
            continue
        try:
            hits = list(rule.check(model, target))
        except OSError as error:  # a file that vanished, or may not be read
            kept.append(_unreadable(error, model))
            continue
        except _SURPRISES as error:
            kept.append(_not_judged(rule.code, model, error))
            continue
        for hit in hits:
            line = hit.place.line if hit.place else None
            if any(each.covers(rule.code, line) for each in silenced):
                dropped += 1
            else:
                kept.append(_finding(rule, model, hit))
    kept = list(dict.fromkeys(kept))  # several rules may meet the same file that cannot be read
    kept.sort(
        key=lambda finding: (finding.path, finding.line or 0, finding.column or 0, finding.code)
    )
    return kept, dropped


# What untrusted files can make of code that did not expect them: said, and the other rules go on.
_SURPRISES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def _not_judged(what: str, model: Model, error: Exception) -> Finding:
    """A finding, and no silence: nobody knows what this rule would have said."""
    reason = f"{type(error).__name__}: {str(error)[:120]}"
    hit = Hit(f"{what} could not be judged ({reason})", remedy="report this file to clip-deploy")
    return _finding(RULES["CD208"], model, hit)


def _unreadable(error: OSError, model: Model) -> Finding:
    is_named = isinstance(error.filename, (str, bytes))
    file = Path(os.fsdecode(error.filename)) if is_named else model.folder
    return _finding(RULES["CD208"], model, Hit(f"cannot be read: {error.strerror}", file=file))


def _finding(rule: Rule, model: Model, hit: Hit) -> Finding:
    file = hit.file or (model.config_path if model.has_config else model.folder)
    written = model.document.line(hit.place.line) if hit.place and hit.fix is not None else None
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=rule.severity,
        model=_printable(model.name),
        path=_printable(str(file)),
        message=_printable(hit.message),
        line=hit.place.line if hit.place else None,
        column=hit.place.column if hit.place else None,
        fix=None if hit.fix is None else _printable(hit.fix),
        remedy=None if hit.remedy is None else _printable(hit.remedy),
        source=written,
    )


def _printable(text: str) -> str:
    """Text that every output takes; names of files need not be."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _unseen(backends: set[str], *, run: bool, target: Target) -> Iterator[str]:
    if "onnxruntime" in backends and importlib.util.find_spec("onnx") is None:
        yield "graphs were not read; pip install 'clip-deploy[lint]' does it"
    if "tensorrt" in backends and not target.release_is_given:
        yield "plans were not held against a TensorRT version; --triton-release names it"
    if "onnxruntime" in backends and not run:
        yield "graphs were not run; --run finds frozen batch sizes, and rows that influence one another"
