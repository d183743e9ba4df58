"""Triton's log lines that decide a failure → what happened and what to do: one table, seen on a real server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownLine:
    """One row: ``cause`` and ``remedy`` may use the named groups of ``pattern``; ``example`` is a line that it matches.

    ``hangs`` marks lines after which the server neither loads the model nor gives up, so that waiting is pointless.
    """

    pattern: str
    example: str
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
        "triton_python_backend_stub: error while loading shared libraries: libpython3.11.so.1.0: cannot open "
        "shared object file: No such file or directory",
        "the Python backend needs {library}, which is not on this machine",
        "run clip-deploy server install, or install your distribution's package (Debian, Ubuntu: libpython3.X)",
        hangs=True,
    ),
    KnownLine(
        r"triton_python_backend_stub: error while loading shared libraries: (?P<library>\S+?):",
        "triton_python_backend_stub: error while loading shared libraries: libcudart.so.12: cannot open "
        "shared object file",
        "the Python backend needs {library}, which is not on this machine",
        "install the package of your distribution that holds it",
        hangs=True,
    ),
    KnownLine(
        r"Python model file not found in '(?P<file>[^']+)'",
        "Failed to preinitialize Python stub: Python model file not found in "
        "'/models/clip_image_encoder/1/model.py'",
        "a model's code is missing: {file}",
        "render the model again, or put the file there",
        hangs=True,
    ),
    KnownLine(
        r"Socket '(?P<address>[^']+)' already in use",
        "failed to start HTTP service: Unavailable - Socket '127.0.0.1:8000' already in use",
        "another program listens on {address}",
        "give another port, or none: a free one is picked",
    ),
    KnownLine(
        r"instance group \S+ of model (?P<model>\S+) has kind KIND_GPU but no GPUs are available",
        "failed to load 'clip_image_encoder' version 1: Invalid argument: instance group "
        "clip_image_encoder_0 of model clip_image_encoder has kind KIND_GPU but no GPUs are available",
        "{model} asks for a GPU and this machine has none",
        "render it again with --instance-kind auto or cpu",
    ),
    KnownLine(
        r"unable to find backend library for backend '(?P<backend>[^']*)'",
        "failed to load 'clip_image_encoder' version 1: Invalid argument: unable to find backend library for "
        "backend 'onnxruntime', try specifying runtime on the model configuration.",
        "this server has no backend {backend}",
        "render the model with --backend python, or serve it with --launcher container",
    ),
    KnownLine(
        r"Error parsing text-format inference\.ModelConfig: (?P<line>\d+):(?P<column>\d+): (?P<what>.*)",
        'Error parsing text-format inference.ModelConfig: 6:9: Message type "inference.ModelConfig" has no '
        'field named "nonsense".',
        "a config.pbtxt does not parse, line {line}, column {column}: {what}",
        "correct that line",
    ),
    KnownLine(
        r"failed to read text proto from (?P<file>[^\"]+)",
        "Poll failed for model directory 'clip_image_encoder': failed to read text proto from "
        "/models/clip_image_encoder/config.pbtxt",
        "{file} is not a model configuration",
        "correct it, or render it again",
    ),
    KnownLine(
        r"unexpected directory name '(?P<folder>[^']+)' for model '(?P<model>[^']+)'",
        "Poll failed for model directory 'clip_image': unexpected directory name 'clip_image' for model "
        "'clip_image_encoder', directory name must equal model name",
        "the folder {folder} holds a config that names the model {model}",
        "make the two names equal",
    ),
    KnownLine(
        r"failed to load model '(?P<model>[^']+)': at least one version must be available",
        "failed to load model 'clip_image_encoder': at least one version must be available under the version "
        "policy of model 'clip_image_encoder'",
        "{model} has no version that its version policy allows",
        "put its files into a folder named 1",
    ),
    KnownLine(
        r"dynamic batching preferred size must be <= max batch size for (?P<model>[^\"]+)",
        "Poll failed for model directory 'clip_image_encoder': dynamic batching preferred size must be <= "
        "max batch size for clip_image_encoder",
        "{model} prefers a batch larger than its max_batch_size",
        "drop preferred_batch_size, or raise max_batch_size",
    ),
    KnownLine(
        r"failed to open text file for read (?P<file>\S+/warmup/\S+): No such file",
        "failed to load 'clip_image_encoder' version 1: Internal: failed to open text file for read "
        "/models/clip_image_encoder/warmup/gone: No such file or directory",
        "the warmup data {file} is missing",
        "render the model again, or put the file there",
    ),
    KnownLine(
        r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
        "failed to load 'clip_image_encoder' version 1: Internal: ModuleNotFoundError: No module named "
        "'onnxruntime'",
        "the model's code imports {module}, which the server's Python does not have",
        "install it into the environment that runs clip-deploy: pip install {module}",
    ),
    KnownLine(
        r"(?:NO_SUCHFILE|Load model from (?P<file>\S+) failed:\s*(?:File doesn't exist|system error number 2))",
        "[ONNXRuntimeError] : 3 : NO_SUCHFILE : Load model from /models/clip_image_encoder/1/model.onnx "
        "failed:Load model /models/clip_image_encoder/1/model.onnx failed. File doesn't exist",
        "a graph that a model opens is missing",
        "render the model again",
    ),
    KnownLine(
        r"INVALID_PROTOBUF|Protobuf parsing failed",
        "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from /models/clip_image_encoder/1/model.onnx "
        "failed:Protobuf parsing failed.",
        "a graph is damaged: it is not a complete ONNX file",
        "export the model again",
    ),
    KnownLine(
        r"Stub process '(?P<model>\S+?)(?:_\d+)+' is not healthy",
        "failed to load 'clip_image_encoder' version 1: Internal: Stub process 'clip_image_encoder_0' is not "
        "healthy.",
        "the process that runs {model} died while loading",
        "look for the reason in the log; out of memory is the usual one (render fewer instances)",
    ),
    KnownLine(
        r"(?:No space left on device|Failed to increase the shared memory pool size|shm_open|bus error)",
        "Failed to increase the shared memory pool size for key 'triton_python_backend_shm_region_1' to "
        "67108864 bytes. Error: No space left on device",
        "the shared memory of this machine (/dev/shm) is full",
        "free some of it, or give the container more with --shm-size",
    ),
    KnownLine(
        r"Failed to create temporary directory for Python environments",
        "terminate called after throwing an instance of "
        "'triton::backend::python::PythonBackendException' what():  Failed to create temporary "
        "directory for Python environments.",
        "the Python backend cannot write to /tmp",
        "make room there, or make it writable (in a container with a read-only file system: a tmpfs on /tmp)",
    ),
    KnownLine(
        r"failed to load '(?P<model>[^']+)' version \d+: (?P<what>[^\"]+)",
        "failed to load 'clip_image_encoder' version 1: Internal: SyntaxError: invalid syntax (model.py, "
        "line 5)",
        "{model} did not load: {what}",
        "see the log",
    ),
    KnownLine(
        r"failed to stat file (?P<file>\S+)",
        "error: creating server: Internal - failed to stat file /models",
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
