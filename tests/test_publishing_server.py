"""Publishing to real Tritons under load: nobody gets an error or a wrong vector, whatever goes wrong meanwhile."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from clip_deploy import repository as repositories
from clip_deploy.artifacts import ExportedModel, exported_models
from clip_deploy.client import Connection
from clip_deploy.compare import Reference, agreement
from clip_deploy.errors import (
    CheckFailed,
    ClipDeployError,
    ConfigError,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)
from clip_deploy.files import digest
from clip_deploy.publishing import State, holdings, publish, rollback
from clip_deploy.publishing.reloading import LiveServer
from clip_deploy.servers import LAUNCHERS, ServerHandle, ServerOptions, embedded, install
from clip_deploy.servers.launchers import prepare, server_arguments, spawn
from clip_deploy.spec import TOLERANCES, EncoderSpec, Precision, ServingSpec, Tower

pytestmark = [pytest.mark.server, pytest.mark.export]

IMAGE = Tower.IMAGE.model_name
USERS = 16
# The server's two cores are shared with 16 users in Python; benchmarks/publish.py asks without a pause.
_BREATH_S = 0.05
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=5")
POLLING = ("--model-control-mode=poll", "--repository-poll-secs=1", "--exit-timeout-secs=5")


@pytest.fixture(scope="module")
def exports(tiny_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Image towers of two models that differ in their weights alone."""
    from clip_deploy.export import export

    folder = tmp_path_factory.mktemp("another")
    shape = Path(__file__).parent / "models" / "tiny-clip.json"
    export(EncoderSpec(str(shape), "random:7", towers=(Tower.IMAGE,), max_batch=8), folder)
    return [tiny_exports["tiny-clip"] / IMAGE, folder / IMAGE]


def _assembled(export: Path, models: Path) -> Path:
    from clip_deploy.engines import BACKENDS

    (model,) = exported_models([export])
    repositories.assemble(BACKENDS["python"].build(model), ServingSpec(), models)
    return models


@pytest.fixture(scope="module")
def old(exports: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _assembled(exports[0], tmp_path_factory.mktemp("old") / "models")


@pytest.fixture(scope="module")
def new(exports: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _assembled(exports[1], tmp_path_factory.mktemp("new") / "models")


@pytest.fixture
def wrong(exports: list[Path], tmp_path: Path) -> Path:
    """The new model with a reference that it does not answer to."""
    folder = tmp_path / IMAGE
    shutil.copytree(exports[1], folder)
    reference = Reference.read(folder / "reference.npz", Tower.IMAGE)
    Reference(reference.inputs, reference.outputs[::-1].copy(), reference.labels).save(
        folder / "reference.npz", Tower.IMAGE
    )
    data = json.loads((folder / "manifest.json").read_text())
    data["files"]["reference.npz"] = digest([folder / "reference.npz"])
    (folder / "manifest.json").write_text(json.dumps(data))
    assert not ExportedModel.read(folder).damaged_files()
    return _assembled(folder, tmp_path / "models")


@contextmanager
def triton(place: Path | str, arguments: tuple[str, ...]) -> Iterator[ServerHandle]:
    """The embedded server on a destination, ready."""
    if isinstance(place, Path):
        found, options = repositories.read(place), ServerOptions(arguments=arguments)
        with LAUNCHERS["embedded"].start(found, options) as handle:
            yield handle
        return
    files, launch = install.installed(), prepare(ServerOptions(arguments=arguments))
    command = [
        str(files.server),
        *server_arguments(launch, place, launch.host, launch.ports),
        f"--backend-directory={files.backends}",
        f"--backend-config=python,shm-region-prefix-name={launch.identity}",
    ]
    with spawn(launch, command, embedded._environment(files)) as handle:
        deadline = time.monotonic() + 60
        while not handle._is_ready(IMAGE, 1):
            assert time.monotonic() < deadline
            assert handle.process.poll() is None, handle.failure()
            time.sleep(0.2)
        yield handle


def told(step: str) -> None:
    """Shown when a test fails."""
    print(f"{time.monotonic():.1f} {step}")


class Users:
    """People who ask, take a breath, and hold every answer against what both models may say."""

    def __init__(self, urls: list[str], *repositories_: Path) -> None:
        self.references = [
            Reference.read(models / IMAGE / "1" / "reference.npz", Tower.IMAGE)
            for models in repositories_
        ]
        assert all(np.array_equal(self.references[0].inputs, r.inputs) for r in self.references)
        self.limits = TOLERANCES[Precision.FP32, Tower.IMAGE]
        self.counts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(urls[i % len(urls)], i)) for i in range(USERS)
        ]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answered_by(self, url: str) -> str:
        """Which model answers now: 0 or 1."""
        with Connection(url) as connection:
            return self._judged(connection, 0)

    def _ask(self, url: str, row: int) -> None:
        with Connection(url) as connection:
            while not self._stop.is_set():
                row += 1
                try:
                    self.counts[self._judged(connection, row % len(self.references[0].inputs))] += 1
                except ClipDeployError as error:
                    self.counts[f"error: {error}"] += 1
                self._stop.wait(_BREATH_S)

    def _judged(self, connection: Connection, row: int) -> str:
        rows = slice(row, row + 1)
        tower = Tower.IMAGE
        inputs = {tower.input_name: self.references[0].inputs[rows]}
        got = connection.infer(IMAGE, inputs, tower.output_name)
        for i, reference in enumerate(self.references):
            if not agreement(got, reference.outputs[rows]).faults(self.limits):
                return str(i)
        return "wrong"


def test_servers_in_explicit_mode_are_switched_and_brought_back(
    old: Path, new: Path, wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dest = tmp_path / "dest"
    publish(old, dest)
    with triton(dest, EXPLICIT) as one, triton(dest, EXPLICIT) as two:
        urls = [one.grpc, two.grpc]
        with Users(urls, old, new) as users:
            # Its answers are not what torch gave: seen beside the old one, and nobody else ever saw it.
            with pytest.raises(CheckFailed, match=r"answers equal torch's.*nothing was switched"):
                publish(wrong, dest, reload=urls, progress=told)
            assert set(users.counts) == {"0"}
            assert holdings(dest).serving == 1
            assert holdings(dest).publications[-1].state is State.REFUSED

            done = publish(new, dest, reload=urls, progress=told)
            assert done.servers == tuple(urls)
            assert [users.answered_by(url) for url in urls] == ["1", "1"]

            # The second server does not follow: the first comes back, too.
            serve = LiveServer.serve

            def refuse(self: LiveServer, name: str, version: int, text: bytes | None) -> None:
                if self.url == two.grpc and version == 1:
                    raise ServerError("out of memory", remedy="buy some")
                serve(self, name, version, text)

            with monkeypatch.context() as patch:
                patch.setattr(LiveServer, "serve", refuse)
                with pytest.raises(
                    ServerError,
                    match=f"out of memory; the former version serves again at {urls[0]}",
                ):
                    rollback(dest, reload=urls, progress=told)
            assert [users.answered_by(url) for url in urls] == ["1", "1"]
            assert holdings(dest).serving == done.publication.number

            rollback(dest, reload=urls, progress=told)
            assert [users.answered_by(url) for url in urls] == ["0", "0"]
            assert holdings(dest).serving == 1
        assert set(users.counts) == {"0", "1"}, users.counts
        assert sum(users.counts.values()) > 200
        with Connection(urls[0]) as connection:
            ready = sorted(name for name, state in connection.index().items() if state == "READY")
        assert ready == [f"{IMAGE}:1"]
    assert [p.name for p in dest.iterdir() if p.is_dir()] == [IMAGE]


def test_a_polling_server_follows_and_is_brought_back(
    old: Path, new: Path, wrong: Path, tmp_path: Path
):
    dest = tmp_path / "dest"
    publish(old, dest)
    with triton(dest, POLLING) as server:
        url = server.grpc
        with Users([url], old, new) as users:
            publish(new, dest, reload=[url], progress=told)
            assert users.answered_by(url) == "1"
            rollback(dest, reload=[url], progress=told)
            assert users.answered_by(url) == "0"
            with pytest.raises(CheckFailed, match="the former version serves again"):
                publish(wrong, dest, reload=[url], progress=told)
            assert users.answered_by(url) == "0"
        assert set(users.counts) == {"0", "1"}, users.counts
        assert holdings(dest).serving == 1


def test_a_server_that_does_not_follow_has_the_config_put_back(
    old: Path, new: Path, tmp_path: Path, tiny_server: ServerHandle
):
    dest = tmp_path / "dest"
    publish(old, dest)
    before = (dest / IMAGE / "config.pbtxt").read_bytes()
    with pytest.raises(ServerTimeout, match=r"does not serve version 2 .*serves again at"):
        publish(new, dest, reload=[tiny_server.grpc], timeout_s=2)  # neither polls nor takes loads
    assert (dest / IMAGE / "config.pbtxt").read_bytes() == before
    assert holdings(dest).serving == 1


def test_a_server_that_does_not_answer_is_found_before_anything_is_sent(
    old: Path, new: Path, tmp_path: Path
):
    dest = tmp_path / "dest"
    publish(old, dest)
    keys = sorted(dest.rglob("*"))
    with pytest.raises(ServerUnavailable, match="no server answers"):
        publish(new, dest, reload=["127.0.0.1:1"])
    with pytest.raises(ConfigError, match="no gRPC address"):
        publish(new, dest, reload=["http://127.0.0.1"])
    assert sorted(dest.rglob("*")) == keys


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The S3 protocol on loopback, with a bucket; its address as Triton and publish take it."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"s3://http://{host}:{port}/bucket"
    from clip_deploy.publishing.objects import open_objects

    open_objects(address)._system.mkdir("bucket")
    yield f"{address}/models"
    server.stop()


def test_a_polling_server_follows_publications_on_s3(old: Path, new: Path, s3: str):
    publish(old, s3)
    with triton(s3, POLLING) as server, Users([server.grpc], old, new) as users:
        publish(new, s3, reload=[server.grpc], progress=told)
        assert users.answered_by(server.grpc) == "1"
        rollback(s3, reload=[server.grpc], progress=told)
        assert users.answered_by(server.grpc) == "0"
    assert set(users.counts) == {"0", "1"}, users.counts
