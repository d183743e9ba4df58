"""The smoke test's GPU rows against a made-up server: each passes, fails and is skipped where it should."""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from clip_deploy.artifacts import ExportedModel
from clip_deploy.errors import ServerUnavailable
from clip_deploy.files import digest
from clip_deploy.report import Status
from clip_deploy.smoke import gpu
from clip_deploy.triton_schema import ModelConfig
from tests.factories import exported, plan_bytes

ON_GPU = 'instance_group { name: "a" kind: KIND_GPU count: 2 gpus: [ 0, 1 ] }'
ON_CPU = 'instance_group { name: "b" kind: KIND_CPU count: 1 }'


@dataclass
class _Connection:
    text: str

    def config(self, name: str, version: str = "") -> Any:
        return text_format.Parse(self.text, ModelConfig())


@dataclass
class _Target:
    name: str = "clip_image_encoder"
    version: str = "1"
    exported: ExportedModel | None = None


@dataclass
class _Client:
    connection: _Connection


@dataclass
class _Subject:
    client: _Client
    repository: object | None = None
    metrics: str | None = None
    targets: tuple = ()
    memo: dict = field(default_factory=dict)


def _subject(config: str, **changes: Any) -> _Subject:
    return _Subject(_Client(_Connection(config)), **changes)


def test_instances_are_counted_where_they_run():
    good = gpu.instances(_subject(ON_GPU), _Target())
    assert (good.status, good.figure) == (Status.PASSED, "4 on GPU 0, 1")
    mixed = gpu.instances(_subject(f"{ON_GPU} {ON_CPU}"), _Target())
    assert mixed.status is Status.FAILED
    assert "elsewhere: b" in mixed.figure
    nowhere = gpu.instances(_subject("instance_group { kind: KIND_GPU count: 1 }"), _Target())
    assert nowhere.status is Status.FAILED
    assert gpu.instances(_subject(ON_CPU), _Target()).status is Status.SKIPPED


@dataclass
class _Repository:
    path: Path


@pytest.mark.parametrize(
    ("wanted", "served", "status"),
    [
        (ON_GPU, ON_GPU, Status.PASSED),
        ("instance_group { kind: KIND_GPU }", ON_GPU, Status.PASSED),
        (ON_GPU, ON_CPU, Status.FAILED),
        ('backend: "tensorrt"', ON_CPU, Status.FAILED),
        ("instance_group { kind: KIND_GPU gpus: [ 3 ] }", ON_GPU, Status.FAILED),
        (ON_CPU, ON_CPU, Status.SKIPPED),
    ],
)
def test_instances_run_where_the_repository_wants_them(
    tmp_path: Path, wanted: str, served: str, status: Status
):
    folder = tmp_path / "clip_image_encoder"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(wanted)
    subject = _subject(served, repository=_Repository(tmp_path))
    assert gpu.instances(subject, _Target()).status is status


def test_the_served_plan_is_that_of_the_repository(tmp_path: Path):
    model = exported(tmp_path)
    plan = model.directory / "model.plan"
    plan.write_bytes(plan_bytes(10, 16, 1, 11))

    def told(sha256: str) -> str:
        return (
            f'parameters {{ key: "clip_deploy.plan_sha256" value {{ string_value: "{sha256}" }} }}'
        )

    here, target = _subject(told(digest([plan])), repository=object()), _Target(exported=model)
    assert gpu.plan(here, target).status is Status.PASSED
    other = _subject(told("0" * 64), repository=object())
    assert gpu.plan(other, target).status is Status.FAILED
    plan.unlink()
    assert gpu.plan(here, target).status is Status.FAILED
    assert gpu.plan(_subject(""), target).status is Status.SKIPPED
    assert gpu.plan(_subject(told("0" * 64)), _Target()).status is Status.SKIPPED


@pytest.fixture
def metrics(request: pytest.FixtureRequest):
    """A metrics address that shows one page after the other, and the last one from then on."""
    pages: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = pages.pop(0) if len(pages) > 1 else pages[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", pages
    server.shutdown()
    server.server_close()


def _page(utilization: float) -> str:
    return (
        f'nv_gpu_utilization{{gpu_uuid="GPU-0"}} {utilization}\n'
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.0\n'
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"} 2147483648.0\n'
    )


@pytest.mark.processes
def test_the_gpu_is_busier_under_load(metrics, monkeypatch: pytest.MonkeyPatch):
    address, pages = metrics
    monkeypatch.setattr(gpu, "send", lambda subject, target: None)
    pages[:] = [_page(0.1), _page(0.1), _page(0.6)]
    found = gpu.works(_subject(ON_GPU, metrics=address, targets=(_Target(),)))
    assert (found.status, found.data["instances"]) == (Status.PASSED, 4)
    assert "+50% busier under load; 2.0 GB of memory in use, 4 instances" in found.figure
    monkeypatch.setattr(gpu, "_UPDATE_S", 0.2)
    pages[:] = [_page(0.1)]  # what the machine does anyway
    assert gpu.works(_subject("", metrics=address)).status is Status.FAILED
    pages[:] = ["nv_cpu_utilization 0.5\n"]
    assert gpu.works(_subject("", metrics=address)).status is Status.SKIPPED
    assert gpu.works(_subject("")).status is Status.SKIPPED
    with pytest.raises(ServerUnavailable):
        gpu.works(_subject("", metrics="127.0.0.1:9"))
