"""The linter's errors taken to a real Triton: what the linter refuses, the server refuses too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clip_deploy.lint import RULES, Severity

from .lint_examples import PYTHON, build
from .published import PUBLISHED, write
from .verdicts import ServerDied, verdicts

pytestmark = pytest.mark.server
# What answers warmup samples in place of a graph.
STAND_IN = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
CASES = Path(__file__).parent / "cases"

# Rules whose bad example the embedded server cannot judge, and why. Where another backend is needed, the verdict of a
# Triton that has it is among the cases of tests/test_lint.py.
NOT_HERE = {
    "the ONNX Runtime backend, which has rules of its own": (
        *("CD401", "CD402", "CD403", "CD404", "CD405", "CD406", "CD410", "CD412", "CD512", "CD515"),
        *("CD701", "CD702", "CD703", "CD705", "CD707", "CD709"),
    ),
    "the PyTorch backend": ("CD309",),
    "a GPU and TensorRT": ("CD710", "CD711", "CD721", "CD722", "CD723", "CD724", "CD725"),
    "Triton loads it and answers wrongly": (
        *("CD901", "CD902", "CD903", "CD904", "CD905", "CD906"),
        *("CD951", "CD952", "CD953", "CD954"),
    ),
    "the whole server goes down or hangs": ("CD106", "CD208", "CD518"),
    "the server refuses it or goes down, by chance: a test of its own": ("CD854",),
}


# Rules whose good example needs what the embedded server has not.
GOOD_ELSEWHERE = {
    "CD302": "ONNX Runtime",
    "CD307": "a repository agent",
    "CD308": "ONNX Runtime",
    "CD310": "an environment on the server",
}


def _stand_in(repository: Path, prefix: str, into: Path) -> list[str]:
    """Move a repository's models into another under names of their own; Python runs those that ONNX Runtime would."""
    names = sorted(folder.name for folder in repository.iterdir())
    for name in names:
        folder = repository / name
        config = folder / "config.pbtxt"
        data = config.read_bytes()
        for each in names:
            data = re.sub(
                rb'(?<=["\'])%s(?=["\'])' % each.encode(), f"{prefix}{each}".encode(), data
            )
        data = data.replace(b'"onnxruntime"', b'"python"')
        config.write_bytes(data)
        graph, code = folder / "1" / "model.onnx", folder / "1" / "model.py"
        if graph.exists() and not code.exists():
            code.write_text(STAND_IN)
        folder.rename(into / f"{prefix}{name}")
    return [f"{prefix}{name}" for name in names]


@pytest.mark.parametrize("kind", ["bad", "good"])
def test_triton_refuses_every_errors_bad_example_and_takes_the_good_one(kind: str, tmp_path: Path):
    codes = {c for c, rule in RULES.items() if rule.severity is Severity.ERROR}
    skipped = {code for each in NOT_HERE.values() for code in each}
    skipped |= set(GOOD_ELSEWHERE) if kind == "good" else set()
    assert skipped <= codes
    repository = tmp_path / "model_repository"
    repository.mkdir()
    models: dict[str, list[str]] = {}
    for code in sorted(codes - skipped):
        example = getattr(RULES[code], kind)
        if example.gpu:
            continue
        built = build(example, tmp_path / code)
        models[code] = _stand_in(built, f"{code.lower()}_", repository)
    ready = verdicts(repository, tmp_path / "triton.log")
    if kind == "bad":
        wrong = [code for code, names in models.items() if all(ready[name] for name in names)]
    else:
        wrong = [code for code, names in models.items() if not all(ready[name] for name in names)]
    assert not wrong


@pytest.mark.parametrize("kind", ["bad", "good"])
def test_a_warmup_above_the_maximum_is_refused_or_takes_the_server_down(kind: str, tmp_path: Path):
    repository = tmp_path / "model_repository"
    repository.mkdir()
    built = build(getattr(RULES["CD854"], kind), tmp_path / "example")
    names = _stand_in(built, "cd854_", repository)
    try:
        ready = verdicts(repository, tmp_path / "triton.log")
    except ServerDied:
        ready = dict.fromkeys(names, False)
    assert all(ready[name] for name in names) == (kind == "good")


def test_triton_serves_the_published_examples(tmp_path: Path):
    repository = tmp_path / "model_repository"
    repository.mkdir()
    names: list[str] = []
    for number, models in enumerate(PUBLISHED.values()):
        configured = {name: model for name, model in models.items() if model.config is not None}
        built = write(tmp_path / str(number), configured)
        for config in built.glob("*/config.pbtxt"):  # platforms have no stand-in, backends do
            text = config.read_text("utf-8")
            text = text.replace('platform: "onnxruntime_onnx"', 'backend: "onnxruntime"')
            config.write_text(text, "utf-8")
        names += _stand_in(built, f"published_{number}_", repository)
    ready = verdicts(repository, tmp_path / "triton.log")
    assert {name for name in names if not ready[name]} == set()


@pytest.mark.parametrize("part", range(4))
def test_the_configs_are_still_judged_as_they_were(part: int, tmp_path: Path):
    """tests/cases/configs.json against this server, in four parts: the truth that the linter's tests are held to."""
    cases = json.loads((CASES / "configs.json").read_text("utf-8"))
    repository = tmp_path / "model_repository"
    expected = {}
    for name in sorted(cases)[part::4]:
        case, folder = cases[name], repository / name.replace("-", "_")
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(PYTHON)
        data = bytes.fromhex(case["hex"]) if "hex" in case else case["config"].encode()
        (folder / "config.pbtxt").write_bytes(data)
        expected[folder.name] = case["loads"]
    ready = verdicts(repository, tmp_path / "triton.log")
    assert {name: ready[name] for name in expected} == expected
