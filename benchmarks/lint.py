"""What linting a hundred models of ViT-B-32 size costs, in CPU seconds and memory.

    python benchmarks/lint.py [--json FILE]

The image tower of ViT-B-32 lies there a hundred times, 350 MB each, as files of their own whose weights are holes, so
that the disk holds them; to a reader they are as long as real ones. All have one structure, as versions of a model do;
a graph of another structure costs 5 ms more, which is onnx's shape inference. The peer in the same run is
``onnx.load``, which is what a checker does that reads a model to look at it. Bars: 1 s of CPU, 300 MB, and a fiftieth
of the peer's CPU time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import figure, peak, report

MODELS = 100
REPEATS = 9


def repository(folder: Path) -> Path:
    """A hundred models; the first is rendered, the others are sparse copies under other names."""
    import onnx

    from clip_deploy.artifacts import exported_models
    from clip_deploy.engines import BACKENDS
    from clip_deploy.export import export
    from clip_deploy.repository import assemble
    from clip_deploy.spec import EncoderSpec, ServingSpec, Tower

    export(EncoderSpec("ViT-B-32", "random", towers=(Tower.IMAGE,)), folder / "build")
    (model,) = exported_models([folder / "build"])
    rendered = assemble(BACKENDS["onnxruntime"].build(model), ServingSpec(), folder / "rendered")
    source = folder / "rendered" / rendered.name
    graph = onnx.load(source / "1" / "model.onnx")
    for tensor in graph.graph.initializer:
        tensor.raw_data = bytes(len(tensor.raw_data))
    onnx.save(graph, folder / "hollow.onnx")
    (source / "1" / "model.onnx").unlink()
    for number in range(MODELS):
        copy = folder / "models" / f"image_{number}"
        shutil.copytree(source, copy)
        config = copy / "config.pbtxt"
        config.write_text(config.read_text("utf-8").replace(f'"{rendered.name}"', f'"{copy.name}"'))
        sparse = ["cp", "--sparse=always", folder / "hollow.onnx", copy / "1" / "model.onnx"]
        subprocess.run(sparse, check=True)
    return folder / "models"


def cpu(code: str) -> float:
    """CPU seconds of a Python process, its start included."""
    tail = "\nimport resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
    command = [sys.executable, "-c", code + tail]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def forget(models: Path) -> None:
    """Drop the graphs from the page cache, as they are after a download on another machine."""
    for graph in models.glob("*/1/model.onnx"):
        with graph.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = repository(Path(folder))
        lint = (
            "from pathlib import Path; from clip_deploy.lint import lint, target;"
            f"report = lint([Path({str(models)!r})], target('cpu', '24.10'));"
            f"assert len(report.models) == {MODELS}; assert not report.findings, report.findings"
        )
        load = f"import onnx; onnx.load({str(models / 'image_0' / '1' / 'model.onnx')!r})"
        times = [(cpu(lint), cpu(load)) for _ in range(REPEATS + 1)][1:]
        cold = []
        for _ in range(3):
            forget(models)
            cold.append(cpu(lint))
        memory, peer_memory = peak(lint), peak(load)
    parts = {
        "lint_cpu_s": statistics.median(a for a, _ in times),
        "onnx_load_of_one_cpu_s": statistics.median(b for _, b in times),
    }
    figures = [
        # Another program on the machine only adds to CPU seconds, so the least is the one to hold against a limit.
        figure(
            f"least CPU seconds for {MODELS} models ÷ 1 s",
            [min(a for a, _ in times)],
            1.0,
            True,
            parts,
        ),
        figure(
            f"CPU for {MODELS} models ÷ {MODELS} × onnx.load of one",
            [a / (MODELS * b) for a, b in times],
            0.02,
            True,
            parts,
        ),
        figure(
            "CPU with nothing in the page cache ÷ with all",
            [each / parts["lint_cpu_s"] for each in cold],
            1.5,
            True,
            {"cold_cpu_s": statistics.median(cold)},
        ),
        figure(
            "peak memory ÷ 300 MB",
            [memory / 300],
            1.0,
            True,
            {"lint_mb": memory, "onnx_load_of_one_mb": peer_memory},
        ),
    ]
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
