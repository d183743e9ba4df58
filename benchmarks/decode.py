"""Fast decoding of large JPEG files against exact, as ratios measured in one run.

    python benchmarks/decode.py [--json FILE]

A mosaic of the package's photographs at their own size makes a picture of 12 megapixels that is sharp to the pixel.
Time is from the file's bytes to the model's pixels; bar ≤ 0.35. Where a trained CLIP lies in ../shared, the cosine
between the embeddings of both ways is judged, too; bar ≥ 0.999.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import Figure, figure, report
from PIL import Image

from clip_deploy.inputs.images import to_pixels
from clip_deploy.inputs.photographs import photographs
from clip_deploy.spec import EncoderSpec, Preprocess, Tower

PREPROCESS = Preprocess((224, 224), (0.5,) * 3, (0.5,) * 3, "shortest", "bicubic")
TRAINED = Path(__file__).parent.parent.parent / "shared" / "fixtures" / "tiny-clip"


def mosaic(width: int, height: int, first: int) -> bytes:
    page = Image.new("RGB", (width, height))
    tiles = [Image.open(path).convert("RGB") for path in photographs(None).paths]
    x = y = row = 0
    while y < height:
        tile = tiles[first % len(tiles)]
        page.paste(tile, (x, y))
        x, row, first = x + tile.width, max(row, tile.height), first + 1
        if x >= width:
            x, y, row = 0, y + row, 0
    file = io.BytesIO()
    page.save(file, "JPEG", quality=92)
    return file.getvalue()


def _seconds(files: list[bytes], decode: str) -> float:
    start = time.perf_counter()
    to_pixels(files, PREPROCESS, decode=decode)
    return time.perf_counter() - start


def times(files: list[bytes], repeats: int = 7) -> Figure:
    pairs = [(_seconds(files, "fast"), _seconds(files, "exact")) for _ in range(repeats)]
    fast, exact = (float(np.median([pair[i] for pair in pairs])) for i in (0, 1))
    parts = {"fast_s": fast / len(files), "exact_s": exact / len(files)}
    return figure("fast ÷ exact, 12 megapixels", [a / b for a, b in pairs], 0.35, True, parts)


def cosines(files: list[bytes]) -> Figure:
    from clip_deploy.compare import cosine
    from clip_deploy.export import export
    from clip_deploy.export.parity import session

    with tempfile.TemporaryDirectory() as folder:
        weights = str(TRAINED / "tiny-clip.safetensors")
        spec = EncoderSpec(str(TRAINED / "tiny-clip.json"), weights, towers=(Tower.IMAGE,))
        (model,) = export(spec, Path(folder))
        encode, preprocess = session(model.graph_files[0]), model.contract.preprocess
        exact, fast = (
            encode(to_pixels(files, preprocess, decode=how)) for how in ("exact", "fast")
        )
    found = cosine(exact, fast)
    parts = {"pictures": len(files)}
    return figure("cosine of fast and exact, least", [float(found.min())], 0.999, False, parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    files = [mosaic(4000, 3000, first) for first in range(4)]
    figures = [times(files)]
    if TRAINED.is_dir():
        figures.append(cosines(files))
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
