"""An engine with nothing around it, in a process of its own so that its threads are gone afterwards; for peers.py.

python raw_session.py GRAPH REFERENCE openvino|onnxruntime BATCH STREAMS SECONDS bf16|fp32
python raw_session.py gemm SECONDS bf16|fp32
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import numpy as np

# Matrix products of ViT-B/32's image tower: (rows per picture, inner, outer, times). 49 patches, 50 tokens.
PRODUCTS = [
    (49, 3072, 768, 1),
    (50, 768, 2304, 12),
    (50, 768, 768, 12),
    (50, 768, 3072, 12),
    (50, 3072, 768, 12),
]


def openvino(
    graph: str, rows: np.ndarray, streams: int, seconds: float, precision: str
) -> tuple[int, float, list[float]]:
    import openvino as ov

    options = {
        "INFERENCE_PRECISION_HINT": {"bf16": "bf16", "fp32": "f32"}[precision],
        "NUM_STREAMS": streams,
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        "ENABLE_CPU_PINNING": False,
    }
    compiled = ov.Core().compile_model(graph, "CPU", options)
    queue = ov.AsyncInferQueue(compiled, streams)
    for _ in range(streams):
        queue.start_async([rows], share_inputs=True)
    queue.wait_all()
    times, runs, start = [], 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        queue.start_async([rows], share_inputs=True)
        if streams == 1:
            queue.wait_all()
        times.append(time.perf_counter() - began)
        runs += 1
    queue.wait_all()
    return runs, time.perf_counter() - start, times


def onnxruntime(
    graph: str, rows: np.ndarray, streams: int, seconds: float, precision: str
) -> tuple[int, float, list[float]]:
    import onnxruntime as ort

    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    session.run(None, {name: rows})
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        session.run(None, {name: rows})
        times.append(time.perf_counter() - began)
    return len(times), time.perf_counter() - start, times


def gemm(seconds: float, precision: str, batch: int = 16) -> float:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    total_s = 0.0
    for rows, inner, outer, times in PRODUCTS:
        left = torch.randn(rows * batch, inner, dtype=dtype)
        right = torch.randn(outer, inner, dtype=dtype)
        for _ in range(3):
            torch.nn.functional.linear(left, right)
        taken, end = [], time.perf_counter() + seconds / len(PRODUCTS)
        while time.perf_counter() < end:
            began = time.perf_counter()
            torch.nn.functional.linear(left, right)
            taken.append(time.perf_counter() - began)
        total_s += statistics.mean(taken) * times
    return batch / total_s


if sys.argv[1] == "gemm":
    print(gemm(float(sys.argv[2]), sys.argv[3]))
else:
    graph, reference, engine, batch, streams, seconds, precision = sys.argv[1:]
    inputs = np.load(reference)["pixel_values"]
    rows = np.resize(inputs, (int(batch), *inputs.shape[1:]))
    runs, taken_s, times = globals()[engine](graph, rows, int(streams), float(seconds), precision)
    print(
        json.dumps({"rate": runs * len(rows) / taken_s, "p50_ms": statistics.median(times) * 1000})
    )
