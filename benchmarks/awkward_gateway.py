"""Awkward files and texts through the whole product: a right vector or a refusal by name, no 500, no hang, no growth.

    python benchmarks/awkward_gateway.py [--folder CACHE] [--mutations 1000] [--seed 0] [--json FILE]

What benchmarks/awkward.py collects (Pillow's own test images, random mutations of valid files, hostile files and texts)
is uploaded to a gateway in front of a real Triton with a small model, eight at a time. Each answer is 200, with the
vector that the client gives for the same file, or 413 or 422 with a remedy, where the client refuses it, too.

Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from awkward import CACHE, corpus, hostile, hostile_texts, mutations
from figures import Figure, figure, report
from stack import deployment, stack

from clip_deploy.client import TritonInferenceClient
from clip_deploy.errors import InputError

MODEL = str(Path(__file__).parent.parent / "tests" / "models" / "tiny-clip.json")
AT_ONCE = 8
PATIENCE_S = 30.0
MEMORY_MB = 1500  # eight pictures of 89 megapixels may be decoded at once, on as many threads as there are cores

Case = tuple[str, "bytes | str"]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    files = corpus(options.folder)
    for path in files:
        yield path.name, path.read_bytes()
    for number, data in enumerate(mutations(files, options.seed, options.mutations)):
        yield f"mutation {number}", data
    yield from hostile().items()
    yield from hostile_texts().items()


class Examiner:
    """Sends each case to the gateway and to the client, and compares.

    Args:
        session: of the gateway.
        client: asks Triton directly.
    """

    def __init__(self, session: aiohttp.ClientSession, client: TritonInferenceClient) -> None:
        self._session, self._client = session, client
        self.statuses: Counter[int | str] = Counter()
        self.faults: list[str] = []
        self.slowest_s = 0.0

    async def work(self, waiting: Iterator[Case]) -> None:
        for name, case in waiting:
            await self.examine(name, case)

    async def examine(self, name: str, case: bytes | str) -> None:
        start = time.perf_counter()
        try:
            body = {"input": case if isinstance(case, str) else _uri(case)}
            async with self._session.post("/v1/embeddings", json=body) as answer:
                status, said = answer.status, await answer.json(content_type=None)
        except (aiohttp.ClientError, asyncio.TimeoutError, UnicodeError) as error:
            status, said = type(error).__name__, {}
        self.slowest_s = max(self.slowest_s, time.perf_counter() - start)
        self.statuses[status] += 1
        expected = await asyncio.to_thread(self._expected, case)
        if status == 200:
            got = np.asarray(said["data"][0]["embedding"], np.float32)
            if expected is None or float(got @ expected) < 0.9999:
                self.faults.append(f"{name}: a vector that the client does not give")
        elif status not in (413, 422) or not said.get("remedy"):
            self.faults.append(f"{name}: {status} {said}")
        elif expected is not None:
            self.faults.append(f"{name}: refused, but the client embeds it: {said['detail']}")

    def _expected(self, case: bytes | str) -> np.ndarray | None:
        try:
            if isinstance(
                case, str
            ):  # what is no UTF-8 has no way through JSON; nothing has no meaning
                is_text = case.strip() and case.encode(errors="ignore").decode() == case
                return self._client.embed_texts([case])[0] if is_text else None
            return self._client.embed_images([case])[0]
        except InputError:
            return None


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


async def examine(url: str, grpc: str, pid: int, waiting: Iterable[Case]) -> list[Figure]:
    process, peak = psutil.Process(pid), 0.0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss / 2**20)
            await asyncio.sleep(0.05)

    before = process.memory_info().rss / 2**20
    watching = asyncio.create_task(watch())
    with TritonInferenceClient(grpc) as client:
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            examiner, queue = Examiner(session, client), iter(waiting)
            await asyncio.gather(*(examiner.work(queue) for _ in range(AT_ONCE)))
    watching.cancel()
    after = process.memory_info().rss / 2**20
    print(dict(examiner.statuses), *examiner.faults[:40], sep="\n")
    counted = {str(status): float(count) for status, count in examiner.statuses.items()}
    memory = {"before_mb": before, "after_mb": after}
    return [
        figure("neither right nor refused by name", [len(examiner.faults)], 0, True, counted),
        figure("the slowest answer, seconds", [examiner.slowest_s], PATIENCE_S, True, {}),
        figure("the gateway's memory grows by MB", [peak - before], MEMORY_MB, True, memory),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=CACHE)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        place = deployment(Path(scratch), MODEL, "onnxruntime", max_batch=8)
        with stack(place) as running:
            figures = asyncio.run(
                examine(running.gateway, running.triton.grpc, running.gateway_pid, cases(options))
            )
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
