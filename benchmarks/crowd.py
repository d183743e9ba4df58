"""A hundred people at once, then a thousand, through the gateway: nobody gets a wrong vector, nobody waits for ever.

    python benchmarks/crowd.py [--users 100] [--seconds 60] [--crowd 1000] [--engine openvino] [--json FILE]

ViT-B-32 with random weights on the embedded server, an index of the package's photographs, the gateway, and the
people, all on the cores of this machine. Each person uploads a photograph again and again, half of them to search for
it (it must find itself first), half for its vector, which is held against the FP32 graph run without Triton.

- a hundred: no error, no wrong answer, and more than two requests to a batch.
- a thousand at the same moment: each is answered rightly or refused with 503 and Retry-After, the refused within 5
  seconds; what the gateway holds in memory grows by at most 300 MB; a lone request afterwards is as fast as before.

Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from figures import Figure, figure, report
from stack import PHOTOGRAPHS, Stack, deployment, expected, stack, uploads

from clip_deploy.client import Connection, TritonInferenceClient
from clip_deploy.client.counters import executions_between
from clip_deploy.compare import agreement
from clip_deploy.spec import TOLERANCES, Tolerance, Tower

MODEL = "ViT-B-32"
# The gateway's own deadline is 30 seconds; a body may take as long to arrive.
PATIENCE_S = 60.0
MEMORY_MB = 300


@dataclass
class Tally:
    """What became of every request."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    wrong: int = 0
    refused_without_retry: int = 0
    latencies_s: dict[int | str, list[float]] = field(default_factory=dict)

    def add(self, status: int | str, latency_s: float) -> None:
        self.statuses[status] += 1
        self.latencies_s.setdefault(status, []).append(latency_s)

    def slowest_s(self, status: int) -> float:
        return max(self.latencies_s.get(status, [0.0]))


class People:
    """Those who upload photographs, and know what should come back.

    Args:
        client: carries all of them.
        files: JPEG files.
        vectors: the embedding of each.
        tolerance: how far an answer may be from that, in the precision that the server computes in.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        files: list[bytes],
        vectors: np.ndarray,
        tolerance: Tolerance,
    ) -> None:
        self._client, self._files, self._vectors = client, files, vectors
        self._limits = tolerance
        self._bodies = [
            {"input": "data:image/jpeg;base64," + base64.b64encode(f).decode()} for f in files
        ]

    async def ask(self, number: int, tally: Tally) -> None:
        """One request: odd numbers search, even ones want the vector."""
        row = number // 2 % len(self._files)
        start = time.perf_counter()
        try:
            async with self._post(number % 2 == 1, row) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            tally.add(type(error).__name__, time.perf_counter() - start)
            return
        tally.add(answer.status, time.perf_counter() - start)
        if answer.status == 200:
            right = self._found if number % 2 else self._embedded
            tally.wrong += not right(json.loads(body), row)
        elif answer.status == 503:
            tally.refused_without_retry += "Retry-After" not in answer.headers

    def _post(self, is_search: bool, row: int) -> Any:
        if not is_search:
            return self._client.post("/v1/embeddings", json=self._bodies[row])
        form = aiohttp.FormData()
        form.add_field("file", self._files[row], filename="photo.jpg", content_type="image/jpeg")
        return self._client.post("/api/v1/search/image", data=form)

    def _found(self, answer: dict[str, Any], row: int) -> bool:
        return answer["results"][0]["source"].endswith(PHOTOGRAPHS[row].name)

    def _embedded(self, answer: dict[str, Any], row: int) -> bool:
        vector = np.asarray(answer["data"][0]["embedding"], np.float32)[None]
        return not agreement(vector, self._vectors[row : row + 1]).faults(self._limits)

    async def crowd(self, users: int, seconds: float) -> Tally:
        """So many people, each of whom asks again when answered."""
        tally, end = Tally(), time.monotonic() + seconds

        async def person(number: int) -> None:
            while time.monotonic() < end:
                await self.ask(number, tally)
                number += 2 * users + 2

        await asyncio.gather(*(person(number) for number in range(users)))
        return tally

    async def at_once(self, people: int) -> Tally:
        """So many people at the same moment, once each."""
        tally = Tally()
        await asyncio.gather(*(self.ask(number, tally) for number in range(people)))
        return tally

    async def alone(self, times: int = 20) -> float:
        """Median seconds of a lone request."""
        tally = Tally()
        for number in range(times):
            await self.ask(2 * number, tally)
        assert set(tally.statuses) == {200}, tally.statuses
        return statistics.median(tally.latencies_s[200])


class Memory:
    """The greatest resident memory of a process while a block runs, in MB."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before_mb = self.peak_mb = self.now()

    def now(self) -> float:
        return self._process.memory_info().rss / 2**20

    async def watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self.now())
            await asyncio.sleep(0.05)


async def prove(options: argparse.Namespace, running: Stack, vectors: np.ndarray) -> list[Figure]:
    with TritonInferenceClient(running.triton.grpc) as direct:
        tolerance = TOLERANCES[direct.model(Tower.IMAGE).precision, Tower.IMAGE]
    async with aiohttp.ClientSession(
        running.gateway,
        timeout=aiohttp.ClientTimeout(PATIENCE_S),
        connector=aiohttp.TCPConnector(limit=options.crowd),
    ) as client:
        people = People(client, uploads(), vectors, tolerance)
        before_s = await people.alone()
        with Connection(running.triton.grpc) as triton:
            first = triton.statistics(Tower.IMAGE.model_name)
            many = await people.crowd(options.users, options.seconds)
            batches = executions_between(first, triton.statistics(Tower.IMAGE.model_name))
        memory = Memory(running.gateway_pid)
        watching = asyncio.create_task(memory.watch())
        thousand = await people.at_once(options.crowd)
        watching.cancel()
        after_s = await people.alone()
    return judged(options, many, batches, thousand, memory, after_s / before_s)


def judged(
    options: argparse.Namespace,
    many: Tally,
    batches: dict[int, int],
    thousand: Tally,
    memory: Memory,
    slower: float,
) -> list[Figure]:
    print(f"{options.users} people: {dict(many.statuses)}, batches {batches}")
    print(f"{options.crowd} at once: {dict(thousand.statuses)}")
    rows = sum(size * count for size, count in batches.items())
    lost = sum(n for status, n in thousand.statuses.items() if status not in (200, 503))
    answered = {
        "per_s": many.statuses[200] / options.seconds,
        "p50_s": statistics.median(many.latencies_s[200]),
    }
    return [
        figure(
            f"{options.users} people: neither 200 nor right",
            [float(many.statuses.total() - many.statuses[200] + many.wrong)],
            0,
            True,
            answered,
        ),
        figure("rows per batch", [rows / sum(batches.values())], 2, False, {"rows": float(rows)}),
        figure(
            f"{options.crowd} at once: neither right nor 503 with Retry-After",
            [float(lost + thousand.wrong + thousand.refused_without_retry)],
            0,
            True,
            {
                "answered": float(thousand.statuses[200]),
                "refused": float(thousand.statuses[503]),
                "slowest_answer_s": thousand.slowest_s(200),
            },
        ),
        figure("the slowest refusal, seconds", [thousand.slowest_s(503)], 5, True, {}),
        figure(
            "the gateway's memory grows by MB",
            [memory.peak_mb - memory.before_mb],
            MEMORY_MB,
            True,
            {"before_mb": memory.before_mb, "peak_mb": memory.peak_mb},
        ),
        figure("a lone request, after ÷ before", [slower], 1.5, True, {}),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--crowd", type=int, default=1000)
    parser.add_argument("--engine", default="openvino", choices=["openvino", "onnxruntime"])
    parser.add_argument("--keep", type=Path, help="a folder that keeps the export between runs")
    parser.add_argument("--log", help="where the gateway's access log goes")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        place = deployment(folder, MODEL, options.engine, max_batch=16)
        vectors = expected(folder, uploads())
        log = ["--log", options.log] if options.log else []
        with stack(place, Path(scratch) / "index", *log) as running:
            figures = asyncio.run(prove(options, running, vectors))
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
