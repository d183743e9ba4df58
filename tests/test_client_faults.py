"""The clients over real gRPC on the loopback, against a stand-in that is slow, stops, or comes back as another model."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

from clip_deploy.client import AsyncTritonInferenceClient, Connection, TritonInferenceClient
from clip_deploy.client.lines import PIECES_AT_ONCE
from clip_deploy.errors import (
    ConfigError,
    ModelChanged,
    ServerError,
    ServerTimeout,
    ServerUnavailable,
)
from clip_deploy.inputs.photographs import photographs
from clip_deploy.spec import Tower
from tests.standin import Refusal, StandIn

pytestmark = pytest.mark.processes

PICTURES = photographs(None).paths[:6]


@pytest.fixture
def server(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


class _Cable:
    """A relay between client and server whose connections can be cut."""

    def __init__(self, url: str) -> None:
        self.target = ("127.0.0.1", _port(url))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.connected = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self.target)
            except OSError:
                return
            self._pairs.append((near, far))
            self.connected += 1
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        near.close()  # not before both have ended: the number of a closed socket is given to the next one
        far.close()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []  # what is connected from now on stays
        for end in (end for pair in pairs for end in pair):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


@pytest.fixture
def cable(server: StandIn):
    with server.serving() as url:
        cable = _Cable(url)
        yield cable
        cable.close()


def test_both_clients_give_the_same_bits(server: StandIn):
    texts = ["a cat", "a dog", "a photo of a dog", "cat", ""]
    with server.serving() as url:

        async def awaited():
            async with AsyncTritonInferenceClient(url) as client:
                return (
                    await client.embed_images(PICTURES),
                    await client.embed_texts(texts),
                    await client.score(PICTURES, texts),
                    await client.request_embedding(PICTURES[0]),
                    await client.prepare_images(PICTURES),
                    await client.prepare_texts(texts),
                    await client.deployment(),
                    (await client.model(Tower.TEXT)).contract,
                )

        with TritonInferenceClient(url) as client:
            blocking = (
                client.embed_images(PICTURES),
                client.embed_texts(texts),
                client.score(PICTURES, texts),
                client.request_embedding(PICTURES[0]),
                client.prepare_images(PICTURES),
                client.prepare_texts(texts),
                client.deployment(),
                client.model(Tower.TEXT).contract,
            )
        for one, other in zip(blocking, asyncio.run(awaited())):
            assert type(one) is type(other)
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_the_pieces_of_a_large_request_are_under_way_together_and_come_back_in_order(
    server: StandIn,
):
    lock, now, most = threading.Lock(), 0, 0

    def count(method: str) -> None:
        nonlocal now, most
        if method == "ModelInfer":
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.05)
            with lock:
                now -= 1

    texts = ["cat " * (i % 5) + "dog " * (i % 7) for i in range(40)]
    with server.serving() as url, TritonInferenceClient(url) as client:
        alone = [client.embed_texts([text])[0] for text in texts[:5]]
        server.before = count
        assert np.array_equal(client.embed_texts(texts)[:5], alone)
        assert 1 < most <= PIECES_AT_ONCE

        async def awaited():
            async with AsyncTritonInferenceClient(url) as other:
                return await other.embed_texts(texts)

        most = 0
        assert np.array_equal(asyncio.run(awaited())[:5], alone)
        assert 1 < most <= PIECES_AT_ONCE


@pytest.mark.parametrize("texts", [1, 40], ids=["one piece", "many pieces"])
def test_a_deadline_is_for_the_whole_call(server: StandIn, texts: int):
    with server.serving() as url, TritonInferenceClient(url) as client:
        client.embed_texts(["cat"])
        server.before = lambda method: time.sleep(2)
        began = time.monotonic()
        with pytest.raises(ServerTimeout):
            client.embed_texts(["cat"] * texts, timeout_s=0.2 if texts == 1 else 0.4)
        assert time.monotonic() - began < 1.8

        async def awaited():
            async with AsyncTritonInferenceClient(url) as other:
                await other.embed_texts(["cat"] * texts, timeout_s=0.4)

        with pytest.raises(ServerTimeout):
            asyncio.run(awaited())
        server.before = lambda method: None


def test_reading_the_model_is_part_of_the_deadline_and_asked_once_by_a_crowd(server: StandIn):
    server.before = lambda method: time.sleep(0.3) if method == "ModelConfig" else None

    async def crowd(url: str):
        async with AsyncTritonInferenceClient(url) as client:
            calls = [client.embed_texts(["cat"], timeout_s=0.1)]
            calls += [client.embed_texts(["cat"], timeout_s=20) for _ in range(50)]
            first, *others = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(first, ServerTimeout)
            assert all(isinstance(other, np.ndarray) for other in others)

    with server.serving() as url:
        asyncio.run(crowd(url))
        assert server.questions.count("ModelConfig") == 1


def test_a_crowd_of_threads_asks_for_the_model_once(server: StandIn):
    server.before = lambda method: time.sleep(0.2) if method == "ModelConfig" else None
    with server.serving() as url, TritonInferenceClient(url) as client:
        threads = [threading.Thread(target=client.embed_texts, args=(["cat"],)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.questions.count("ModelConfig") == 1
    assert len(server.asked) == 20


def _cut_during_a_call(server: StandIn, cable: _Cable, times: int) -> None:
    """Cut the connection under the next so many ModelInfer."""

    def cut(method: str) -> None:
        nonlocal times
        if method == "ModelInfer" and times:
            times -= 1
            cable.cut()

    server.before = cut


def test_a_request_whose_connection_breaks_is_sent_again_once(server: StandIn, cable: _Cable):
    with TritonInferenceClient(cable.url) as client:
        expected = client.embed_texts(["cat"])
        _cut_during_a_call(server, cable, 1)
        assert np.array_equal(client.embed_texts(["cat"]), expected)
        _cut_during_a_call(server, cable, 2)
        with pytest.raises(ServerUnavailable, match="cannot answer now"):
            client.embed_texts(["cat"])
    assert cable.connected >= 3
    with TritonInferenceClient(cable.url, retries=0) as client:
        _cut_during_a_call(server, cable, 1)
        with pytest.raises(ServerUnavailable):
            client.embed_texts(["cat"])


def test_an_awaited_request_whose_connection_breaks_is_sent_again(server: StandIn, cable: _Cable):
    async def scene():
        async with AsyncTritonInferenceClient(cable.url) as client:
            expected = await client.embed_texts(["cat"])
            _cut_during_a_call(server, cable, 1)
            assert np.array_equal(await client.embed_texts(["cat"]), expected)
            _cut_during_a_call(server, cable, 2)
            with pytest.raises(ServerUnavailable):
                await client.embed_texts(["cat"])

    asyncio.run(scene())


def test_a_connection_that_broke_while_nobody_asked_is_not_noticed_by_callers(
    server: StandIn, cable: _Cable
):
    with TritonInferenceClient(cable.url) as client:
        expected = client.embed_texts(["cat"])
        for _ in range(3):
            cable.cut()
            assert np.array_equal(client.embed_texts(["cat"]), expected)
    assert server.questions.count("ModelConfig") > 1, "another server could have been there"


@pytest.mark.parametrize("cut", [True, False], ids=["a moment later", "while the other answers"])
def test_another_model_behind_the_same_address_never_gives_a_vector(
    server: StandIn, cable: _Cable, tmp_path: Path, cut: bool
):
    """The connection moves to another server in an instant, as behind a service address."""
    other = StandIn(tmp_path, weights="b" * 64)
    with other.serving() as url, TritonInferenceClient(cable.url) as client:
        client.embed_texts(["cat"])

        def move() -> None:
            cable.target = ("127.0.0.1", _port(url))
            cable.cut()

        if cut:
            move()
        else:
            server.before = lambda method: move()
        for _ in range(3):
            with pytest.raises(ModelChanged):
                client.embed_texts(["cat"])
        cable.target = ("127.0.0.1", 1)
        with pytest.raises(ModelChanged):
            client.deployment()


@pytest.mark.parametrize("kind", [TritonInferenceClient, AsyncTritonInferenceClient])
def test_a_connection_that_was_replaced_unseen_is_told_by_its_number(
    server: StandIn, cable: _Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
):
    """A request that meets a connection which broke a moment ago waits, and another server answers it."""
    for module in ("connection", "lines"):
        monkeypatch.setattr(f"clip_deploy.client.{module}._is_ready", lambda channel: True)
    other = StandIn(tmp_path, weights="b" * 64)

    async def scene(url: str) -> None:
        client = kind(cable.url)

        async def ask(method: str, *args: object) -> object:
            answer = getattr(client, method)(*args)
            return await answer if kind is AsyncTritonInferenceClient else answer

        await ask("embed_texts", ["cat"])
        cable.target = ("127.0.0.1", _port(url))
        cable.cut()
        await asyncio.sleep(0.5)  # the channel knows now, and connects again when it is asked
        for _ in range(3):
            with pytest.raises(ModelChanged):
                await ask("embed_texts", ["cat"])
        if kind is AsyncTritonInferenceClient:
            await client.close()
        else:
            client.close()

    with other.serving() as url:
        asyncio.run(scene(url))
    assert "ModelInfer" in other.questions, "it was asked, and its answer thrown away"


def test_a_server_that_comes_back_is_found_and_another_model_is_refused(
    server: StandIn, tmp_path: Path
):
    async def scene():
        with ExitStack() as first:
            url = first.enter_context(server.serving())
            client = AsyncTritonInferenceClient(url)
            expected = await client.embed_images(PICTURES[:1])
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(ServerUnavailable):
                await client.embed_images(PICTURES[:1])
        assert time.monotonic() - began < 8, "callers wait for a server that is gone"
        with server.serving(_port(url)):
            began = time.monotonic()
            while True:
                try:
                    again = await client.embed_images(PICTURES[:1])
                    break
                except ServerUnavailable:
                    await asyncio.sleep(0.02)
            assert time.monotonic() - began < 10
            assert np.array_equal(again, expected)
        with StandIn(tmp_path, weights="b" * 64).serving(_port(url)):
            while True:
                try:
                    await client.embed_images(PICTURES[:1])
                    raise AssertionError("a vector of another model")
                except ModelChanged:
                    break
                except ServerUnavailable:
                    await asyncio.sleep(0.02)
            with pytest.raises(ModelChanged):
                await client.deployment()
        await client.close()

    asyncio.run(scene())


def test_a_cancelled_task_cancels_its_call(server: StandIn):
    gone = threading.Event()

    async def scene(url: str):
        async with AsyncTritonInferenceClient(url) as client:
            await client.embed_texts(["cat"])
            task = asyncio.create_task(client.embed_texts(["cat"] * 4))
            while "waiting" not in server.questions:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not gone.is_set():
                await asyncio.sleep(0.01)
            server.before = lambda method: None
            assert (await client.embed_texts(["cat"])).shape == (1, 512)

    with server.serving() as url:

        def wait(method: str) -> None:
            if (
                len(server.asked) == 1
                and method == "ModelInfer"
                and "waiting" not in server.questions
            ):
                server.questions.append("waiting")
                server.context.add_callback(gone.set)
                gone.wait(10)

        server.before = wait
        asyncio.run(asyncio.wait_for(scene(url), 20))


def test_a_closed_client_says_so_to_those_who_wait_and_to_those_who_come(server: StandIn):
    async def scene(url: str):
        client = AsyncTritonInferenceClient(url)
        await client.embed_texts(["cat"])
        server.before = lambda method: time.sleep(0.5)
        waiting = asyncio.create_task(client.embed_texts(["cat"]))
        await asyncio.sleep(0.1)
        await client.close()
        for call in (waiting, client.embed_texts(["cat"]), client.embed_images(PICTURES[:1])):
            with pytest.raises(ServerUnavailable, match="closed"):
                await call
        await AsyncTritonInferenceClient(url).close()

    with server.serving() as url:
        asyncio.run(scene(url))
        client = TritonInferenceClient(url)
        client.close()
        with pytest.raises(ServerUnavailable, match="closed"):
            client.embed_texts(["cat"])


def test_an_awaited_client_belongs_to_one_event_loop(server: StandIn):
    with server.serving() as url:
        client, loop = AsyncTritonInferenceClient(url), asyncio.new_event_loop()
        loop.run_until_complete(client.embed_texts(["cat"]))
        with pytest.raises(ConfigError, match="another event loop"):
            asyncio.run(client.embed_texts(["cat"]))
        loop.run_until_complete(client.close())
        loop.close()


def test_pictures_are_prepared_beside_the_event_loop(server: StandIn, tmp_path: Path):
    from PIL import Image

    large = tmp_path / "large.png"
    Image.effect_noise((4000, 3000), 64).save(large, compress_level=1)

    async def scene(url: str):
        async with AsyncTritonInferenceClient(url) as client:
            await client.request_embedding(PICTURES[0])
            task = asyncio.create_task(client.request_embedding(large))
            turns = 0
            while not task.done():
                await asyncio.sleep(0.001)
                turns += 1
            await task
            return turns

    with server.serving() as url:
        assert asyncio.run(scene(url)) > 20, "the event loop stood still"


def test_nobody_there_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    with TritonInferenceClient(url) as client, pytest.raises(ServerUnavailable, match="no server"):
        client.embed_texts(["cat"])
    with Connection(url) as connection, pytest.raises(ServerUnavailable, match="no server"):
        connection.is_live()
    assert time.monotonic() - began < 5


def test_a_failure_of_one_piece_ends_the_call(server: StandIn):
    count = 0

    def fail(method: str) -> None:
        nonlocal count
        if method == "ModelInfer":
            count += 1
            if count >= 2:
                raise Refusal(grpc.StatusCode.INTERNAL, "out of memory")
            time.sleep(0.05)

    server.before = fail

    async def awaited(url: str):
        async with AsyncTritonInferenceClient(url) as client:
            await client.embed_texts(["cat"] * 80)

    with server.serving() as url:
        with (
            TritonInferenceClient(url) as client,
            pytest.raises(ServerError, match="out of memory"),
        ):
            client.embed_texts(["cat"] * 80)
        assert count < 20
        count = 0
        with pytest.raises(ServerError, match="out of memory"):
            asyncio.run(awaited(url))
        assert count < 20
