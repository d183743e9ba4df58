"""Every metric and label that alerts and dashboard name, on servers that really tell them."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from clip_deploy.operations.alerts import ALERTS
from clip_deploy.operations.dashboard import ROWS

# What Triton tells of each GPU, all by the label gpu_uuid: docs/user_guide/metrics.md, "GPU Metrics", in
# https://github.com/triton-inference-server/server. Seen there, not run: these need a GPU.
GPU_METRICS = {
    *("nv_gpu_power_usage", "nv_gpu_power_limit", "nv_energy_consumption", "nv_gpu_utilization"),
    *("nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"),
}
# What Prometheus itself adds to everything it asks.
_ADDED = {"instance", "job"}
_METRIC = r"(?:nv|clip_gateway)_\w+"


_CURVES = [curve for row in ROWS for panel in row.panels for curve in panel.curves]


def _legend(text: str) -> list[str]:
    return re.findall(r"{{(\w+)}}", text)


def _expressions() -> list[str]:
    """Of alerts and panels; where a panel adds nothing up, with the labels of its legend."""
    plain = [(legend, e) for legend, e in _CURVES if " by (" not in e]
    told_apart = [f"sum by ({', '.join(_legend(legend))}) ({e})" for legend, e in plain]
    return [alert.expression for alert in ALERTS] + [e for _, e in _CURVES] + told_apart


def _used(prefix: str) -> dict[str, set[str]]:
    """Metric → the labels by which it is chosen or told apart."""
    found: dict[str, set[str]] = {}
    for expression in _expressions():
        for name in re.findall(_METRIC, expression):
            if name.startswith(prefix):
                found.setdefault(name, set())
        for name, matchers in re.findall(rf"({_METRIC})\{{([^}}]*)\}}", expression):
            if name in found:
                found[name] |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers))
        for labels, name in re.findall(
            rf"by \(([\w, ]*)\) \((?:rate\(|\w+_over_time\()?({_METRIC})", expression
        ):
            if name in found:
                found[name] |= {label.strip() for label in labels.split(",")} - {""}
    return found


def _told(text: str) -> dict[str, set[str]]:
    """Metric → labels, of what a server tells."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? [^ ]+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def _assert_told(used: dict[str, set[str]], told: dict[str, set[str]]) -> None:
    assert used
    assert not set(used) - set(told), "no such metric"
    wrong = {name: labels - told[name] - _ADDED for name, labels in used.items()}
    assert not {name: labels for name, labels in wrong.items() if labels}, "no such label"


@pytest.fixture(scope="module")
def told_by_triton(tiny_server) -> dict[str, set[str]]:
    from clip_deploy.client import TritonInferenceClient

    with TritonInferenceClient(tiny_server.grpc) as client:
        client.embed_texts(["a cat", "a dog"])
    with urllib.request.urlopen(f"http://{tiny_server.metrics}/metrics", timeout=10) as answer:
        return _told(answer.read().decode())


@pytest.mark.export
@pytest.mark.server
def test_every_metric_of_triton_is_told_by_a_real_server(told_by_triton):
    used = _used("nv_")
    _assert_told({name: used[name] for name in set(used) - GPU_METRICS}, told_by_triton)


def test_every_metric_of_a_gpu_is_one_that_triton_documents():
    used = {name: labels for name, labels in _used("nv_").items() if "gpu" in name}
    _assert_told(used, {name: {"gpu_uuid"} for name in GPU_METRICS})


def test_every_metric_of_the_gateway_is_in_its_registry():
    metrics = pytest.importorskip(
        "clip_deploy.gateway.metrics", reason="needs pip install 'clip-deploy[gateway]'"
    )
    from clip_deploy.gateway import GatewaySettings
    from clip_deploy.gateway.journal import Exchange
    from clip_deploy.gateway.pressure import Gate

    registry = metrics.Metrics(Gate(GatewaySettings("127.0.0.1:1")))
    exchange = Exchange("1", stages_ms={"embed": 1.0}, status=503, refused="busy")
    registry.observe("/api/v1/search/image", "POST", exchange)
    _assert_told(_used("clip_gateway_"), _told(registry.text().decode()))


@pytest.mark.parametrize(("legend", "expression"), _CURVES)
def test_a_legend_names_labels_that_its_curve_keeps(legend: str, expression: str):
    for kept in re.findall(r" by \(([\w, ]*)\)", expression):
        assert set(_legend(legend)) <= {label.strip() for label in kept.split(",")}


def test_a_metric_or_a_label_that_is_not_there_is_noticed():
    told = _told('nv_a{model="m"} 1\nnv_b 2.5e+06\n')
    assert told == {"nv_a": {"model"}, "nv_b": set()}
    with pytest.raises(AssertionError, match="no such metric"):
        _assert_told({"nv_c": set()}, told)
    with pytest.raises(AssertionError, match="no such label"):
        _assert_told({"nv_a": {"mode"}}, told)
    used = _used("nv_")
    assert used["nv_inference_request_failure"] == {"instance", "model", "reason"}
    assert used["nv_gpu_utilization"] == {"gpu_uuid"}


@pytest.mark.export
@pytest.mark.server
def test_the_health_check_asks_a_real_server_for_models(tiny_server, tiny_repository: Path):
    """The very command of the rendered file, where the server's own readiness says 200 in both cases."""
    yaml = pytest.importorskip("yaml")
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    from clip_deploy import operations, repository

    found = repository.read(tiny_repository)
    settings = operations.Settings(
        found, image="mine:1"
    )  # the Python backend needs an image of one's own
    text = operations.render(settings, tiny_repository.parent / "deploy")["compose.yaml"]
    test = yaml.safe_load(text)["services"]["triton"]["healthcheck"]["test"]
    command = [word.replace("127.0.0.1:8000", tiny_server.http) for word in test[1:]]

    def ask(words: list[str]) -> int:
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode

    server_ready = f"http://{tiny_server.http}/v2/health/ready"
    assert ask(["curl", "--silent", "--fail", server_ready]) == 0
    assert ask(command) == 0
    for word in command[-2:]:
        absent = [w.replace("_encoder", "_absent") if w == word else w for w in command]
        assert ask(absent) != 0
