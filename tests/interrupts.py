"""Ctrl-C for a command that runs in the test's own process."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATIENCE_S = 60.0


@contextmanager
def interrupted(is_time: Callable[[], bool], *, after_s: float = 0.0) -> Iterator[None]:
    """Send SIGINT to this process, so many seconds after it is time; what runs inside must then end within 30."""
    sent_s: list[float] = []

    def send() -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not _holds(is_time):
            if time.monotonic() > deadline or over.wait(0.05):
                return
        if not over.wait(after_s):
            sent_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    over = threading.Event()
    thread = threading.Thread(target=send)
    # Where the tests run in the background of a script, SIGINT is ignored from the start.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)
    assert sent_s, "it ended before it could be interrupted"
    assert time.monotonic() - sent_s[0] < 30


def _holds(is_time: Callable[[], bool]) -> bool:
    try:
        return is_time()
    except OSError:
        return False
