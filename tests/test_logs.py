"""Triton's own words, as a real server wrote them, and what becomes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clip_deploy.servers.logs import KNOWN_LINES, KnownLine, decisive_lines, diagnose, tail

# Written by tritonserver 2.51.0 while it failed in each of these ways.
REAL = {
    "libpython": "/x/python/triton_python_backend_stub: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file: No such file or directory",
    "other library": "/x/python/triton_python_backend_stub: error while loading shared libraries: libcudart.so.12: cannot open shared object file",
    "no code": "I1130 14:29:13.068284 7464 pb_stub.cc:2105]  Failed to preinitialize Python stub: Python model file not found in 't/echo/1/model.py'",
    "port": "E1130 14:27:51.557356 6764 main.cc:257] \"failed to start HTTP service: Unavailable - Socket '127.0.0.1:18000' already in use \"",
    "gpu": "E1130 14:27:58.250629 7078 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Invalid argument: instance group echo_0 of model echo has kind KIND_GPU but no GPUs are available\"",
    "config": '[libprotobuf ERROR /tmp/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: 6:9: Message type "inference.ModelConfig" has no field named "nonsense".\n'
    "E1130 14:27:59.277781 7095 model_repository_manager.cc:1460] \"Poll failed for model directory 'echo': failed to read text proto from t/echo/config.pbtxt\"",
    "backend": "E1130 14:28:00.305749 7113 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Invalid argument: unable to find backend library for backend 'onnxruntime', try specifying runtime on the model configuration.\"",
    "no version": "E1130 14:28:09.348755 7150 model_repository_manager.cc:724] \"failed to load model 'echo': at least one version must be available under the version policy of model 'echo'\"",
    "name": "E1130 14:28:10.376179 7168 model_repository_manager.cc:1460] \"Poll failed for model directory 'echo': unexpected directory name 'echo' for model 'echo2', directory name must equal model name\"",
    "import": "E1130 14:28:11.488479 7185 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: ModuleNotFoundError: No module named 'nothere'\\n\\nAt:\\n  /t/echo/1/model.py(5): <module>\"",
    "preferred": "E1130 14:28:20.459066 7307 model_repository_manager.cc:1460] \"Poll failed for model directory 'echo': dynamic batching preferred size must be <= max batch size for echo\"",
    "warmup": "E1130 14:28:24.251167 7324 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: failed to open text file for read t/echo/warmup/gone: No such file or directory\"",
    "died": "E1130 14:28:18.410096 7265 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: Stub process 'echo_0' is not healthy.\"",
    "code": "E1130 14:28:12.536523 7208 model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: SyntaxError: invalid syntax (model.py, line 5)\"",
    "repository": "error: creating server: Internal - failed to stat file /nonexist",
}
EXPECTED = {
    "libpython": ("libpython3.11.so.1.0", "server install"),
    "other library": ("libcudart.so.12", "package"),
    "no code": ("t/echo/1/model.py", "render"),
    "port": ("127.0.0.1:18000", "port"),
    "gpu": ("echo asks for a GPU", "--instance-kind"),
    "config": (
        'line 6, column 9: Message type "inference.ModelConfig" has no field named "nonsense"',
        "correct",
    ),
    "backend": ("no backend onnxruntime", "--launcher container"),
    "no version": ("echo has no version", "folder named 1"),
    "name": ("the folder echo holds a config that names the model echo2", "equal"),
    "import": ("imports nothere", "pip install nothere"),
    "preferred": ("echo prefers a batch larger", "max_batch_size"),
    "warmup": ("t/echo/warmup/gone", "render"),
    "died": ("echo died while loading", "memory"),
    "code": ("echo did not load: Internal: SyntaxError: invalid syntax (model.py, line 5)", "log"),
    "repository": ("/nonexist", "path"),
}
NOISE = """W1130 14:26:32.513147 6405 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory pool will not be available"
E1130 14:26:32.513682 6405 server.cc:241] "CudaDriverHelper has not been initialized."
Error: Failed to initialize NVML
W1130 14:26:32.556606 6405 metrics.cc:798] "DCGM unable to start: DCGM initialization error"
"""


@pytest.mark.parametrize("case", REAL)
def test_a_real_log_line_becomes_cause_and_remedy(case: str):
    found = diagnose(
        f"{NOISE}{REAL[case]}\nerror: creating server: Internal - failed to load all models\n"
    )
    cause, remedy = EXPECTED[case]
    assert cause in found.cause
    assert remedy in found.remedy


@pytest.mark.parametrize("row", KNOWN_LINES, ids=lambda row: row.pattern[:40])
def test_the_example_of_a_known_line_is_diagnosed_as_that_line(row: KnownLine):
    found = diagnose(row.example)
    groups = re.search(row.pattern, row.example).groupdict()
    assert found.cause == row.cause.format(**groups)
    assert found.hangs == row.hangs


@pytest.mark.parametrize("case", ["libpython", "no code"])
def test_lines_after_which_triton_hangs_are_marked(case: str):
    assert diagnose(REAL[case]).hangs


def test_a_healthy_log_of_a_machine_without_gpu_is_no_diagnosis():
    assert diagnose(NOISE) is None


def test_the_decisive_lines_leave_harmless_noise_out(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text(f'{NOISE}E1130 14:28:12.5 7208 x.cc:1] "something new"\n')
    assert decisive_lines(log) == ['E1130 14:28:12.5 7208 x.cc:1] "something new"']


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 5_000_000 + b"\xff the end")
    assert tail(log, 20).endswith("the end")
    assert len(tail(log, 20)) == 20
    assert tail(tmp_path / "none") == ""
