"""Tiers, guards and shared fixtures.

A test without a marker needs the base install only, and may neither start a process nor open a connection. ``--require
export,server`` turns the skip of a tier into a failure, so that CI cannot go green by skipping.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared"

TIERS = {
    "export": "pip install 'clip-deploy[export]'",
    "server": "pip install 'clip-deploy[server]' && clip-deploy server install",
    "browser": "apt-get install chromium, and pip install 'clip-deploy[dev]'",
    "gpu": "a machine with an NVIDIA GPU and pip install 'clip-deploy[gpu]'",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require", default="", help="tiers whose absence is a failure: export,server,browser,gpu"
    )
    parser.addoption(
        "--bless", action="store_true", help="rewrite tests/golden/ and the generated docs"
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(filter(None, config.getoption("--require").split(","))) - set(TIERS)
    if unknown:
        raise pytest.UsageError(
            f"--require: no tier named {', '.join(unknown)}; there are {', '.join(TIERS)}"
        )


def pytest_report_header(config: pytest.Config) -> str:
    return "tiers: " + ", ".join(f"{tier} {'yes' if _has(tier) else 'no'}" for tier in TIERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {tier: how for tier, how in TIERS.items() if not _has(tier)}
    # Asked before any item: a module whose imports are missing has none.
    for tier in missing.keys() & set(config.getoption("--require").split(",")):
        pytest.exit(
            f"--require {tier}: it is not available here. To get it: {missing[tier]}", returncode=1
        )
    for item in items:
        for tier, how in missing.items():
            if item.get_closest_marker(tier):
                item.add_marker(pytest.mark.skip(reason=f"needs the {tier} tier: {how}"))


def _has(tier: str) -> bool:
    if tier == "export":
        names = ("torch", "open_clip", "onnx", "onnxscript", "onnxruntime")
        return all(importlib.util.find_spec(name) for name in names)
    if tier == "browser":
        names = ("playwright", "fastapi", "lancedb")
        return bool(shutil.which("chromium") and all(map(importlib.util.find_spec, names)))
    if tier == "gpu":
        return bool(shutil.which("nvidia-smi") and importlib.util.find_spec("tensorrt"))
    from clip_deploy.errors import MissingDependency
    from clip_deploy.servers import install

    try:
        install.installed()
    except MissingDependency:
        return False
    return bool(importlib.util.find_spec("onnxruntime"))


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the base tier touch neither other processes nor the network."""
    if any(request.node.get_closest_marker(tier) for tier in (*TIERS, "processes")):
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test of the base tier starts a process or opens a connection")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of one width and without colours, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))


@pytest.fixture(scope="session")
def tiny_exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with both towers of tiny random models, by name."""
    from clip_deploy.export import export
    from clip_deploy.spec import EncoderSpec

    out = tmp_path_factory.mktemp("exports")
    for name in ("tiny-clip", "tiny-sigmoid"):
        spec = EncoderSpec(str(HERE / "models" / f"{name}.json"), "random", max_batch=8)
        export(spec, out / name)
    return {name: out / name for name in ("tiny-clip", "tiny-sigmoid")}


@pytest.fixture(scope="session")
def tiny_repository(
    tiny_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A repository with both towers of the tiny CLIP, for the embedded server."""
    from clip_deploy.artifacts import exported_models
    from clip_deploy.engines import BACKENDS
    from clip_deploy.repository import assemble
    from clip_deploy.spec import ServingSpec

    repository = tmp_path_factory.mktemp("served") / "model_repository"
    for model in exported_models([tiny_exports["tiny-clip"]]):
        assemble(BACKENDS["python"].build(model), ServingSpec(), repository)
    return repository


@pytest.fixture(scope="session")
def tiny_server(tiny_repository: Path):
    """The embedded server on that repository, for the whole session."""
    from clip_deploy import repository as repositories
    from clip_deploy.servers import LAUNCHERS, ServerOptions

    found = repositories.read(tiny_repository)
    with LAUNCHERS["embedded"].start(found, ServerOptions(timeout_s=120)) as handle:
        yield handle
