"""What an FP16 graph costs and keeps: its size, how well it agrees, whether searches find the same.

    python benchmarks/half.py [MODEL ...] [--json FILE]

Each model is exported twice, in FP32 and in FP16; the FP16 graph is rehearsed, that is, run with every FP16 result
rounded as a GPU rounds it. MODEL is an open_clip architecture with random weights; by default ViT-B-32, and the trained
tiny-clip of ../shared/fixtures where it is, whose figures mean something. Bars: size ≤ 0.52, the tolerances of
``spec.TOLERANCES``, and every search as before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from figures import Figure, figure, report

FIXTURE = Path(__file__).parent.parent.parent / "shared" / "fixtures" / "tiny-clip"
WIDEST = 0.52


def measure(name: str, folder: Path) -> list[Figure]:
    from clip_deploy.compare import Reference, cosine
    from clip_deploy.export import export, parity
    from clip_deploy.spec import TOLERANCES, EncoderSpec, Precision

    choices = {"model": name, "pretrained": "random", "max_batch": 8}
    if name == "tiny-clip":
        choices |= {
            "model": str(FIXTURE / "tiny-clip.json"),
            "pretrained": str(FIXTURE / "tiny-clip.safetensors"),
            "images": FIXTURE / "photos",
        }
    single = {m.name: m for m in export(EncoderSpec(**choices), folder / "fp32")}
    figures = []
    for model in export(EncoderSpec(**choices, precision=Precision.FP16), folder / "fp16"):
        tower = model.contract.tower
        reference = Reference.read(model.directory / "reference.npz", tower)
        got = parity.rehearsed(model.graph_files[0])(reference.inputs)
        cosines = cosine(got, reference.outputs)
        size = model.graph.size_bytes / single[model.name].graph.size_bytes
        limit = TOLERANCES[Precision.FP16, tower].cosine
        title = f"{name}, {tower.value}"
        parts = {"casts": model.conversion["casts"], "kept": len(model.conversion["kept_fp32"])}
        figures.append(figure(f"{title}: FP16 file ÷ FP32 file", [size], WIDEST, True, parts))
        parts = {
            "mean_cosine": float(np.mean(cosines)),
            "largest": model.conversion["largest_fp16_value"],
        }
        figures.append(
            figure(f"{title}: least cosine ÷ 1", [float(cosines.min())], limit, False, parts)
        )
        for search, share in model.parity["ranks"].items():
            figures.append(
                figure(f"{title}: searches as before, {search}", [share], 0.99, False, {})
            )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    models = arguments.model or [*(["tiny-clip"] if FIXTURE.is_dir() else []), "ViT-B-32"]
    figures: list[Figure] = []
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            figures += measure(name, Path(folder))
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
