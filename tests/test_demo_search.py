"""``make demo-search`` on a tiny model: it answers, and whatever ends it ends everything."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the gateway extra")

pytestmark = [pytest.mark.server, pytest.mark.export]

SCRIPT = Path(__file__).parent.parent / "examples" / "demo_search.py"


def _demo(repository: Path, temporary: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(repository), "--port", "0", *options],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (OSError, ValueError, IndexError):
            continue
    found = [pid]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


def _left(temporary: Path) -> list[Path]:
    """Of the demo; hidden files are marks of libraries."""
    return [path for path in temporary.iterdir() if not path.name.startswith(".")]


def _gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_demo_answers_a_picture_and_words_and_ends(tiny_repository: Path, tmp_path: Path):
    with _demo(tiny_repository, tmp_path, "--once") as demo:
        said = demo.communicate(timeout=120)[0]
    assert demo.returncode == 0, said
    assert re.search(r"\n1 +1(\.00)? +1\.000 +#1 .*tabby cat", said), said
    assert re.search(r"#1 +a cup of espresso", said), said
    assert "The weights are random" in said
    assert re.search(r"The page: http://127\.0\.0\.1:\d+/", said)
    assert _left(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_demo_ends_its_server(
    tiny_repository: Path, tmp_path: Path, number: signal.Signals
):
    with _demo(tiny_repository, tmp_path) as demo:
        for line in demo.stdout:
            if "Ctrl-C ends it all" in line:
                break
        family = _descendants(demo.pid)
        assert family, "Triton and its models run"
        demo.send_signal(number)
        demo.wait(30)
    assert demo.returncode == (0 if number != signal.SIGKILL else -number)
    assert _gone(family)
    assert number == signal.SIGKILL or _left(tmp_path) == []


def test_a_demo_without_a_repository_says_how_to_get_one(tmp_path: Path):
    with _demo(tmp_path / "none", tmp_path) as demo:
        said = demo.communicate(timeout=60)[0]
    assert demo.returncode == 2
    assert "error:" in said
    assert "fix:" in said
