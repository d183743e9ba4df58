"""docs/errors.md: every failure that the sources can raise, every known line of Triton's log, every answer of the gateway."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clip_deploy import errors
from clip_deploy.servers.logs import KNOWN_LINES, diagnose

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(errors.__file__).parent

_HEAD = """# Errors

Every failure ends a command with two lines, what and how to fix it, and with an exit code. Search this page for a part of
the message; ‹words› stand for what differs. What exits with 1 and a traceback is a bug.

- [Exit codes](#exit-codes)
- [Lines of Triton's log](#lines-of-tritons-log)
{gateway}- Messages: {classes}
- What the linter finds has [a page of its own](lint.md); what an alert means is in [operations.md](operations.md#alerts).

This page is written by `make bless` from the sources.
"""


class Site(NamedTuple):
    """A place that raises: its module, what it says and what it advises; ``kind`` is a class's name or a reason."""

    kind: str
    module: str
    message: str
    remedy: str


def page() -> str:
    """The whole page."""
    classes = _classes()
    by_kind = defaultdict(list)
    for site in sites({each.__name__ for each in classes}):
        by_kind[site.kind].append(site)
    links = ", ".join(f"[{c.__name__}](#{c.__name__.lower()})" for c in classes)
    gateway = _gateway()
    entry = "- [Answers of the gateway](#answers-of-the-gateway)\n" if gateway else ""
    parts = [
        _HEAD.format(gateway=entry, classes=links).strip(),
        _exit_codes(classes),
        _log_lines(),
        *gateway,
        *(_messages(each, by_kind[each.__name__]) for each in classes),
    ]
    return "\n\n".join(parts) + "\n"


def sites(kinds: set[str], *, reasoned: bool = False) -> list[Site]:
    """Every call of one of these names that has a remedy, by module and line.

    Args:
        kinds: names of classes.
        reasoned: whether they take a reason before the message, which then is the site's kind.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for call, known in _calls(ast.parse(path.read_text("utf-8")), kinds, {}):
            remedy = next((k.value for k in call.keywords if k.arg == "remedy"), None)
            texts = [_words(part, known) for part in call.args]
            kind = texts.pop(0) if reasoned and texts else _name(call.func) or ""
            if remedy is not None and texts and _says_something(texts[0]):
                found.append(Site(kind, module, texts[0], _words(remedy, known)))
    return found


def _calls(
    node: ast.AST, kinds: set[str], known: dict[str, ast.expr]
) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    """The calls inside a scope, each with the texts that names stand for there."""
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
        known = known | {
            target.id: each.value
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.Assign)
            and isinstance(each.value, (ast.Constant, ast.JoinedStr))
            for target in each.targets
            if isinstance(target, ast.Name)
        }
    if isinstance(node, ast.Call) and _name(node.func) in kinds:
        yield node, known
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, kinds, known)


def _classes() -> list[type[errors.ClipDeployError]]:
    """In the order of errors.py."""
    return [
        each
        for each in vars(errors).values()
        if isinstance(each, type)
        and issubclass(each, errors.ClipDeployError)
        and each is not errors.ClipDeployError
    ]


def _exit_codes(classes: list[type[errors.ClipDeployError]]) -> str:
    rows = [
        f"| {each.exit_code} | [{each.__name__}](#{each.__name__.lower()}) | {_first_line(each)} |"
        for each in classes
    ]
    head = ["| code | failure | means |", "|---|---|---|", "| 0 | | it did what it was asked |"]
    bug = "| 1 | | a bug: the traceback stays |"
    return "\n".join(["## Exit codes", "", *head, bug, *rows])


def _log_lines() -> str:
    parts = [
        "## Lines of Triton's log",
        "`serve`, `smoke-test` and the others read the log of the server that they start, and say what these lines mean. In "
        "a container: `docker compose logs triton`. The first that is found decides.",
    ]
    for row in KNOWN_LINES:
        found = diagnose(row.example)
        assert found is not None  # held by tests/test_logs.py
        waits = " Triton neither loads the model nor gives up." if row.hangs else ""
        parts.append(
            f"```\n{row.example}\n```\n\n{_sentence(found.cause)}{waits} **Fix:** {found.remedy}."
        )
    return "\n\n".join(parts)


def _gateway() -> list[str]:
    """Its reasons, where this checkout has a gateway and its libraries are there."""
    if not (PACKAGE / "gateway" / "problems.py").is_file() or not importlib.util.find_spec(
        "fastapi"
    ):
        return []
    from clip_deploy.gateway import problems

    raised = defaultdict(list)
    for kind, reason in problems._FAILURES:
        raised[reason].append(f"what [{kind.__name__}](#{kind.__name__.lower()}) says")
    for site in sites({"Problem"}, reasoned=True):
        raised[site.kind].append(f"{_cell(site.message)} → {_cell(site.remedy)}")
    rows = [
        f"| {status} | `{reason}` | {title} | {'<br>'.join(dict.fromkeys(raised[reason]))} |"
        for reason, (status, title) in problems.REASONS.items()
    ]
    text = (
        "## Answers of the gateway\n\nEvery error is `application/problem+json`: `type` ends in the reason, `detail` says what, "
        "`remedy` what to do, `request_id` finds it in the log. 503 carries Retry-After."
    )
    table = ["| status | reason | title | detail → remedy |", "|---|---|---|---|", *rows]
    return [text, "\n".join(table)]


def _messages(kind: type[errors.ClipDeployError], found: list[Site]) -> str:
    title = (
        f"## {kind.__name__}\n\n{inspect.cleandoc(kind.__doc__ or '')} Exit code {kind.exit_code}."
    )
    if not found:
        return title
    rows = [
        f"| `{module}` | {_cell(message)} | {_cell(remedy)} |"
        for _, module, message, remedy in found
    ]
    return "\n".join([title, "", "| from | says | fix |", "|---|---|---|", *dict.fromkeys(rows)])


def _name(function: ast.expr) -> str | None:
    return (
        function.id
        if isinstance(function, ast.Name)
        else function.attr
        if isinstance(function, ast.Attribute)
        else None
    )


def _words(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """A message as a reader sees it, with ‹words› for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _words(node.value, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left, known) + _words(node.right, known)
    if isinstance(node, ast.IfExp):
        return f"{_words(node.body, known)} / {_words(node.orelse, known)}"
    if isinstance(node, ast.Name) and node.id in known:
        return _words(known[node.id], {})
    if isinstance(node, (ast.Name, ast.Attribute)):
        return f"‹{(_name(node) or '').strip('_').replace('_', ' ').lower()}›"
    return "‹…›"


def _says_something(message: str) -> bool:
    return any(
        character.isalpha() for part in message.split("‹") for character in part.split("›")[-1]
    )


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;").strip()
