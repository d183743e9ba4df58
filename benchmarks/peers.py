"""Our served path against its peers, as ratios of one run: the same pictures, the same number of users, in turns.

    python benchmarks/peers.py [--users 32] [--seconds 24] [--repeats 2] [--infinity PYTHON] [--only served] [--json]

Windows are long because answers come in batches of 16: at 40 a second, 12 seconds know a rate to 3 %, 24 to 2 %.

- raw: the model in OpenVINO (bfloat16 where the CPU has it, else FP32) and in ONNX Runtime, in a process of its own,
  with the batch and streams that were best at first, before and after each served measurement; served: the same through
  the embedded Triton, from requests written beforehand, every answer judged.
- served from JPEG: a web process that decodes each picture, sends its pixels and waits; against what serves JPEGs, too:
  the old design (torch in the web process) and infinity-emb, where ``--infinity`` names a Python that has it.
- one user: the median latency beyond that of the raw session and beyond the queue delay, in milliseconds.
- GEMM: the time that torch's kernels of the same precision take for the matrix products of one picture (patches, and
  per layer attention in, attention out, and the two of the MLP, at 16 pictures a batch; attention scores are left out),
  as pictures per second; raw is held against it.

Exit code 1 when a bar is missed. With ``--json`` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from figures import Figure, figure, machine, report
from stack import free_port, process, uploads

from clip_deploy import repository as repositories
from clip_deploy.artifacts import ExportedModel
from clip_deploy.bench.figures import Load
from clip_deploy.bench.measuring import measure
from clip_deploy.bench.subject import bench_subject
from clip_deploy.client import TritonInferenceClient
from clip_deploy.engines import BACKENDS
from clip_deploy.export import export
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import EncoderSpec, EngineSpec, ServingSpec, Tower

MODEL = "ViT-B-32"
# Half of the users: while one batch runs, the next one waits in full.
MAX_BATCH = 16
HERE = Path(__file__).parent
# How a raw session may be run: (batch, streams). The best counts.
RAW = {"openvino": [(16, 2), (8, 2), (32, 1), (16, 1)], "onnxruntime": [(4, 1), (16, 1), (32, 1)]}


def raw(model: ExportedModel, engine: str, batch: int, streams: int, seconds: float) -> dict:
    """Images per second and the median time of one run, of the bare engine in a process of its own."""
    path = (
        model.directory / "openvino" / precision() / "model.xml"
        if engine == "openvino"
        else model.graph_files[0]
    )
    call = [path, model.directory / "reference.npz", engine, batch, streams, seconds, precision()]
    done = subprocess.run(
        [sys.executable, str(HERE / "raw_session.py"), *map(str, call)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def precision() -> str:
    """What OpenVINO computes in on this machine: bf16 where the CPU has it."""
    import openvino

    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "bf16" if has_bf16 else "fp32"


def repository(model: ExportedModel, engine: str, place: Path, delay_us: int = 5000) -> Path:
    build = BACKENDS["python"].build(model, EngineSpec(engine), print)
    repositories.assemble(build, ServingSpec(queue_delay_us=delay_us, max_batch=MAX_BATCH), place)
    return place


@contextlib.contextmanager
def served(place: Path) -> Iterator[tuple[TritonInferenceClient, int]]:
    found = repositories.read(place)
    with (
        LAUNCHERS["embedded"].start(found, ServerOptions()) as handle,
        TritonInferenceClient(handle.grpc) as client,
    ):
        yield client, handle.process.pid


def prepared_rate(place: Path, users: int, seconds: float) -> dict:
    """Throughput and median latency from requests that were written beforehand; wrong answers end the run."""
    with served(place) as (client, pid):
        (target,) = targets_of(client, repositories.read(place))
        subject = bench_subject(client, target, pid=pid)
        run = measure(subject, Load(users=users), duration_s=seconds, warmup_s=min(3.0, seconds))
    assert run.wrong == 0, run
    assert run.latency, run
    return {"rate": run.throughput, "p50_ms": run.latency.p50_s * 1000}


def jpeg_rate(place: Path, users: int, seconds: float) -> float:
    """Users of a web process: each picture is decoded, prepared, sent, and its vector awaited."""
    files = uploads()
    with served(place) as (client, _):
        client.embed_images(files[:1])
        return _rate(lambda i: client.embed_images([files[i % len(files)]]), users, seconds)


def _rate(ask: Callable[[int], object], users: int, seconds: float, warmup_s: float = 3.0) -> float:
    """Answers per second to so many threads that each wait for an answer."""
    counts, stop = [0] * users, threading.Event()

    def user(i: int) -> None:
        while not stop.is_set():
            ask(i + counts[i])
            counts[i] += 1

    threads = [threading.Thread(target=user, args=(i,)) for i in range(users)]
    for thread in threads:
        thread.start()
    time.sleep(warmup_s)
    before, start = sum(counts), time.perf_counter()
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - start)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


async def _http_rate(url: str, bodies: list[dict], users: int, seconds: float) -> float:
    """Answers per second of an HTTP server to so many users."""
    done, stop = 0, False

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=users)) as client:

        async def user(i: int) -> None:
            nonlocal done
            while not stop:
                answer = await client.post(url, **bodies[i % len(bodies)])
                answer.raise_for_status()
                done, i = done + 1, i + 1

        tasks = [asyncio.create_task(user(i)) for i in range(users)]
        await asyncio.sleep(5)
        before, start = done, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (done - before) / (time.perf_counter() - start)
        stop = True
        await asyncio.gather(*tasks)
    return rate


def old_design(users: int, seconds: float) -> float:
    port = free_port()
    command = [sys.executable, str(HERE / "old_design.py"), MODEL, str(port)]
    bodies = [{"content": file} for file in uploads()]
    with process(command, f"http://127.0.0.1:{port}/docs"):
        return asyncio.run(_http_rate(f"http://127.0.0.1:{port}/embed", bodies, users, seconds))


def infinity(python: str, folder: Path, users: int, seconds: float) -> float:
    import base64

    port = free_port()
    command = [str(Path(python).with_name("infinity_emb")), "v2", "--model-id", str(folder)]
    command += ["--port", str(port), "--engine", "torch", "--device", "cpu", "--dtype", "float32"]
    command += ["--no-bettertransformer", "--batch-size", "32", "--served-model-name", "clip"]
    bodies = [
        {
            "json": {
                "model": "clip",
                "modality": "image",
                "input": ["data:image/jpeg;base64," + base64.b64encode(file).decode()],
            }
        }
        for file in uploads()
    ]
    with process(command, f"http://127.0.0.1:{port}/health"):
        return asyncio.run(
            _http_rate(f"http://127.0.0.1:{port}/embeddings", bodies, users, seconds)
        )


def roof(seconds: float) -> float:
    """Pictures per second by the matrix products alone, in torch's kernels; see the head of this file."""
    done = subprocess.run(
        [sys.executable, str(HERE / "raw_session.py"), "gemm", str(seconds), precision()],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.splitlines()[-1])


class Rounds:
    """What each side gave, round by round."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        print(f"{name}: {value:.1f}", file=sys.stderr, flush=True)
        self.values.setdefault(name, []).append(value)

    def ratio(self, name: str, over: str, bar: float) -> Figure:
        pairs = list(zip(self.values[name], self.values[over]))
        parts = {key: statistics.median(self.values[key]) for key in (name, over)}
        return figure(f"{name} ÷ {over}", [a / b for a, b in pairs], bar, False, parts)


@dataclass(frozen=True)
class Sides:
    """All that is measured, made once."""

    models: dict[str, ExportedModel]
    places: dict[str, Path]
    users: int
    seconds: float
    infinity: str | None
    infinity_model: Path

    ways: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def raw_rate(self, pixels: str, engine: str) -> float:
        """Of the bare engine, with the batch and streams that were fastest when it was first asked for."""
        model, key = self.models[pixels], (pixels, engine)
        if key not in self.ways:
            rate = functools.partial(raw, model, engine, seconds=self.seconds / 4)
            self.ways[key] = max(RAW[engine], key=lambda way: rate(*way)["rate"])
        return raw(model, engine, *self.ways[key], self.seconds / 2)["rate"]


def served_round(sides: Sides, rounds: Rounds) -> None:
    """Bare engines, and the same through the server."""
    for name, engine, pixels, place in (
        ("OpenVINO, float32", "openvino", "float32", "openvino float32"),
        ("OpenVINO, uint8", "openvino", "uint8", "openvino uint8"),
        ("ONNX Runtime", "onnxruntime", "float32", "onnxruntime"),
    ):
        before = sides.raw_rate(pixels, engine)
        got = prepared_rate(sides.places[place], sides.users, sides.seconds)
        rounds.add(f"raw {name}", (before + sides.raw_rate(pixels, engine)) / 2)
        rounds.add(f"served {name}", got["rate"])
    rounds.add("GEMM roof", roof(sides.seconds / 2))


def alone_round(sides: Sides, rounds: Rounds) -> None:
    """What one user waits beyond the bare engine."""
    model, seconds = sides.models["float32"], sides.seconds
    for delay_us, name in ((5000, "openvino float32"), (0, "no delay")):
        alone = raw(model, "openvino", 1, 1, seconds / 2)["p50_ms"]
        lone = prepared_rate(sides.places[name], 1, seconds)["p50_ms"]
        again = raw(model, "openvino", 1, 1, seconds / 2)["p50_ms"]
        rounds.add(f"one user, delay {delay_us} µs", lone - delay_us / 1000 - (alone + again) / 2)


def jpeg_round(sides: Sides, rounds: Rounds) -> None:
    """JPEG in, vector out: ours and the peers."""
    users, seconds = sides.users, sides.seconds
    rounds.add("served from JPEG", jpeg_rate(sides.places["openvino uint8"], users, seconds))
    rounds.add("torch in the web process", old_design(users, seconds))
    if sides.infinity:
        rate = infinity(sides.infinity, sides.infinity_model, users, seconds)
        rounds.add("infinity-emb", rate)


PARTS = {"served": served_round, "alone": alone_round, "jpeg": jpeg_round}


# What is divided by what, and the least that it may be.
BARS = [
    ("served OpenVINO, float32", "raw OpenVINO, float32", 0.90),
    ("served OpenVINO, uint8", "raw OpenVINO, uint8", 0.95),
    ("served ONNX Runtime", "raw ONNX Runtime", 0.90),
    ("raw OpenVINO, float32", "GEMM roof", 0.90),
    ("served from JPEG", "torch in the web process", 3.5),
    ("served from JPEG", "infinity-emb", 2.2),
]
ADDED_MS = 3.0


def judged(rounds: Rounds) -> list[Figure]:
    measured = rounds.values
    found = [rounds.ratio(*bar) for bar in BARS if bar[0] in measured and bar[1] in measured]
    for name in (name for name in measured if name.startswith("one user")):
        found.append(figure(f"{name}: added ms", measured[name], ADDED_MS, True, {}))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--infinity", metavar="PYTHON", help="a Python that has infinity-emb")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        models = {}
        for pixels in ("float32", "uint8"):
            spec = EncoderSpec(MODEL, "random", towers=(Tower.IMAGE,), pixels=pixels)
            (models[pixels],) = export(spec, base / pixels)
        places = {
            "openvino float32": repository(models["float32"], "openvino", base / "a"),
            "openvino uint8": repository(models["uint8"], "openvino", base / "b"),
            "no delay": repository(models["float32"], "openvino", base / "c", delay_us=0),
            "onnxruntime": repository(models["float32"], "onnxruntime", base / "d"),
        }
        sides = Sides(models, places, options.users, options.seconds, options.infinity, base / "hf")
        if options.infinity:
            script = str(HERE / "infinity_model.py")
            subprocess.run([options.infinity, script, str(sides.infinity_model)], check=True)
        for _ in range(options.repeats):
            for part in options.only or PARTS:
                PARTS[part](sides, rounds)
    figures = judged(rounds)
    code = report(figures, None)
    if options.json:
        values = {
            "machine": machine(),
            "openvino": precision(),
            "figures": [asdict(f) for f in figures],
        }
        print(json.dumps(values | {"rounds": rounds.values}))
    return code


if __name__ == "__main__":
    sys.exit(main())
