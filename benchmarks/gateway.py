"""What the gateway costs: JPEG in and vector out over HTTP, against ready tensors straight to Triton over gRPC.

    python benchmarks/gateway.py [--users 32] [--seconds 24] [--repeats 3] [--engines onnxruntime,openvino] [--json]

Both sides take turns, direct first and last, on the same server, the same cores and the same photographs (JPEG files,
640 pixels wide at most), asked by so many users from requests that were written beforehand; every answer is judged. On
the gateway's side each picture is sent as base64 in JSON, decoded, resized, normalised, sent to Triton and answered as
base64: all of that, and what the load generator takes, runs on the cores that the model needs.

Exit code 1 when a bar is missed. With ``--json`` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from figures import machine, report
from peers import MAX_BATCH, Rounds, jpegs

from clip_deploy import repository as repositories
from clip_deploy.artifacts import ExportedModel, exported_models
from clip_deploy.bench.figures import Load
from clip_deploy.bench.measuring import measure
from clip_deploy.bench.process import ServerProcess
from clip_deploy.bench.subject import bench_subject
from clip_deploy.client import TritonInferenceClient
from clip_deploy.engines import BACKENDS
from clip_deploy.export import export
from clip_deploy.servers import LAUNCHERS, ServerHandle, ServerOptions
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import EncoderSpec, EngineSpec, ServingSpec

MODEL = "ViT-B-32"
BAR = 0.90
WARMUP_S = 3.0


def direct_rate(handle: ServerHandle, place: Path, users: int, seconds: float) -> float:
    """Images per second from ready tensors over gRPC."""
    with TritonInferenceClient(handle.grpc) as client:
        target = next(t for t in targets_of(client, repositories.read(place)) if "image" in t.name)
        subject = bench_subject(client, target, pid=handle.process.pid)
        run = measure(subject, Load(users=users), duration_s=seconds, warmup_s=WARMUP_S)
    assert run.wrong == 0, run
    return run.throughput


@contextlib.contextmanager
def gateway(handle: ServerHandle, log: Path) -> Iterator[tuple[int, int]]:
    """The port and the process of a gateway of its own."""
    command = [sys.executable, "-m", "clip_deploy", "gateway", "--triton", handle.grpc]
    command += ["--port", "0", "--log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline().rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        assert process.wait(30) == 0


def written(file: bytes) -> bytes:
    """One request, in the bytes that go over the wire."""
    uri = "data:image/jpeg;base64," + base64.b64encode(file).decode()
    body = json.dumps({"input": uri, "encoding_format": "base64"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def gateway_rate(
    port: int, files: list[bytes], expected: np.ndarray, users: int, seconds: float
) -> tuple[float, int]:
    """Images per second from JPEG files over HTTP, and how many there were; a wrong answer, or none, ends the run."""
    requests = [written(file) for file in files]
    answers: list[tuple[float, int, bytes]] = []
    end = time.perf_counter() + WARMUP_S + seconds

    async def user(i: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        while time.perf_counter() < end:
            row = i % len(requests)
            writer.write(requests[row])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0])
            answers.append((time.perf_counter(), row, await reader.readexactly(length)))
            i += 1
        writer.close()

    await asyncio.gather(*map(user, range(users)))
    for _, row, body in answers:
        vector = base64.b64decode(json.loads(body)["data"][0]["embedding"])
        assert np.frombuffer(vector, "<f4") @ expected[row] > 0.999, f"a wrong vector: {body!r}"
    return sum(end - seconds <= at < end for at, *_ in answers) / seconds, len(answers)


def repository(models: list[ExportedModel], engine: str, place: Path) -> Path:
    for model in models:
        build = BACKENDS["python"].build(model, EngineSpec(engine), print)
        serving = ServingSpec(queue_delay_us=5000, max_batch=MAX_BATCH)
        repositories.assemble(build, serving, place)
    return place


def compare(place: Path, name: str, options: argparse.Namespace, rounds: Rounds) -> None:
    """Both sides in turns on one server."""
    files = jpegs()
    found = repositories.read(place)
    with LAUNCHERS["embedded"].start(found, ServerOptions()) as handle:
        with TritonInferenceClient(handle.grpc) as client:
            expected = client.embed_images(files)
        with gateway(handle, place / "access.jsonl") as (port, pid):
            direct = [direct_rate(handle, place, options.users, options.seconds)]
            for _ in range(options.repeats):
                used_s = ServerProcess(pid).cpu_s()
                rate, asked = asyncio.run(
                    gateway_rate(port, files, expected, options.users, options.seconds)
                )
                used_s = ServerProcess(pid).cpu_s() - used_s
                direct.append(direct_rate(handle, place, options.users, options.seconds))
                rounds.add(f"direct gRPC, {name}", sum(direct[-2:]) / 2)
                rounds.add(f"gateway, {name}", rate)
                rounds.add(f"core-ms of the gateway per image, {name}", 1000 * used_s / asked)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default="onnxruntime,openvino")
    parser.add_argument("--build", metavar="DIR", help="keep the exports here, and find them again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as temporary:
        build = Path(options.build or temporary)
        export(EncoderSpec(MODEL, "random"), build)
        models = exported_models([build])
        names = options.engines.split(",")
        for engine in names:
            place = repository(models, engine, Path(temporary) / f"served-{engine}")
            compare(place, engine, options, rounds)
    figures = [rounds.ratio(f"gateway, {name}", f"direct gRPC, {name}", BAR) for name in names]
    for found, name in zip(figures, names):
        costs = rounds.values[f"core-ms of the gateway per image, {name}"]
        found.parts["core-ms of the gateway per image"] = statistics.median(costs)
    code = report(figures, None)
    if options.json:
        print(json.dumps({"machine": machine(), "figures": [asdict(f) for f in figures]}))
    return code


if __name__ == "__main__":
    sys.exit(main())
