"""The gateway in front of a real Triton: right vectors or none, through crowds, kills and other models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi")

from clip_deploy import repository as repositories
from clip_deploy.artifacts import exported_models
from clip_deploy.client import TritonInferenceClient
from clip_deploy.engines import BACKENDS
from clip_deploy.gateway import GatewaySettings, create_app
from clip_deploy.indexes import IndexIdentity, Item, open_index
from clip_deploy.inputs.photographs import photographs
from clip_deploy.repository import assemble
from clip_deploy.servers import LAUNCHERS, Ports, ServerHandle, ServerOptions
from clip_deploy.spec import ServingSpec
from tests.gateway_parts import Gateway, data_uri

pytestmark = [pytest.mark.server, pytest.mark.export]

COMMAND = [sys.executable, "-m", "clip_deploy", "gateway"]
EMBED = "/v1/embeddings"
TEXTS = ["a photo of a cat", "two dogs", "the sea at night", "a red bicycle"]


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """Photographs as people upload them."""
    made = []
    for path in photographs(None).paths:
        picture = Image.open(path).convert("RGB")
        picture.thumbnail((320, 320))
        file = io.BytesIO()
        picture.save(file, "JPEG")
        made.append(file.getvalue())
    return made


@pytest.fixture(scope="module")
def reference(tiny_server: ServerHandle, files: list[bytes]) -> np.ndarray:
    """The vectors of the photographs, by the blocking client."""
    with TritonInferenceClient(tiny_server.grpc) as client:
        return client.embed_images(files)


@contextlib.contextmanager
def _process(*arguments: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The command, running; its address, and its process."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read()
        yield url, process
    finally:
        process.kill()
        process.communicate()


def _vector(answer: httpx.Response) -> np.ndarray:
    return np.array(answer.json()["data"][0]["embedding"], np.float32)


def _same(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(float(got @ expected) > 0.9999)


def test_a_hundred_at_once_get_the_right_vectors(
    tiny_server: ServerHandle, files: list[bytes], reference: np.ndarray
):
    with Gateway(create_app(GatewaySettings(tiny_server.grpc))) as g:

        async def ask(i: int) -> bool:
            body = {"input": [data_uri(files[i % len(files)])]}
            answer = await g.http.post(EMBED, json=body)
            return answer.status_code == 200 and _same(_vector(answer), reference[i % len(files)])

        async def everybody():
            return await asyncio.gather(*(ask(i) for i in range(100)))

        assert all(g.run(everybody()))


def test_mixed_inputs_equal_the_blocking_client(
    tiny_server: ServerHandle, files: list[bytes], reference: np.ndarray
):
    with TritonInferenceClient(tiny_server.grpc) as client:
        texts = client.embed_texts(TEXTS)
    inputs = [value for pair in zip(TEXTS, map(data_uri, files)) for value in pair]
    with Gateway(create_app(GatewaySettings(tiny_server.grpc))) as g:
        answer = g.post(EMBED, json={"input": inputs, "encoding_format": "float"})
    got = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
    assert all(_same(*pair) for pair in zip(got[0::2], texts))
    assert all(_same(*pair) for pair in zip(got[1::2], reference))
    assert answer.json()["usage"]["num_images"] == len(TEXTS)


def test_the_command_answers_logs_and_ends_in_peace(
    tiny_server: ServerHandle, files: list[bytes], reference: np.ndarray, tmp_path: Path
):
    log = tmp_path / "access.jsonl"
    token = "a-token-of-some-length"
    arguments = ("--triton", tiny_server.grpc, "--log", str(log))
    with _process(*arguments, CLIP_DEPLOY_TOKENS=token) as (url, process):
        api = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
        with api:
            assert api.get("/readyz").status_code == 200
            assert httpx.post(url + EMBED, json={"input": "a"}).status_code == 401
            answer = api.post(EMBED, json={"input": data_uri(files[0])})
            assert _same(_vector(answer), reference[0])
            # Somebody else cannot have its port.
            command = [*COMMAND, "--triton", tiny_server.grpc, "--port", url.rpartition(":")[2]]
            taken = subprocess.run(command, capture_output=True, text=True, check=False)
            assert taken.returncode == 2
            assert "cannot listen" in taken.stderr
            assert "Traceback" not in taken.stderr
            # A request that is under way when it is told to end is answered.
            with _slow_upload(url, token, files[0]) as finish:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                assert b"HTTP/1.1 200" in finish()
        assert process.wait(10) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 401, 200, 200]
    assert set(lines[2]["stages_ms"]) == {"prepare", "embed"}


@contextlib.contextmanager
def _slow_upload(url: str, token: str, file: bytes):
    """Half of a request on the wire; what it yields sends the rest, and gives the answer."""
    body = json.dumps({"input": data_uri(file)}).encode()
    head = (
        f"POST {EMBED} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as wire:
        wire.sendall(head.encode() + body[:100])
        time.sleep(0.3)

        def finish() -> bytes:
            wire.sendall(body[100:])
            return wire.recv(65536)

        yield finish


def test_slow_and_vanishing_senders_hold_nothing_up(tiny_server: ServerHandle, files: list[bytes]):
    arguments = ("--triton", tiny_server.grpc, "--upload-timeout", "1", "--max-in-flight", "2")
    with _process(*arguments) as (url, _), httpx.Client(base_url=url, timeout=30) as api:
        with _slow_upload(url, "", files[0]):
            pass  # gone, half sent
        with _slow_upload(url, "", files[0]), _slow_upload(url, "", files[1]):
            began = time.monotonic()
            answer = api.post(EMBED, json={"input": "a cat"})  # waits until they are refused
            assert answer.status_code == 200
            assert time.monotonic() - began < 10
        with _slow_upload(url, "", files[0]) as finish:
            time.sleep(1)
            answer = finish()
            assert b"HTTP/1.1 408" in answer
            assert b"connection: close" in answer.lower()
        metrics = api.get("/metrics").text
    assert 'clip_gateway_refused_total{reason="gone"}' in metrics
    assert "clip_gateway_in_flight 0.0" in metrics
    assert "clip_gateway_buffered_bytes 0.0" in metrics


def _start(repository: Path, grpc_port: int = 0) -> ServerHandle:
    options = ServerOptions(ports=Ports(0, grpc_port, 0), timeout_s=120)
    return LAUNCHERS["embedded"].start(repositories.read(repository), options)


def _kill(server: ServerHandle) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


@pytest.fixture(scope="module")
def other_repository(tiny_exports: dict[str, Path], tmp_path_factory) -> Path:
    """The same names, another model."""
    place = tmp_path_factory.mktemp("other") / "models"
    for model in exported_models([tiny_exports["tiny-sigmoid"]]):
        assemble(BACKENDS["python"].build(model), ServingSpec(), place)
    return place


def test_a_triton_that_dies_returns_stalls_and_changes_its_model(
    tiny_repository: Path, other_repository: Path, files: list[bytes], reference: np.ndarray
):
    server = _start(tiny_repository)
    port = server.ports.grpc
    wrong = 0
    with Gateway(create_app(GatewaySettings(server.grpc, timeout_s=6.0))) as g:

        async def ask(i: int) -> tuple[int, float]:
            nonlocal wrong
            began = time.monotonic()
            body = {"input": data_uri(files[i % len(files)])}
            answer = await g.http.post(EMBED, json=body)
            if answer.status_code == 200:
                wrong += not _same(_vector(answer), reference[i % len(files)])
            return answer.status_code, time.monotonic() - began

        async def crowd(n: int) -> set[int]:
            return {status for status, _ in await asyncio.gather(*map(ask, range(n)))}

        async def killed_under_load() -> tuple[set[int], set[int], float]:
            under = [asyncio.ensure_future(ask(i)) for i in range(64)]
            await asyncio.sleep(0.05)
            _kill(server)
            during = {status for status, _ in await asyncio.gather(*under)}
            after = await asyncio.gather(*map(ask, range(16)))
            return during, {status for status, _ in after}, max(took for _, took in after)

        async def until_answered() -> float:
            began = time.monotonic()
            while (await ask(0))[0] != 200:
                assert time.monotonic() - began < 20
                await asyncio.sleep(0.1)
            return time.monotonic() - began

        try:
            assert g.run(crowd(16)) == {200}
            during, after, slowest_s = g.run(killed_under_load())
            assert during <= {200, 503}
            assert after == {503}
            assert slowest_s < 4
            time.sleep(1.1)
            assert g.get("/readyz").status_code == 503

            server = _start(tiny_repository, port)
            assert g.run(until_answered()) < 10
            assert g.run(crowd(32)) == {200}
            time.sleep(1.1)
            assert g.get("/readyz").status_code == 200

            os.killpg(server.process.pid, signal.SIGSTOP)
            status, took_s = g.run(ask(0))
            os.killpg(server.process.pid, signal.SIGCONT)
            assert status == 504
            assert 5.5 < took_s < 12
            assert g.run(until_answered()) < 10

            _kill(server)
            server = _start(other_repository, port)
            refused = {g.run(ask(i))[0] for i in range(8)}
            time.sleep(3)
            refused |= {g.run(ask(i))[0] for i in range(8)}
            assert refused == {503}
            ready = g.get("/readyz")
            assert ready.status_code == 503
            assert "weights" in ready.json()["reason"]
        finally:
            server.stop()
    assert wrong == 0


def test_a_search_through_a_real_index_finds_the_picture_itself(
    tiny_server: ServerHandle, files: list[bytes], tmp_path: Path
):
    pytest.importorskip("lancedb")
    with TritonInferenceClient(tiny_server.grpc) as client:
        rows, identity = client.embed_images(files), IndexIdentity.of(client.deployment())
    place = str(tmp_path / "photos.index")
    items = [
        Item(f"{i}.jpg", row, f"picture number {i}", f"{i}.jpg", "0" * 64, files[i])
        for i, row in enumerate(rows)
    ]

    async def make() -> None:
        index = await open_index(place, create=identity)
        await index.add(items)
        await index.close()

    asyncio.run(make())
    arguments = ("--triton", tiny_server.grpc, "--index", place)
    with _process(*arguments) as (url, _), httpx.Client(base_url=url, timeout=30) as api:
        for i in (0, len(files) - 1):
            form = {"file": ("a.jpg", files[i], "image/jpeg")}
            found = api.post("/api/v1/search/image", files=form).json()
            assert found["results"][0]["id"] == f"{i}.jpg"
            assert found["results"][0]["cosine"] > 0.9999
            assert set(found["timings_ms"]) == {"prepare", "embed", "search", "total"}
        query = {"text": "number 3", "mode": "text"}
        best = api.post("/api/v1/search/text", json=query).json()["results"][0]
        assert best["id"] == "3.jpg"
        assert api.get(best["thumbnail"]).content == files[3]
        assert api.get("/api/v1/status").json()["index"]["items"] == len(files)
        assert api.get("/readyz").status_code == 200

    # An index of another model is refused before anything listens.
    other = dataclasses.replace(identity, weights_sha256="b" * 64)
    asyncio.run(_made(str(tmp_path / "other.index"), other))
    command = [*COMMAND, "--triton", tiny_server.grpc, "--index", str(tmp_path / "other.index")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "fix"]
    assert "holds vectors of" in done.stderr


async def _made(place: str, identity: IndexIdentity) -> None:
    await (await open_index(place, create=identity)).close()
