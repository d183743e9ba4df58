"""Triton's log lines that decide a failure → what happened and what to do: one table, seen on a real server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownLine:
    """One row: ``cause`` and ``remedy`` may use the named groups of ``pattern``.

    ``hangs`` marks lines after which the server neither loads the model nor gives up, so that waiting is pointless.
    """

    pattern: str
    cause: str
    remedy: str
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A known line found in a log, in words."""

    line: str
    cause: str
    remedy: str
    hangs: bool


KNOWN_LINES = (
    KnownLine(
        r"triton_python_backend_stub: error while loading shared libraries: (?P<library>libpython\S+?):",
        "the Python backend needs {library}, which is not on this machine",
        "run clip-deploy server install, or install your distribution's package (Debian, Ubuntu: libpython3.X)",
        hangs=True,
    ),
    KnownLine(
        r"triton_python_backend_stub: error while loading shared libraries: (?P<library>\S+?):",
        "the Python backend needs {library}, which is not on this machine",
        "install the package of your distribution that holds it",
        hangs=True,
    ),
    KnownLine(
        r"Python model file not found in '(?P<file>[^']+)'",
        "a model's code is missing: {file}",
        "render the model again, or put the file there",
        hangs=True,
    ),
    KnownLine(
        r"Socket '(?P<address>[^']+)' already in use",
        "another program listens on {address}",
        "give another port, or none: a free one is picked",
    ),
    KnownLine(
        r"instance group \S+ of model (?P<model>\S+) has kind KIND_GPU but no GPUs are available",
        "{model} asks for a GPU and this machine has none",
        "render it again with --instance-kind auto or cpu",
    ),
    KnownLine(
        r"unable to find backend library for backend '(?P<backend>[^']*)'",
        "this server has no backend {backend}",
        "render the model with --backend python, or serve it with --launcher container",
    ),
    KnownLine(
        r"Error parsing text-format inference\.ModelConfig: (?P<line>\d+):(?P<column>\d+): (?P<what>.*)",
        "a config.pbtxt does not parse, line {line}, column {column}: {what}",
        "correct that line",
    ),
    KnownLine(
        r"failed to read text proto from (?P<file>[^\"]+)",
        "{file} is not a model configuration",
        "correct it, or render it again",
    ),
    KnownLine(
        r"unexpected directory name '(?P<folder>[^']+)' for model '(?P<model>[^']+)'",
        "the folder {folder} holds a config that names the model {model}",
        "make the two names equal",
    ),
    KnownLine(
        r"failed to load model '(?P<model>[^']+)': at least one version must be available",
        "{model} has no version that its version policy allows",
        "put its files into a folder named 1",
    ),
    KnownLine(
        r"dynamic batching preferred size must be <= max batch size for (?P<model>[^\"]+)",
        "{model} prefers a batch larger than its max_batch_size",
        "drop preferred_batch_size, or raise max_batch_size",
    ),
    KnownLine(
        r"failed to open text file for read (?P<file>\S+/warmup/\S+): No such file",
        "the warmup data {file} is missing",
        "render the model again, or put the file there",
    ),
    KnownLine(
        r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
        "the model's code imports {module}, which the server's Python does not have",
        "install it into the environment that runs clip-deploy: pip install {module}",
    ),
    KnownLine(
        r"(?:NO_SUCHFILE|Load model from (?P<file>\S+) failed:\s*(?:File doesn't exist|system error number 2))",
        "a graph that a model opens is missing",
        "render the model again",
    ),
    KnownLine(
        r"INVALID_PROTOBUF|Protobuf parsing failed",
        "a graph is damaged: it is not a complete ONNX file",
        "export the model again",
    ),
    KnownLine(
        r"Stub process '(?P<model>\S+?)(?:_\d+)+' is not healthy",
        "the process that runs {model} died while loading",
        "look for the reason in the log; out of memory is the usual one (render fewer instances)",
    ),
    KnownLine(
        r"(?:No space left on device|Failed to increase the shared memory pool size|shm_open|bus error)",
        "the shared memory of this machine (/dev/shm) is full",
        "free some of it, or give the container more with --shm-size",
    ),
    KnownLine(
        r"failed to load '(?P<model>[^']+)' version \d+: (?P<what>[^\"]+)",
        "{model} did not load: {what}",
        "see the log",
    ),
    KnownLine(
        r"failed to stat file (?P<file>\S+)",
        "the server cannot see {file}",
        "check the path of the model repository",
    ),
)


def diagnose(log: str) -> Diagnosis | None:
    """The most telling known line of a log: the first row of the table that matches anywhere."""
    for row in KNOWN_LINES:
        if found := re.search(row.pattern, log):
            groups = {key: _short(value or "") for key, value in found.groupdict().items()}
            line = log[log.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
            return Diagnosis(
                _short(line, 300),
                row.cause.format(**groups),
                row.remedy.format(**groups),
                row.hangs,
            )
    return None


def decisive_lines(path: Path, count: int = 5) -> list[str]:
    """The last lines of a log that speak of an error, without those that a machine without GPU always writes."""
    lines = [
        line
        for line in tail(path).splitlines()
        if re.match(r"E\d{4} |error:|Signal", line) and not _HARMLESS.search(line)
    ]
    return [_short(line, 300) for line in lines[-count:]]


def tail(path: Path, size: int = 1 << 18) -> str:
    """The end of a log, as text; a log may grow without bound, what is read of it may not."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - size, 0))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


_HARMLESS = re.compile(r"CudaDriverHelper|NVML|DCGM|pinned|CUDA memory pool")


def _short(text: str, limit: int = 160) -> str:
    text = text.replace("\\n", " ").strip()
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
