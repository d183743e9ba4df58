"""Launchers and the installer without a server: rows, command lines, ports, and what is refused before anything starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from clip_deploy.artifacts import ModelRepository, RepositoryModel
from clip_deploy.errors import ConfigError, MissingDependency, ServerError
from clip_deploy.servers import (
    LAUNCHERS,
    Ports,
    ServerOptions,
    container,
    embedded,
    install,
    libpython,
)
from clip_deploy.servers.launchers import prepare, spawn


def _repository(path: Path, backend: str) -> ModelRepository:
    return ModelRepository(path, (RepositoryModel("m", backend, (1,), (1,)),))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIP_DEPLOY_CACHE", str(tmp_path / "cache"))


def test_the_table_has_the_launchers_of_the_plan():
    assert {name: row.name for name, row in LAUNCHERS.items()} == {
        "embedded": "embedded",
        "container": "container",
    }


@pytest.mark.parametrize(
    ("launcher", "backend", "remedy"),
    [
        ("embedded", "onnxruntime", "--backend python"),
        ("embedded", "tensorrt", "container"),
        ("container", "python", "--backend onnxruntime"),
    ],
)
def test_a_backend_that_a_launcher_lacks_is_refused_before_anything_starts(
    tmp_path: Path, launcher: str, backend: str, remedy: str
):
    with pytest.raises(
        ServerError, match=f"the {launcher} server cannot load backend {backend}"
    ) as caught:
        LAUNCHERS[launcher].start(_repository(tmp_path, backend), ServerOptions(), print)
    assert remedy in caught.value.remedy


def test_an_embedded_server_that_is_not_installed_names_the_command(tmp_path: Path):
    with pytest.raises(MissingDependency, match="not installed") as caught:
        LAUNCHERS["embedded"].start(_repository(tmp_path, "python"), ServerOptions(), print)
    assert caught.value.remedy == "run clip-deploy server install"


def test_free_ports_are_free_and_different(tmp_path: Path):
    ports = prepare(ServerOptions(ports=Ports(grpc=12345))).ports
    assert ports.grpc == 12345
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    assert min(ports.http, ports.metrics) > 1023


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        prepare(ServerOptions(host="203.0.113.7"))


def test_every_start_has_an_identity_and_a_log_of_its_own():
    first, second = prepare(ServerOptions()), prepare(ServerOptions())
    assert first.identity != second.identity
    assert first.log != second.log
    assert first.log.exists()


def test_old_logs_are_dropped_and_the_newest_kept(tmp_path: Path):
    for _ in range(30):
        prepare(ServerOptions())
    assert len(list((tmp_path / "cache" / "logs").iterdir())) == 20


def test_a_log_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match="cannot write the log"):
        prepare(ServerOptions(log=Path("/proc/nowhere/log")))


def test_the_docker_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    options = ServerOptions(
        ports=Ports(8000, 8001, 8002),
        release="26.05",
        shm_size="2g",
        arguments=("--log-verbose=1",),
    )
    launch = prepare(options)
    assert container.command(launch, _repository(tmp_path, "onnxruntime"), options) == [
        *("docker", "run", "--rm", "--init", f"--name={launch.identity}", "--shm-size=2g"),
        *(
            "--publish=127.0.0.1:8000:8000",
            "--publish=127.0.0.1:8001:8001",
            "--publish=127.0.0.1:8002:8002",
        ),
        f"--volume={tmp_path}:/models:ro",
        "nvcr.io/nvidia/tritonserver:26.05-py3",
        *("tritonserver", "--model-repository=/models", f"--id={launch.identity}"),
        *("--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--metrics-address=0.0.0.0"),
        *("--http-port=8000", "--grpc-port=8001", "--metrics-port=8002", "--log-verbose=1"),
    ]


@pytest.mark.parametrize(
    ("gpus", "driver", "expected"),
    [
        (None, None, None),
        (None, "/usr/bin/nvidia-smi", "--gpus=all"),
        ("device=1", None, "--gpus=device=1"),
        ("", "/usr/bin/nvidia-smi", None),
    ],
)
def test_gpus_are_those_asked_for_or_all_where_there_is_a_driver(
    tmp_path: Path, monkeypatch, gpus, driver, expected
):
    monkeypatch.setattr(shutil, "which", lambda name: driver)
    options = ServerOptions(gpus=gpus)
    line = container.command(prepare(options), _repository(tmp_path, "tensorrt"), options)
    assert [word for word in line if word.startswith("--gpus")] == ([expected] if expected else [])


def test_without_docker_the_command_is_given_to_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependency, match="no docker command") as caught:
        LAUNCHERS["container"].start(_repository(tmp_path, "onnxruntime"), ServerOptions(), print)
    assert "docker run --rm" in caught.value.remedy


def test_a_docker_engine_that_does_not_answer_is_missing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        shutil, "which", lambda name: f"/usr/bin/{name}" if name == "docker" else None
    )
    answer = SimpleNamespace(
        returncode=1, stderr="Cannot connect to the Docker daemon at unix:///var/run/docker.sock.\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    with pytest.raises(MissingDependency, match="Cannot connect to the Docker daemon"):
        LAUNCHERS["container"].start(_repository(tmp_path, "onnxruntime"), ServerOptions(), print)


@pytest.mark.parametrize("machine", [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_other_machines_are_told_what_they_can_do(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[str, str]
):
    monkeypatch.setattr("platform.system", lambda: machine[0])
    monkeypatch.setattr("platform.machine", lambda: machine[1])
    with pytest.raises(MissingDependency, match=f"not on {machine[0]} {machine[1]}") as caught:
        install.installed()
    assert "--launcher container" in caught.value.remedy


def test_a_python_without_a_stub_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libpython, "VERSION", "3.14")
    with pytest.raises(MissingDependency, match=r"no stub for Python 3\.14"):
        install.installed()


def _wheel(folder: Path) -> Path:
    """A wheel with the pinned one's layout and nothing real in it."""
    import base64
    import hashlib

    root = "pytriton/tritonserver"
    files = {
        f"{root}/bin/tritonserver": b"#!/bin/sh\n",
        f"{root}/backends/python/libtriton_python.so": b"library",
        f"{root}/backends/python/triton_python_backend_utils.py": b"# utils\n",
        **{
            f"{root}/python_backend_stubs/{v}/triton_python_backend_stub": v.encode()
            for v in install.PYTHONS
        },
        "nvidia_pytriton.libs/libtritonserver.so": b"library",
        "pytriton/__init__.py": b"raise SystemExit('never imported')\n",
    }
    digests = {
        n: base64.urlsafe_b64encode(hashlib.sha256(d).digest()).rstrip(b"=").decode()
        for n, d in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(data)}\n" for name, data in files.items())
    path = folder / "wheel.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"nvidia_pytriton-{install.WHEEL_VERSION}.dist-info/RECORD", record)
    return path


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Counts downloads, which give a wheel of the right layout."""
    made: list[Path] = []

    def download(folder: Path) -> Path:
        made.append(_wheel(folder))
        return made[-1]

    monkeypatch.setattr(install, "_download", download)
    monkeypatch.setattr(libpython, "available", lambda: True)
    monkeypatch.setattr(libpython, "folders", lambda: ())
    return made


def test_an_installation_is_made_once_and_verified_afterwards(downloads: list[Path]):
    found = install.install()
    assert os.access(found.server, os.X_OK)
    assert (
        found.backends / "python" / "triton_python_backend_stub"
    ).read_bytes() == libpython.VERSION.encode()
    assert not (found.root / "pytriton" / "__init__.py").exists()
    assert install.install() == found
    assert len(downloads) == 1


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")]
)
def test_a_damaged_installation_is_repaired(downloads: list[Path], damage):
    library = install.install().root / "nvidia_pytriton.libs" / "libtritonserver.so"
    damage(library)
    install.install()
    assert library.read_bytes() == b"library"
    assert len(downloads) == 2


def test_a_damaged_download_is_not_installed(
    downloads: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(install, "_record_digest", lambda path: "sha256=other")
    with pytest.raises(MissingDependency, match="the download is damaged"):
        install.install()
    assert not install.root().exists()


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch):
    answer = SimpleNamespace(
        returncode=1,
        stderr="WARNING: retrying\nERROR: No matching distribution found for nvidia-pytriton\n",
    )
    monkeypatch.setattr(libpython, "available", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    with pytest.raises(MissingDependency, match="No matching distribution found") as caught:
        install.install()
    assert "pip config list" in caught.value.remedy


def test_pip_is_asked_for_the_pinned_wheel_by_hash(monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def run(command: list[str], **options):
        asked["command"] = command
        asked["pin"] = Path(command[-1].partition("=")[2]).read_text()
        return SimpleNamespace(returncode=1, stderr="")

    monkeypatch.setattr(libpython, "available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(MissingDependency):
        install.install()
    assert "--require-hashes" in asked["command"]
    assert asked["pin"] == f"nvidia-pytriton==0.7.0 --hash=sha256:{install.WHEEL_SHA256}\n"


@pytest.mark.parametrize("tools", [[], ["apt-get"]])
def test_without_apt_a_missing_libpython_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tools: list[str]
):
    monkeypatch.setattr(shutil, "which", lambda name, **options: name if name in tools else None)
    with pytest.raises(MissingDependency, match="Triton's Python backend needs") as caught:
        libpython.fetch()
    assert f"libpython{libpython.VERSION}" in caught.value.remedy


@pytest.mark.processes
def test_a_child_dies_with_the_process_that_started_it(tmp_path: Path):
    """The parent is killed outright; nobody is left to clean up."""
    script = f"""
import os, sys
from pathlib import Path
from clip_deploy.servers.launchers import ServerOptions, prepare, spawn
handle = spawn(prepare(ServerOptions(log=Path({str(tmp_path / "log")!r}))), ["sleep", "60"], os.environ)
print(handle.process.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    assert _runs(child)
    parent.kill()
    parent.communicate()
    for _ in range(50):
        if not _runs(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child outlived its parent")


@pytest.mark.processes
def test_stopping_ends_the_child_and_its_log_stays(tmp_path: Path):
    launch = prepare(ServerOptions(log=tmp_path / "log"))
    with spawn(launch, ["sh", "-c", "echo started; exec sleep 60"], os.environ) as handle:
        for _ in range(100):
            if launch.log.read_text():
                break
            time.sleep(0.1)
        assert handle.process.poll() is None
    assert handle.process.poll() is not None
    assert launch.log.read_text() == "started\n"


def test_the_servers_python_is_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    environment = embedded._environment(install.Installation(tmp_path, (tmp_path / "libs",)))
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path / 'libs'}:/mine"
    assert "PYTHONHOME" not in environment


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False
