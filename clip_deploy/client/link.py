"""Whether the connection behind a channel is still the one that it was.

A channel connects again by itself, and whoever answers then may be another server with another model. Its state alone
does not tell: a request that meets a connection which broke a moment ago waits for the next one and is answered there,
and the channel is ready before and after. gRPC numbers its connections, and says the numbers through channelz.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from clip_deploy.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Channel = TypeVar("_Channel")

# A channel's connections are then its own, and not those of others to the same address; no history is kept of them.
LINK_OPTIONS = (
    ("grpc.enable_channelz", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_channel_trace_event_memory_per_node", 0),
)
_making = threading.Lock()


class Link:
    """Counts how often the connection of a channel is known to have been lost; safe to share between threads.

    Args:
        channels: its numbers in channelz.
        is_ready: whether it is connected, or was closed.
    """

    def __init__(self, channels: tuple[int, ...], is_ready: Callable[[], bool]) -> None:
        self._channels, self._is_ready = channels, is_ready
        self._lock = threading.Lock()
        self._losses = 0
        self._connection: frozenset[int] | None = None  # that of the answers so far

    @property
    def losses(self) -> int:
        """How often it is known to have been lost: whoever answers afterwards may be another server."""
        with self._lock:
            if self._connection is not None and not self._is_ready():
                self._lost()
            return self._losses

    def lose(self, losses: int) -> None:
        """Count a loss once, however many calls it broke: ``losses`` is what was counted when they began."""
        with self._lock:
            if self._losses == losses:
                self._lost()

    def answered(self) -> None:
        """An answer came: over the connection that is known, or over another one, which is a loss."""
        with self._lock:
            known, found = self._connection, _connections(self._channels)
            if found != known:
                if known is not None or not found:
                    self._lost()
                self._connection = found or None

    def _lost(self) -> None:
        self._losses += 1
        self._connection = None


def linked(
    make: Callable[[], _Channel], is_ready: Callable[[_Channel], bool]
) -> tuple[_Channel, Link]:
    """A new channel, and its link.

    Raises:
        MissingDependency: this gRPC does not tell its connections apart.
    """
    with _making:
        before = set(_top_channels())
        channel = make()
        # One that somebody else makes at this very moment counts as well: to look once too often harms nobody.
        numbers = tuple(number for number in _top_channels() if number not in before)
    if not numbers:
        raise MissingDependency(
            "this grpcio does not tell one connection from another, so that a client cannot know who answers",
            remedy="pip install 'grpcio==1.85.*'",
        )
    return channel, Link(numbers, lambda: is_ready(channel))


def _top_channels() -> Iterator[int]:
    """The numbers of all channels of this process."""
    start = 0
    while True:
        page = _asked("channelz_get_top_channels", start)
        for each in page.get("channel", ()):
            number = int(each["ref"]["channelId"])
            start = number + 1
            yield number
        if page.get("end", True):
            return


def _connections(channels: tuple[int, ...]) -> frozenset[int]:
    """The numbers of the connections that channels have now; none is given twice in a process."""
    of_channels = (_asked("channelz_get_channel", each).get("channel", {}) for each in channels)
    subchannels = {
        int(ref["subchannelId"]) for each in of_channels for ref in each.get("subchannelRef", ())
    }
    found = (_asked("channelz_get_subchannel", each).get("subchannel", {}) for each in subchannels)
    return frozenset(int(ref["socketId"]) for each in found for ref in each.get("socketRef", ()))


def _asked(question: str, number: int) -> dict[str, Any]:
    """What channelz says; empty for what is gone."""
    try:
        answer: dict[str, Any] = json.loads(getattr(cygrpc, question)(number))
    except (ValueError, AttributeError):
        return {}
    return answer
