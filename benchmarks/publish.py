"""What publishing costs, and what its users notice of it: nothing.

    python benchmarks/publish.py [--json FILE] [--minutes 3] [--model ViT-B-32]

The image tower of ViT-B-32 (350 MB) goes to a folder, in turn with ``cp`` and ``sha256sum`` of the same graph:
publishing judges the repository, copies every file, reads each back, holds both digests against one another, and waits
until the disk has it all. Bar: 1.5 times the two commands, and 1.5 times ``cp`` and Python's own SHA-256, which is the
faster one where the processor has instructions for it.

Then 16 users ask without a pause while one model after the other is published, reloaded and rolled back, on a Triton
that takes loads and on one that polls. Bars: no failed request, no wrong vector.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from figures import Figure, figure, report

from clip_deploy import repository as repositories
from clip_deploy.artifacts import exported_models
from clip_deploy.client import Connection
from clip_deploy.compare import Reference, agreement
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ClipDeployError
from clip_deploy.export import export
from clip_deploy.files import digest
from clip_deploy.publishing import publish, rollback
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.spec import TOLERANCES, EncoderSpec, Precision, ServingSpec, Tower

REPEATS = 7
USERS = 16
TOWER = Tower.IMAGE
MODES = {
    "explicit": ("--model-control-mode=explicit", "--load-model=*"),
    "poll": ("--model-control-mode=poll", "--repository-poll-secs=2"),
}


def repository(folder: Path, model: str, seed: int) -> Path:
    spec = EncoderSpec(model, f"random:{seed}", towers=(TOWER,), max_batch=8)
    export(spec, folder / f"build{seed}")
    (exported,) = exported_models([folder / f"build{seed}"])
    models = folder / f"models{seed}"
    repositories.assemble(BACKENDS["python"].build(exported), ServingSpec(), models)
    return models


def copying(models: Path, folder: Path) -> list[Figure]:
    """Publishing to an empty folder ÷ cp and SHA-256, in turn."""
    graph = models / TOWER.model_name / "1" / "model.onnx"
    rounds = []
    for i in range(REPEATS + 1):
        copy, dest = folder / "copy.onnx", folder / f"dest{i}"
        commands = {
            "publish": lambda dest=dest: publish(models, dest),
            "cp": lambda copy=copy: subprocess.run(["cp", graph, copy], check=True),
            "sha256sum": lambda: subprocess.run(
                ["sha256sum", graph], check=True, stdout=subprocess.DEVNULL
            ),
            "hashlib": lambda: digest([graph]),
        }
        rounds.append({name: _seconds(command) for name, command in commands.items()})
        copy.unlink()
        shutil.rmtree(dest)
    rounds = rounds[1:]  # the first one imports
    parts = {"graph_mb": graph.stat().st_size / 1e6}
    parts |= {f"{name}_s": statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return [
        figure(
            f"publish to a folder ÷ cp and {hasher}",
            [each["publish"] / (each["cp"] + each[hasher]) for each in rounds],
            1.5,
            True,
            parts,
        )
        for hasher in ("sha256sum", "hashlib")
    ]


def _seconds(command: Callable[[], object]) -> float:
    began = time.perf_counter()
    command()
    return time.perf_counter() - began


class Users:
    """Ask without a pause, and hold every answer against what either model says."""

    def __init__(self, url: str, models: list[Path]) -> None:
        self.url = url
        self.references = [
            Reference.read(each / TOWER.model_name / "1" / "reference.npz", TOWER)
            for each in models
        ]
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(i,)) for i in range(USERS)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def ask(self, row: int) -> None:
        inputs, limits = self.references[0].inputs, TOLERANCES[Precision.FP32, TOWER]
        with Connection(self.url) as connection:
            while not self.stop.is_set():
                row = (row + 1) % len(inputs)
                rows = slice(row, row + 1)
                try:
                    got = connection.infer(
                        TOWER.model_name, {TOWER.input_name: inputs[rows]}, TOWER.output_name
                    )
                except ClipDeployError as error:
                    self.counts[f"failed: {error}"] += 1
                    continue
                right = [
                    i
                    for i, each in enumerate(self.references)
                    if not agreement(got, each.outputs[rows]).faults(limits)
                ]
                self.counts[f"model {right[0]}" if right else "wrong"] += 1


def under_load(models: list[Path], mode: str, folder: Path, minutes: float) -> list[Figure]:
    """Publish one model after the other, and roll back in between, until the time is over."""
    dest = folder / f"served-{mode}"
    publish(models[0], dest)
    switches = 0
    arguments = (*MODES[mode], "--exit-timeout-secs=5")
    options = ServerOptions(arguments=arguments)
    with LAUNCHERS["embedded"].start(repositories.read(dest), options) as server:
        users = Users(server.grpc, models)
        try:
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                publish(models[1], dest, reload=[server.grpc])
                rollback(dest, reload=[server.grpc])
                switches += 2
        finally:
            users.end()
    print(mode, dict(users.counts))
    total = sum(users.counts.values())
    failed = sum(n for key, n in users.counts.items() if key.startswith("failed"))
    parts = {"requests": total, "switches": switches, "minutes": minutes}
    return [
        figure(f"{mode}: failed requests of {USERS} users", [failed], 0, True, parts),
        figure(f"{mode}: wrong vectors", [users.counts["wrong"]], 0, True, parts),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=3, help="of load, in each mode")
    parser.add_argument("--model", default="ViT-B-32", help="of the load; the copy is ViT-B-32's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as place:
        folder = Path(place)
        figures = copying(repository(folder / "copy", "ViT-B-32", 0), folder)
        shutil.rmtree(folder / "copy")
        models = [repository(folder, arguments.model, seed) for seed in (1, 2)]
        for mode in MODES:
            figures += under_load(models, mode, folder, arguments.minutes)
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
