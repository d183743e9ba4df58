"""What a server of ours takes of the machine: its CPU time and memory, its children included."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from clip_deploy.errors import extra

with extra("bench"):
    import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class ServerProcess:
    """A process and its children, by the id of the first."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def is_alive(self) -> bool:
        try:
            return bool(self._process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system."""
        return sum(self._each(lambda process: sum(process.cpu_times()[:2])))

    def memory_mb(self) -> float:
        """Resident memory in MiB; pages that processes share are counted once, where the kernel tells."""
        return sum(self._each(_proportional)) / 2**20

    def _each(self, measure: Callable[[psutil.Process], float]) -> Iterator[float]:
        """One figure per process; one that ends meanwhile has none."""
        with suppress(psutil.NoSuchProcess):
            for process in (self._process, *self._process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    yield measure(process)


def _proportional(process: psutil.Process) -> float:
    """Bytes: a page that n processes share counts as 1/n for each."""
    try:
        return float(process.memory_full_info().pss)
    except (psutil.AccessDenied, AttributeError):
        return float(process.memory_info().rss)
