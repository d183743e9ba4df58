"""Every awkward file gives pixels or a refusal in words, within bounds of time and memory: Pillow's own test images,
random mutations of valid files, and hostile files and texts.

    python benchmarks/awkward.py [--folder CACHE] [--mutations 1000] [--seed 0]

Fetches Pillow's source distribution by its package name, once, into the cache folder.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
import resource
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from PIL import Image
from PIL import __version__ as PILLOW

from clip_deploy.errors import InputError
from clip_deploy.inputs.texts import MAX_CHARACTERS

# What one file may cost: above what a picture of the largest allowed size takes (89 megapixels of RGBA, twice).
MEMORY_MB, SECONDS = 1500, 20.0
CACHE = Path.home() / ".cache" / "clip-deploy" / "awkward"


def corpus(folder: Path) -> list[Path]:
    """Pillow's own test images, about a thousand, damaged and hostile ones among them; fetched once into ``folder``."""
    images = folder / f"pillow-{PILLOW}" / "Tests" / "images"
    if not images.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / f"pillow-{PILLOW}.tar.gz"
        if not archive.is_file():
            _download(folder)
        with tarfile.open(archive) as tar:
            inside = f"pillow-{PILLOW}/Tests/images/"
            members = [m for m in tar if m.isfile() and m.name.startswith(inside)]
            tar.extractall(folder, members, filter="data")
    return sorted(path for path in images.rglob("*") if path.is_file())


def _download(folder: Path) -> None:
    # pip builds the metadata of a source distribution, for which it needs Pillow's build requirements, too.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        "pillow",
    ]
    subprocess.run([*command, f"pillow=={PILLOW}", "--dest", str(folder)], check=True)


def mutations(files: list[Path], seed: int, count: int) -> Iterator[bytes]:
    """Valid files with a few bytes changed, some cut, some with a piece twice or missing."""
    chance = random.Random(seed)
    originals = [path.read_bytes() for path in files if 0 < path.stat().st_size < 200_000]
    for _ in range(count):
        data = bytearray(chance.choice(originals))
        for _ in range(chance.randint(1, 12)):
            # Headers, where sizes and offsets are, get half of the changes.
            end = min(len(data), 600) if chance.random() < 0.5 else len(data)
            data[chance.randrange(end)] = chance.choice(
                (0, 1, 127, 128, 255, chance.randrange(256))
            )
        how, at = chance.random(), chance.randrange(len(data))
        length = chance.randint(1, 4000)
        if how < 0.2:
            del data[at:]
        elif how < 0.3:
            del data[at : at + length]
        elif how < 0.4:
            data[at:at] = data[at : at + length]
        yield bytes(data)


def hostile() -> dict[str, bytes]:
    """Files made to cost more than they are worth, by name."""
    made = {
        "png_60000x60000.png": _png(60_000, 60_000),
        "png_13000x13000.png": _png(13_000, 13_000),
        "png_1x60000.png": _png(1, 60_000, zlib.compress(bytes(2 * 60_000), 9)),
        "png_60000x1.png": _png(60_000, 1, zlib.compress(bytes(60_001), 9)),
        "png_0x5.png": _png(0, 5),
        "png_bomb_text.png": _png(8, 8, zlib.compress(bytes(72), 9), text=64 * 2**20),
        "png_bomb_data.png": _png(8, 8, zlib.compress(bytes(256 * 2**20), 9)),
        "gif_65535x65535.gif": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(3) + b";",
        "bmp_bomb.bmp": _bmp(40_000, 40_000),
        "bmp_negative.bmp": _bmp(100, -(2**31)),
        "tiff_bomb.tif": _tiff(50_000, 50_000),
        "tiff_strip.tif": _tiff(1, 60_000),
        "ppm_bomb.ppm": b"P6 90000 90000 255\n" + bytes(100),
        "ppm_digits.ppm": b"P6 " + b"9" * 100_000 + b" 1 255\n",
        "ico_of_bombs.ico": _ico(_png(30_000, 30_000)),
        "jpeg_65500.jpg": _jpeg_of_size(65_500, 65_500),
        "webp_bomb.webp": _webp(16_383, 16_383),
        "nested_entities.svg": _entities().encode(),
        "empty.jpg": b"",
        "zeros.jpg": bytes(10_000),
        "html.jpg": b"<!doctype html><title>404</title>",
        "eps.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
        "words.png": b"\x89PNG\r\n\x1a\n" + b"tEXt" * 50_000,
    }
    made |= _floods(4 * 2**20)
    frames = io.BytesIO()
    dots = [Image.new("P", (16, 16), i % 256) for i in range(3000)]
    dots[0].save(frames, "GIF", save_all=True, append_images=dots[1:], duration=20)
    return made | {"gif_3000_frames.gif": frames.getvalue()}


# The two of them that show a small picture, whatever else they hold.
HARMLESS = {"png_bomb_data.png", "gif_3000_frames.gif"}


def _floods(size: int) -> dict[str, bytes]:
    """Files whose header, or whose scans, are so many bytes of the smallest pieces that there are."""
    png, piece = _png(8, 8, zlib.compress(bytes(72))), _chunk(b"aaAa", b"")
    jpeg, gif, jp2 = (_saved(kind) for kind in ("JPEG", "GIF", "JPEG2000"))
    after_colours = 13 + 3 * (2 << (gif[10] & 7)) if gif[10] & 128 else 13
    waves = _saved("JPEG", progressive=True)
    scans = [at for at in range(len(waves) - 1) if waves[at : at + 2] == b"\xff\xda"]
    scan = waves[scans[1] : scans[2]]
    return {
        "png_of_chunks.png": png[:33] + piece * (size // len(piece)) + png[33:],
        "jpeg_of_markers.jpg": jpeg[:2] + b"\xff\xe5\0\2" * (size // 4) + jpeg[2:],
        "jpeg_of_scans.jpg": waves[:-2] + scan * 5000 + waves[-2:],
        "gif_of_comments.gif": gif[:after_colours]
        + b"\x21\xfe\1a\0" * (size // 5)
        + gif[after_colours:],
        "jp2_of_boxes.jp2": jp2[:12] + (struct.pack(">I", 8) + b"free") * (size // 8) + jp2[12:],
        "ppm_of_comment.ppm": b"P6\n#" + b"x" * size + b"\n8 8 255\n" + bytes(192),
        "ppm_of_words.ppm": b"P3\n2000 1000 255\n" + b"9 " * 5_000_000,
    }


def _saved(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, kind, **options)
    return file.getvalue()


def hostile_texts() -> dict[str, str]:
    """Texts made to cost more than they are worth, at the limit of what is read and beyond."""
    n = MAX_CHARACTERS
    return {
        "word of 20,000 letters": "x" * 20_000,
        "word at the limit": "x" * n,
        "entities": "&amp;" * (n // 5),
        "nested entities": "&" + "amp;" * (n // 4 - 1),
        "entity definitions": _entities()[:n],
        "ampersands": "&" * n,
        "numbers": "&#1234567;" * (n // 10),
        "mojibake": "Ã" * n,
        "mojibake of mojibake": ("Ãƒâ€šÃ‚" * n)[:n],
        "quotes": "â€œ" * (n // 3),
        "spaces": " " * n,
        "marks": "a" + "\u0301" * (n - 1),
        "surrogates": "\ud83d" * n,
        "escapes": "\x1b[" * (n // 2),
        "zeros": "\0" * n,
        "ligatures": "ﬃ" * n,
        "families": "👩‍👩‍👧‍👧" * (n // 7),
        "scripts": ("漢字кириллицаعربىहिन्दी" * n)[:n],
        "apostrophes": "'" * n,
        "digits": "1" * n,
    }


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, data: bytes = b"", text: int = 0) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    words = _chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(text), 9)) if text else b""
    body = _chunk(b"IDAT", data or zlib.compress(b"\0"))
    return b"\x89PNG\r\n\x1a\n" + head + words + body + _chunk(b"IEND", b"")


def _bmp(width: int, height: int) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def _tiff(width: int, height: int) -> bytes:
    entries = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1)]
    entries += [(278, height), (279, width * height % 2**32)]
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + rows + bytes(4)


def _ico(picture: bytes) -> bytes:
    entry = struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(picture), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + picture


def _jpeg_of_size(width: int, height: int) -> bytes:
    """A small JPEG whose header says something else."""
    file = io.BytesIO()
    Image.new("L", (16, 16)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def _webp(width: int, height: int) -> bytes:
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _entities() -> str:
    names = [f"e{i}" for i in range(12)]
    lines = [f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in itertools.pairwise(names)]
    return f"<!DOCTYPE x [<!ENTITY e0 'ha'>{''.join(lines)}]><x>&e11;</x>"


@dataclass(frozen=True)
class Verdict:
    """What became of one file: ``pixels``, ``refused`` or what must not be, and what it cost."""

    name: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0
    memory_mb: float = 0.0

    @property
    def wrong(self) -> bool:
        return self.outcome not in ("pixels", "refused")


def _work(pipe: Pipe, memory_mb: int) -> None:
    """In a process of its own, which may die of what it opens."""
    import numpy as np

    from clip_deploy.inputs.images import to_pixels
    from clip_deploy.spec import Preprocess

    preprocess = Preprocess(
        (224, 224), (0.5,) * 3, (0.5,) * 3, "shortest", "bicubic", pixels="uint8"
    )
    to_pixels([np.zeros((300, 300, 3), np.uint8)], preprocess)
    top = (_status("VmSize") + memory_mb) << 20
    resource.setrlimit(resource.RLIMIT_AS, (top, top))
    pipe.send("ready")
    while True:
        data = pipe.recv()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        try:
            outcome, detail = "pixels", str(to_pixels([data], preprocess).shape)
        except InputError as error:
            outcome, detail = "refused", f"{error}"
        except BaseException as error:
            outcome, detail = "raised", f"{type(error).__name__}: {error}"
        pipe.send((outcome, detail, time.perf_counter() - began, _status("VmHWM") - before))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) // 1024


class Worker:
    """A process that makes pixels of one file after the other, and is replaced when it dies or hangs."""

    def __init__(self, memory_mb: int = MEMORY_MB, seconds: float = SECONDS) -> None:
        self._memory_mb, self._seconds = memory_mb, seconds
        self._start()

    def _start(self) -> None:
        spawning = get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_work, args=(theirs, self._memory_mb), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def judge(self, name: str, source: bytes | Path) -> Verdict:
        self._pipe.send(source)
        try:
            if self._pipe.poll(self._seconds):
                return Verdict(name, *self._pipe.recv())
            verdict = Verdict(name, "hung", f"no end within {self._seconds:g} s", self._seconds)
        except EOFError:
            self._process.join()
            verdict = Verdict(name, "died", f"exit code {self._process.exitcode}")
        self.close()
        self._start()
        return verdict

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def judged(
    sources: Iterable[tuple[str, bytes | Path]], workers: int = 1, **limits: float
) -> list[Verdict]:
    """Verdicts on files, by so many processes."""
    import threading

    own, made = threading.local(), []

    def judge(source: tuple[str, bytes | Path]) -> Verdict:
        if not hasattr(own, "worker"):
            own.worker = Worker(**limits)
            made.append(own.worker)
        return own.worker.judge(*source)

    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(judge, sources))
        finally:
            for worker in made:
                worker.close()


def _report(title: str, verdicts: list[Verdict]) -> bool:
    counted = Counter(verdict.outcome for verdict in verdicts)
    slowest = max(verdicts, key=lambda v: v.seconds)
    largest = max(verdicts, key=lambda v: v.memory_mb)
    print(
        f"{title}: {len(verdicts)} files, {json.dumps(counted)}; "
        f"slowest {slowest.seconds:.2f} s ({slowest.name}), largest {largest.memory_mb} MB ({largest.name})"
    )
    for verdict in verdicts:
        if verdict.wrong:
            print(f"  {verdict.name}: {verdict.outcome}, {verdict.detail}")
    return not any(verdict.wrong for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=CACHE)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    files = corpus(options.folder)
    good = _report("Pillow's test images", judged(((p.name, p) for p in files), options.workers))
    changed = mutations(files, options.seed, options.mutations)
    named = ((f"mutation {i}", data) for i, data in enumerate(changed))
    good &= _report("mutations", judged(named, options.workers))
    good &= _report("hostile", judged(hostile().items(), options.workers))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
