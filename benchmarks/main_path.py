"""What the main path costs, as ratios measured in one run: start-up, served throughput, memory of an export.

    python benchmarks/main_path.py [startup] [throughput] [memory] [--json FILE]

- startup: ``clip-deploy --help`` against ``python -c "import typer"``; bar ≤ 2.5.
- throughput: single images from 32 users through the embedded server, against the same ONNX Runtime session's best raw
  throughput over batch sizes, in turns on the same cores; bar ≥ 0.93.
- memory: the peak of exporting one tower, less the bare import of torch and open_clip, against its weights; bar ≤ 4.

A figure is the median of its repeats, with the least and the greatest. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from figures import Figure, figure, peak, report

MODEL = "ViT-B-32"
USERS = 32


def startup(repeats: int = 11) -> list[Figure]:
    ours = [str(Path(sys.executable).with_name("clip-deploy")), "--help"]
    bare = [sys.executable, "-c", "import typer"]
    pairs = [(_seconds(ours), _seconds(bare)) for _ in range(repeats + 1)][1:]
    parts = {
        "help_s": statistics.median(a for a, _ in pairs),
        "import_typer_s": statistics.median(b for _, b in pairs),
    }
    return [
        figure("clip-deploy --help ÷ import typer", [a / b for a, b in pairs], 2.5, True, parts)
    ]


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def memory(build: Path) -> list[Figure]:
    """Each tower in a process of its own; the kernel's high-water mark of resident memory."""
    bare = peak("import torch, open_clip")
    figures = []
    for tower in ("image", "text"):
        code = (
            "from pathlib import Path; from clip_deploy.export import export; from clip_deploy.spec import *;"
            f"export(EncoderSpec({MODEL!r}, 'random', towers=(Tower({tower!r}),)), Path({str(build / 'memory')!r}))"
        )
        highest = peak(code)
        weights = (build / "memory" / f"clip_{tower}_encoder" / "model.onnx").stat().st_size / 2**20
        parts = {"peak_mb": highest, "bare_import_mb": bare, "weights_mb": weights}
        figures.append(
            figure(
                f"memory of exporting the {tower} tower ÷ its weights",
                [(highest - bare) / weights],
                4,
                True,
                parts,
            )
        )
    shutil.rmtree(build / "memory")
    return figures


def throughput(build: Path, seconds: float = 12.0, repeats: int = 3) -> list[Figure]:
    from clip_deploy import repository as repositories
    from clip_deploy.artifacts import exported_models
    from clip_deploy.client import Connection
    from clip_deploy.compare import Reference, agreement
    from clip_deploy.engines import BACKENDS
    from clip_deploy.export import export
    from clip_deploy.servers import LAUNCHERS, ServerOptions
    from clip_deploy.spec import EncoderSpec, ServingSpec, Tower

    export(EncoderSpec(MODEL, "random", towers=(Tower.IMAGE,)), build)
    (model,) = exported_models([build])
    repositories.assemble(BACKENDS["python"].build(model), ServingSpec(), build / "models")
    reference = Reference.read(model.directory / "reference.npz", Tower.IMAGE)
    raw = _raw_session(model.graph_files[0], reference.inputs)
    best = max((1, 2, 4, 8, 16, 32), key=lambda size: raw(size, 3.0))
    ratios, parts = [], {"best_raw_batch": float(best)}
    for _ in range(repeats):
        before = raw(best, seconds)
        with (
            LAUNCHERS["embedded"].start(
                repositories.read(build / "models"), ServerOptions(), print
            ) as handle,
            Connection(handle.grpc) as connection,
        ):
            served = _served(connection, reference, agreement, seconds)
        after = raw(best, seconds)
        ratios.append(served / ((before + after) / 2))
        parts |= {"raw_images_per_s": (before + after) / 2, "served_images_per_s": served}
    return [figure(f"served ÷ raw ONNX Runtime, {USERS} users", ratios, 0.93, False, parts)]


def _raw_session(graph: Path, inputs: np.ndarray):
    """The same session as the served one, in a process of its own so that its threads are gone afterwards."""

    def run(size: int, seconds: float) -> float:
        code = f"""
import time, numpy as np, onnxruntime
session = onnxruntime.InferenceSession({str(graph)!r}, providers=["CPUExecutionProvider"])
rows = np.random.default_rng(0).standard_normal(({size}, {", ".join(map(str, inputs.shape[1:]))})).astype(np.float32)
name = session.get_inputs()[0].name
session.run(None, {{name: rows}})
start, count = time.perf_counter(), 0
while time.perf_counter() - start < {seconds}:
    session.run(None, {{name: rows}}); count += {size}
print(count / (time.perf_counter() - start))
"""
        return float(
            subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True
            ).stdout
        )

    return run


def _served(connection, reference, agreement, seconds: float) -> float:
    """Images per second from ``USERS`` users who each wait for an answer; every answer is compared with torch's."""
    wrong, counts, stop = [], [0] * USERS, threading.Event()

    def user(i: int) -> None:
        while not stop.is_set():
            row = slice(
                (i + counts[i]) % len(reference.inputs), (i + counts[i]) % len(reference.inputs) + 1
            )
            got = connection.infer(
                "clip_image_encoder", {"pixel_values": reference.inputs[row]}, "image_embeds"
            )
            if agreement(got, reference.outputs[row]).min_cosine < 0.9999:
                wrong.append(i)
            counts[i] += 1

    threads = [threading.Thread(target=user, args=(i,)) for i in range(USERS)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    before, start = sum(counts), time.perf_counter()
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - start)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, f"{len(wrong)} wrong answers"
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", default=[], choices=["startup", "throughput", "memory", []]
    )
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    chosen = arguments.what or ["startup", "memory", "throughput"]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            figures += startup() if name == "startup" else globals()[name](Path(folder))
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
