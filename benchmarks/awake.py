"""The shop stays awake: how long a light endpoint waits while a hundred people search, in the old design and the new.

    python benchmarks/awake.py [--users 100] [--seconds 20] [--repeats 2] [--engine openvino] [--json FILE]

In turns, on the same cores: a web process that holds ViT-B-32 in torch (shop.py old), and one that asks Triton
(shop.py new). A hundred people upload photographs one after another; meanwhile a visitor asks for a page of products
every 50 ms, and each of those latencies counts from the moment at which it was due.

- p99 of the products page, old ÷ new: bar ≥ 10.

Exit code 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
from figures import figure, report
from stack import deployment, free_port, process, uploads

from clip_deploy import repository as repositories
from clip_deploy.servers import LAUNCHERS, ServerOptions

MODEL = "ViT-B-32"
EVERY_S = 0.05
WARMUP_S = 3.0
PATIENCE_S = 300.0


@contextlib.contextmanager
def shop(*arguments: str) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(Path(__file__).with_name("shop.py")), *arguments, str(port)]
    with process(command, f"{url}/api/v1/products"):
        yield url


async def visit(url: str, users: int, seconds: float) -> tuple[float, float]:
    """p99 seconds of the products page, and searches per second, while so many people search."""
    files, latencies, searches, end = uploads(), [], 0, time.monotonic() + WARMUP_S + seconds

    async with aiohttp.ClientSession(
        url,
        raise_for_status=True,
        timeout=aiohttp.ClientTimeout(PATIENCE_S),
        connector=aiohttp.TCPConnector(limit=0),
    ) as client:

        async def person(number: int) -> None:
            nonlocal searches
            while time.monotonic() < end:
                async with client.post("/search", data=files[number % len(files)]) as answer:
                    await answer.read()
                searches += time.monotonic() < end
                number += 1

        async def page(due: float) -> None:
            async with client.get("/api/v1/products") as answer:
                await answer.read()
            latencies.append(time.monotonic() - due)

        people = [asyncio.create_task(person(number)) for number in range(users)]
        await asyncio.sleep(WARMUP_S)
        searches, pages, due = 0, [], time.monotonic()
        while due < end:
            pages.append(asyncio.create_task(page(due)))
            due += EVERY_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*people, *pages)
    return float(np.percentile(latencies, 99)), searches / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", default="openvino", choices=["openvino", "onnxruntime"])
    parser.add_argument("--keep", type=Path, help="a folder that keeps the export between runs")
    parser.add_argument("--json")
    options = parser.parse_args()
    old, new = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        place = deployment(folder, MODEL, options.engine, max_batch=16)
        for _ in range(options.repeats):
            with shop("old", MODEL) as url:
                old.append(asyncio.run(visit(url, options.users, options.seconds)))
            with (
                LAUNCHERS["embedded"].start(repositories.read(place), ServerOptions()) as triton,
                shop("new", triton.grpc) as url,
            ):
                new.append(asyncio.run(visit(url, options.users, options.seconds)))
            print(f"old: {old[-1]}, new: {new[-1]}", file=sys.stderr, flush=True)
    parts = {
        f"{name}_{key}": statistics.median(values[i] for values in rounds)
        for name, rounds in (("old", old), ("new", new))
        for i, key in enumerate(("p99_s", "searches_per_s"))
    }
    ratios = [a[0] / b[0] for a, b in zip(old, new)]
    return report(
        [figure("p99 of the products page, old ÷ new", ratios, 10, False, parts)], options.json
    )


if __name__ == "__main__":
    sys.exit(main())
