"""One publisher at a time: a file at the destination that says who is at work there, made only where there is none."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import DestinationBusy, PublishError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.publishing.stores import Store

LOCK = "publication.lock"


class Lock:
    """The lock while it is held."""

    def __init__(self, store: Store, data: bytes) -> None:
        self._store, self._data = store, data

    def require_held(self) -> None:
        """Called before each step that others can see.

        Raises:
            DestinationBusy: somebody removed the lock, or put another in its place.
        """
        found = self._store.read(LOCK)
        if found != self._data:
            told = f"was taken over: {_told(found)}" if found else "was removed"
            raise DestinationBusy(
                f"the lock at {self._store.place} {told}; nothing more is changed",
                remedy="see clip-deploy published list, and publish again when nobody else is at work",
            )


@contextmanager
def locked(store: Store, action: str) -> Iterator[Lock]:
    """Hold the destination for one action.

    Raises:
        DestinationBusy: somebody else holds it, or held it and ended without a word. It is never taken from them.
    """
    data = json.dumps(
        {
            "kind": "clip-deploy lock",
            "action": action,
            "by": who(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": now(),
            "token": secrets.token_hex(8),
        },
        indent=2,
    ).encode()
    if not store.create(LOCK, data):
        found = store.read(LOCK)
        raise DestinationBusy(f"{store.place} {_told(found)}", remedy=_remedy(store, found))
    lock = Lock(store, data)
    try:
        lock.require_held()  # storage that ignores the condition lets the later of two in
        yield lock
    finally:
        with suppress(
            PublishError
        ):  # a storage that is gone keeps the lock, and the next publisher is told whose it is
            if store.read(LOCK) == data:
                store.remove(LOCK)


def remove_lock(store: Store) -> str | None:
    """Remove a lock that was left behind; what it said, or None where there was none."""
    found = store.read(LOCK)
    if found is None:
        return None
    store.remove(LOCK)
    return _told(found)


def who() -> str:
    """The user on this machine, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _told(found: bytes | None) -> str:
    said = _read(found)
    if said is None:
        return "is held by a lock that cannot be read"
    state = "" if _may_live(said) else "; that process no longer runs"
    return (
        f"is held by {said['by']} since {said['began']} ({said['action']}, process {said['pid']})"
        f"{state}"
    )


def _remedy(store: Store, found: bytes | None) -> str:
    said = _read(found)
    if said is not None and _may_live(said):
        return (
            f"wait for it; if it ended without a word: clip-deploy published unlock {store.place}"
        )
    return f"see that nobody is at work there, then clip-deploy published unlock {store.place}"


def _read(found: bytes | None) -> dict[str, Any] | None:
    try:
        said = json.loads(found or b"")
    except ValueError:
        return None
    keys = {"by", "began", "action", "pid", "host"}
    return said if isinstance(said, dict) and keys <= set(said) else None


def _may_live(said: dict[str, Any]) -> bool:
    """False only where it is certain: the process was on this machine, and there is none of that number."""
    if said["host"] != socket.gethostname() or not isinstance(said["pid"], int):
        return True
    try:
        os.kill(said["pid"], 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
