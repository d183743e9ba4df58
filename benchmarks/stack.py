"""The whole product as processes of their own: Triton, an index and the gateway, for the benchmarks of the web side."""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from clip_deploy import repository as repositories
from clip_deploy.artifacts import exported_models
from clip_deploy.engines import BACKENDS
from clip_deploy.export import export
from clip_deploy.inputs.images import to_pixels
from clip_deploy.resources import photographs_dir
from clip_deploy.servers import LAUNCHERS, ServerHandle, ServerOptions
from clip_deploy.spec import EncoderSpec, EngineSpec, ServingSpec, Tower

PHOTOGRAPHS = sorted(photographs_dir().glob("*.jpg"))


@dataclass(frozen=True)
class Stack:
    """Addresses and processes; ``triton`` can be ended and started again by whoever proves that."""

    triton: ServerHandle
    gateway: str
    gateway_pid: int


def deployment(folder: Path, model: str, engine: str, **serving: int) -> Path:
    """A repository with both towers of a model with random weights; built once per folder."""
    place = folder / f"repository-{engine}"
    if not place.is_dir():
        if not (folder / "export").is_dir():
            export(EncoderSpec(model, "random"), folder / "export")
        for each in exported_models([folder / "export"]):
            build = BACKENDS["python"].build(each, EngineSpec(engine), print)
            repositories.assemble(build, ServingSpec(**serving), place)
    return place


def expected(folder: Path, pictures: list[bytes]) -> np.ndarray:
    """What the FP32 graph says of pictures, without Triton, the client's channel or the gateway: ``[n, D]``."""
    import onnxruntime

    image = next(m for m in exported_models([folder / "export"]) if m.contract.tower is Tower.IMAGE)
    session = onnxruntime.InferenceSession(str(image.graph_files[0]))
    pixels = to_pixels(pictures, image.contract.preprocess)
    return np.concatenate(
        [session.run(None, {image.contract.input.name: row[None]})[0] for row in pixels]
    )


def uploads() -> list[bytes]:
    """The package's photographs as people upload them: JPEG, 640 pixels wide."""
    files = []
    for path in PHOTOGRAPHS:
        picture = Image.open(path).convert("RGB")
        picture.thumbnail((640, 640))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


@contextlib.contextmanager
def stack(repository: Path, index: Path | None = None, *options: str) -> Iterator[Stack]:
    """Triton on a repository, the photographs in an index, and the gateway before them."""
    with LAUNCHERS["embedded"].start(repositories.read(repository), ServerOptions()) as triton:
        if index is not None:
            run("index", "add", photographs_dir(), "--triton", triton.grpc, "--index", index)
        with gateway(triton.grpc, index, *options) as (url, pid):
            yield Stack(triton, url, pid)


@contextlib.contextmanager
def gateway(grpc: str, index: Path | None, *options: str) -> Iterator[tuple[str, int]]:
    """A gateway process that answers, and its process id."""
    port = free_port()
    command = [sys.executable, "-m", "clip_deploy", "gateway", "--triton", grpc]
    command += ["--port", str(port), *options]
    command += ["--index", str(index)] if index else []
    with process(command, f"http://127.0.0.1:{port}/readyz") as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextlib.contextmanager
def process(command: list[str], url: str) -> Iterator[int]:
    """A server as a process of its own, once ``url`` answers; its id."""
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=2).close()
                break
            assert started.poll() is None, f"{command} does not start"
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.2)
        yield started.pid
    finally:
        started.terminate()
        started.wait(30)


def run(*command: object) -> None:
    """One command of clip-deploy, which must succeed."""
    subprocess.run([sys.executable, "-m", "clip_deploy", *map(str, command)], check=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
