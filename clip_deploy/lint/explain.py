"""Rules in words: for ``lint --explain`` and for docs/lint.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.lint.findings import RULES

if TYPE_CHECKING:
    from clip_deploy.lint.findings import Example, Rule

_HEAD = """# The linter's rules

`clip-deploy lint REPOSITORY…` judges a Triton model repository before any server runs. An **error** is something that
Triton refuses, or answers wrongly; a **warning** loads and hurts; a **note** is worth knowing.

The examples are changes to one small model, `clip_image`:

```
clip_image/
├── config.pbtxt
└── 1/model.onnx      pixel_values FP32 [batch, 3, 8, 8] → image_embeds FP32 [batch, 4]
```

```
name: "clip_image"
backend: "onnxruntime"
max_batch_size: 8
input { name: "pixel_values" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "image_embeds" data_type: TYPE_FP32 dims: [ 4 ] }
```

A finding that you know about is silenced where it stands, with a reason: at the end of the line, alone on the line
before, or above the first field for the whole model.

```
max_batch_size: 8  # clip-deploy: ignore CD508 the clients send whole batches
```

This page is written by `make bless`; `clip-deploy lint --explain CODE` shows a part of it.
"""


def page() -> str:
    """docs/lint.md: a table of all rules, then each with its examples."""
    rows = [f"| [{r.code}](#{_anchor(r)}) | {r.name} | {r.severity.value} |" for r in ordered()]
    table = "\n".join(["| code | name | severity |", "|---|---|---|", *rows])
    return "\n\n".join([_HEAD.rstrip(), table, *(explanation(rule) for rule in ordered())]) + "\n"


def ordered() -> list[Rule]:
    """All rules by code."""
    return [RULES[code] for code in sorted(RULES)]


def explanation(rule: Rule) -> str:
    """One rule as Markdown: what it is, why, and an example of each kind."""
    heading = f"## {rule.code} {rule.name}"
    asked = " Only with `--run`." if rule.runs else ""
    severity = f"*{rule.severity.value.capitalize()}.* {rule.why}{asked}"
    return "\n\n".join(
        [heading, severity, f"Wrong:\n\n{_example(rule.bad)}", f"Right:\n\n{_example(rule.good)}"]
    )


def _example(example: Example) -> str:
    parts = [_block(example.config)] if example.config else []
    parts += [_shown(f"`{path}`", content) for path, content in example.files.items()]
    parts += [_shown(f"another model, `{n}`", content) for n, content in example.models.items()]
    if example.gpu:
        parts.append("with `--target gpu`")
    return "\n\n".join(parts) or "the model as it is above"


def _shown(title: str, content: str) -> str:
    """A text below its title, or a word of what it is beside it."""
    return f"{title}:\n\n{_block(content)}" if "\n" in content else f"{title}: {content or 'empty'}"


def _block(text: str) -> str:
    return f"```\n{text.strip()}\n```"


def _anchor(rule: Rule) -> str:
    return f"{rule.code} {rule.name}".lower().replace(" ", "-")
