"""Images per second on a GPU at batch 1, best and largest: ONNX Runtime's CUDA provider and TensorRT side by side.

    python benchmarks/gpu.py [MODEL] [--json FILE]

Needs a GPU and ``pip install 'clip-deploy[export,gpu]'``. Both run the same FP16 graph of the image tower on the same
inputs, in turns; an engine that is slower than ONNX Runtime at any batch size misses the bar.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import figure, report

SECONDS, REPEATS = 2.0, 5


def rate(run, rows: np.ndarray) -> float:
    """Images per second; the clock starts after a warm-up."""
    for _ in range(3):
        run(rows)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        run(rows)
        count += len(rows)
    return count / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="ViT-B-32")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()

    import onnxruntime
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    from clip_deploy.compare import Reference
    from clip_deploy.engines.tensorrt.building import BuildOptions, build
    from clip_deploy.export import export
    from clip_deploy.spec import EncoderSpec, Precision, Tower

    figures = []
    with tempfile.TemporaryDirectory() as folder:
        spec = EncoderSpec(arguments.model, "random", (Tower.IMAGE,), Precision.FP16)
        (model,) = export(spec, Path(folder))
        plan = build(model, BuildOptions())
        reference = Reference.read(model.directory / "reference.npz", Tower.IMAGE)
        session = onnxruntime.InferenceSession(
            str(model.graph_files[0]), providers=["CUDAExecutionProvider"]
        )
        assert session.get_providers()[0] == "CUDAExecutionProvider", "it fell back to the CPU"
        name = model.contract.input.name
        with TrtRunner(EngineFromBytes(BytesFromPath(str(plan.path)))) as runner:
            for size in sorted({1, plan.profile.best, plan.profile.most}):
                rows = reference.inputs[np.resize(np.arange(len(reference.inputs)), size)]
                pairs = [
                    (
                        rate(lambda r: runner.infer({name: r}), rows),
                        rate(lambda r: session.run(None, {name: r}), rows),
                    )
                    for _ in range(REPEATS)
                ]
                parts = {
                    "tensorrt_images_per_s": statistics.median(a for a, _ in pairs),
                    "onnxruntime_images_per_s": statistics.median(b for _, b in pairs),
                }
                title = f"TensorRT ÷ ONNX Runtime CUDA, batch {size}"
                figures.append(figure(title, [a / b for a, b in pairs], 1.0, False, parts))
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
