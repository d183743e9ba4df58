"""How far a capacity plan is off, against the embedded server under Poisson load at 50, 80 and 95 % of its capacity.

    python benchmarks/capacity.py [asleep] [vit] [--duration SECONDS] [--json FILE]

- asleep: a tiny model that sleeps 10 ms and 10 ms more for each row, so that nothing but the batcher is judged.
- vit: ViT-S-32-alt in ONNX Runtime, where front end, load generator and model share the cores.

Throughput may be off by 10 %, p99 by 20 %. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from figures import Figure, figure, report

from clip_deploy import repository as repositories
from clip_deploy.artifacts import exported_models
from clip_deploy.bench.costs import measure_box
from clip_deploy.bench.subject import bench_subject
from clip_deploy.capacity.checking import P99_BAR, THROUGHPUT_BAR, check
from clip_deploy.client import TritonInferenceClient
from clip_deploy.engines import BACKENDS
from clip_deploy.export import export
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.smoke.subject import targets_of
from clip_deploy.spec import EncoderSpec, ServingSpec, Tower

TINY = Path(__file__).parent.parent / "tests" / "models" / "tiny-clip.json"
SLEEPS = """

class TritonPythonModel(TritonPythonModel):
    def embed(self, inputs):
        import time

        time.sleep(0.010 + 0.010 * sum(map(len, inputs)))
        return super().embed(inputs)
"""


def asleep(folder: Path, duration_s: float) -> list[Figure]:
    one_thread = {"intra_op_thread_count": "1"}  # two would spin while the model sleeps
    models = _assembled(str(TINY), folder, one_thread)
    for code in models.glob("*/1/model.py"):
        code.write_text(code.read_text("utf-8") + SLEEPS, "utf-8")
    return _errors("asleep", models, duration_s)


def vit(folder: Path, duration_s: float) -> list[Figure]:
    return _errors("ViT-S-32-alt", _assembled("ViT-S-32-alt", folder), duration_s)


def _assembled(model: str, folder: Path, parameters: dict[str, str] | None = None) -> Path:
    export(EncoderSpec(model, "random", towers=(Tower.IMAGE,), max_batch=8), folder / "build")
    (exported,) = exported_models([folder / "build"])
    serving = ServingSpec(parameters=parameters or {})
    repositories.assemble(BACKENDS["python"].build(exported), serving, folder / "models")
    return folder / "models"


def _errors(name: str, models: Path, duration_s: float) -> list[Figure]:
    found = repositories.read(models)
    with (
        LAUNCHERS["embedded"].start(found, ServerOptions(), print) as handle,
        TritonInferenceClient(handle.grpc) as client,
    ):
        (target,) = targets_of(client, found)
        subject = bench_subject(client, target, pid=handle.process.pid)

        def measure():
            return measure_box(subject, seconds=duration_s)

        compared = check(subject, measure(), measure, duration_s=duration_s, progress=print)
    figures = []
    for each in compared:
        at = f"{name} at {each.level:.0%}"
        measured, latency = each.measured, each.measured.latency
        assert latency is not None
        rates = {"measured": measured.throughput, "predicted": each.predicted_throughput}
        p99s = {"measured_ms": latency.p99_s * 1e3, "predicted_ms": each.predicted.p99_s * 1e3}
        if each.same_pace_p99_s is not None:
            p99s["same_pace_ms"] = each.same_pace_p99_s * 1e3
        figures += [
            figure(
                f"{at}: throughput off by",
                [abs(each.throughput_error)],
                THROUGHPUT_BAR,
                True,
                rates,
            ),
            figure(f"{at}: p99 off by", [abs(each.p99_error)], P99_BAR, True, p99s),
        ]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=[], choices=["asleep", "vit", []])
    parser.add_argument("--duration", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    figures = []
    for name in arguments.what or ["asleep", "vit"]:
        with tempfile.TemporaryDirectory() as folder:
            figures += globals()[name](Path(folder), arguments.duration)
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
