"""The two ways to wait for a Triton server: on a thread, or on an event loop. All else is in ``encoders``, once.

The logic above is made of coroutines. On ``BlockingLine`` nothing ever waits on a loop: each step blocks its thread and
returns, so that ``run`` drives such a coroutine to its end in one go.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
from grpc import aio

from clip_deploy.client import protocol
from clip_deploy.client.link import linked
from clip_deploy.client.protocol import CHANNEL_OPTIONS, SERVICE, ConnectionLost
from clip_deploy.errors import ConfigError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from clip_deploy.client.connection import Connection
    from clip_deploy.client.protocol import Deadline, Question

_T = TypeVar("_T")

# The pieces of one large request that are under way at once: the server computes one while it reads the next.
PIECES_AT_ONCE = 4
# Pictures are prepared by so many threads, at most: decoding and resizing keep a core each.
_MOST_THREADS = 8


class Line(Protocol):
    """What a client needs of a connection, whichever way it waits."""

    @property
    def url(self) -> str:
        """Where the server is."""

    @property
    def losses(self) -> int:
        """How often the connection is known to have been lost: whoever answers afterwards may be another server."""

    async def ask(self, question: Question[_T], deadline: Deadline) -> _T:
        """The answer of the server, or ServerError."""

    async def each(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
        """Results in the order of the jobs, a few of which run at once; the first failure ends it."""

    async def share(
        self, key: object, job: Callable[[], Coroutine[Any, Any, _T]], deadline: Deadline
    ) -> _T:
        """What the job gives; callers that come while it runs get the same result or failure."""

    async def prepare(self, work: Callable[[], _T], deadline: Deadline) -> _T:
        """What the work gives, done where it keeps nobody else waiting."""


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine on a ``BlockingLine``, which never waits on a loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking client waited for an event loop")


class BlockingLine:
    """Waits on the calling thread; safe to share between threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._shared: dict[object, Future[Any]] = {}

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def losses(self) -> int:
        return self._connection.losses

    async def ask(self, question: Question[_T], deadline: Deadline) -> _T:
        return self._connection.ask(question, deadline)

    async def each(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
        if len(jobs) == 1:
            return [await jobs[0]()]
        failed = threading.Event()

        def one(job: Callable[[], Coroutine[Any, Any, _T]]) -> Any:
            if failed.is_set():
                return None  # nobody will see it: the failure is raised
            try:
                return run(job())
            except BaseException:
                failed.set()
                raise

        pool = ThreadPoolExecutor(min(PIECES_AT_ONCE, len(jobs)), "clip-deploy-piece")
        try:
            pieces = [pool.submit(one, job) for job in jobs]
            for piece in futures.as_completed(pieces):
                piece.result()
            return [piece.result() for piece in pieces]
        finally:  # after a failure, what is under way ends by its own deadline
            pool.shutdown(wait=False, cancel_futures=True)

    async def share(
        self, key: object, job: Callable[[], Coroutine[Any, Any, _T]], deadline: Deadline
    ) -> _T:
        with self._lock:
            future: Future[_T] | None = self._shared.get(key)
            if future is None:
                future = self._shared[key] = Future()
                # On a thread of its own: who asks first may have the least time.
                threading.Thread(target=self._work, args=(key, job, future), daemon=True).start()
        try:
            return future.result(deadline.left_s("reading the model"))
        except futures.TimeoutError:
            raise deadline.over("reading the model") from None

    def _work(
        self, key: object, job: Callable[[], Coroutine[Any, Any, _T]], future: Future[_T]
    ) -> None:
        try:
            result = run(job())
        except BaseException as error:
            settle: Callable[[], None] = partial(future.set_exception, error)
        else:
            settle = partial(future.set_result, result)
        with self._lock:  # who comes from now on asks again
            del self._shared[key]
        settle()

    async def prepare(self, work: Callable[[], _T], deadline: Deadline) -> _T:
        return work()

    def close(self) -> None:
        """Close the channel."""
        self._connection.close()


class LoopLine:
    """Waits on the event loop on which it is first used, and belongs to it."""

    def __init__(self, url: str) -> None:
        self.url = protocol.address(url)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[str, Any] = {}
        self._shared: dict[object, asyncio.Task[Any]] = {}

    def _open(self) -> None:
        """Made at the first call, not before: gRPC ties a channel to the loop that runs then."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._channel, self._link = linked(
                lambda: aio.insecure_channel(self.url, options=CHANNEL_OPTIONS), _is_ready
            )
            self._loop = loop
            threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
            self._pool = ThreadPoolExecutor(threads, "clip-deploy-prepare")
        if self._closed:
            raise self._gone()
        if loop is not self._loop:
            raise ConfigError(
                f"the client of {self.url} belongs to another event loop",
                remedy="make one client per event loop, in which it is used and closed",
            )

    async def ask(self, question: Question[_T], deadline: Deadline) -> _T:
        self._open()
        losses = self.losses
        left_s = deadline.left_s(question.about)
        try:
            answer = await self._call(question)(question.request, timeout=left_s)
        except grpc.RpcError as error:
            failure = protocol.translated(
                question.about, self.url, deadline.timeout_s, str(error.code()), error.details()
            )
            if isinstance(failure, ConnectionLost):
                self._link.lose(losses)
            raise failure from error
        except (asyncio.CancelledError, aio.UsageError):
            # A closed channel cancels its calls, whose callers did not mean to be cancelled.
            if self._closed and not _is_cancelled():
                raise self._gone() from None
            raise
        self._link.answered()
        return question.read(answer)

    @property
    def losses(self) -> int:
        """How often the connection is known to have been lost."""
        return self._link.losses if self._loop is not None else 0

    def _call(self, question: Question[Any]) -> Any:
        if question.method not in self._calls:
            self._calls[question.method] = self._channel.unary_unary(
                SERVICE + question.method,  # requests go out as the bytes that they are
                response_deserializer=question.response.FromString,
            )
        return self._calls[question.method]

    async def each(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
        if len(jobs) == 1:
            return [await jobs[0]()]
        room = asyncio.Semaphore(PIECES_AT_ONCE)

        async def one(job: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
            async with room:
                return await job()

        tasks = [asyncio.create_task(one(job)) for job in jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def share(
        self, key: object, job: Callable[[], Coroutine[Any, Any, _T]], deadline: Deadline
    ) -> _T:
        task: asyncio.Task[_T] | None = self._shared.get(key)
        if task is None:
            # A task of its own: who asks first may be cancelled, or have the least time.
            task = self._shared[key] = asyncio.create_task(job())
            task.add_done_callback(partial(self._settle, key))
        done, _ = await asyncio.wait({task}, timeout=deadline.left_s("reading the model"))
        if not done:
            raise deadline.over("reading the model")
        if task.cancelled():
            raise self._gone()
        return task.result()

    def _settle(self, key: object, task: asyncio.Task[Any]) -> None:
        del self._shared[key]  # who comes from now on asks again
        if not task.cancelled():
            task.exception()  # seen, even where nobody waits any more

    async def prepare(self, work: Callable[[], _T], deadline: Deadline) -> _T:
        self._open()
        left_s = deadline.left_s("preparing")
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            done, _ = await asyncio.wait({future}, timeout=left_s)
        finally:
            if (
                not future.done()
            ):  # nobody waits for it: it does not begin, or stops at its next picture
                deadline.end()
                future.cancel()
        if not done:
            raise deadline.over("preparing")
        return future.result()

    async def close(self) -> None:
        """Close the channel; calls that are under way end as if the server were gone."""
        self._closed = True
        if self._loop is None:
            return
        for task in self._shared.values():
            task.cancel()
        await self._channel.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _gone(self) -> ServerUnavailable:
        return ServerUnavailable(f"the client of {self.url} is closed", remedy="make a new one")


def _is_cancelled() -> bool:
    """Whether the running task itself is to end; Python 3.10 cannot say, and keeps the cancellation."""
    task: Any = asyncio.current_task()
    return bool(task.cancelling()) if hasattr(task, "cancelling") else True


def _is_ready(channel: aio.Channel) -> bool:
    try:
        state = channel.get_state()
    except aio.UsageError:  # closed
        return True
    return state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.SHUTDOWN)
