"""Pressure on the gateway: what does not fit is refused at once, and what has gone is no longer worked on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import tracemalloc

import pytest

pytest.importorskip("fastapi")

from clip_deploy.errors import ServerTimeout
from clip_deploy.gateway import GatewaySettings
from clip_deploy.gateway.bodies import uploaded
from clip_deploy.gateway.pressure import Gate, within
from clip_deploy.gateway.problems import Problem
from tests.gateway_parts import FakeClient, FakeIndex, gateway, image_form, jpeg

EMBED = "/v1/embeddings"
BODY = b'{"input": "a cat"}'
JSON = {"headers": {"Content-Type": "application/json"}}


def _scope(path: str = EMBED, headers: tuple = ()) -> dict:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"localhost"), *headers],
    }


class _Caller:
    """One request on the wire: what it has sent, and what it got."""

    def __init__(self, body: bytes | None = BODY, headers: tuple = ()) -> None:
        self.scope = _scope(headers=headers)
        self.body, self.reads = body, 0
        self.left = asyncio.Event()
        self.status = 0

    async def receive(self) -> dict:
        self.reads += 1
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.status = message.get("status", self.status)


async def _until(true) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_beyond_the_line_a_request_is_refused_at_once_and_unread():
    client = FakeClient()
    with gateway(client, max_in_flight=2, max_waiting=1, max_wait_s=30) as g:

        async def crowd():
            client.hold = asyncio.Event()
            callers = [_Caller() for _ in range(5)]
            tasks = [asyncio.ensure_future(g.app(c.scope, c.receive, c.send)) for c in callers]
            await _until(lambda: client.embedding == 2)
            await asyncio.wait(tasks[3:], timeout=10)
            refused = [(c.status, c.reads) for c in callers[3:]]
            unread = callers[2].reads
            client.hold.set()
            await asyncio.gather(*tasks)
            return refused, unread, [c.status for c in callers[:3]]

        refused, unread, answered = g.run(crowd())
    assert refused == [(503, 0), (503, 0)]
    assert unread == 0
    assert answered == [200, 200, 200]


def test_a_turn_that_does_not_come_in_time_is_refused():
    client = FakeClient()
    with gateway(client, max_in_flight=1, max_wait_s=0.02) as g:

        async def two():
            client.hold = asyncio.Event()
            first = asyncio.ensure_future(g.http.post(EMBED, content=BODY))
            await _until(lambda: client.embedding == 1)
            second = await g.http.post(EMBED, content=BODY)
            client.hold.set()
            return await first, second

        first, second = g.run(two())
    assert first.status_code == 200
    assert second.status_code == 503
    assert second.json()["type"].endswith("waited")
    assert int(second.headers["retry-after"]) >= 1


def test_a_late_triton_gets_fewer_at_once_and_more_again_when_it_answers():
    gate = Gate(GatewaySettings("127.0.0.1:1", max_in_flight=100))
    for _ in range(50):
        gate.late()  # all of one moment
    assert gate.room == 70
    for _ in range(70):
        gate.in_time()
    assert gate.room in (70, 71)
    for _ in range(10_000):
        gate.in_time()
    assert gate.room == 100


def test_a_gate_that_was_narrowed_lets_no_more_in_than_it_has_room_for():
    async def crowd():
        gate = Gate(
            GatewaySettings(
                "127.0.0.1:1", max_in_flight=8, max_waiting=8, max_wait_s=5, timeout_s=0.01
            )
        )
        most, left = [], asyncio.Event()

        async def one():
            async with gate.turn():
                most.append(gate.in_flight)
                await left.wait()

        first = [asyncio.ensure_future(one()) for _ in range(8)]
        await asyncio.sleep(0)
        gate.late()
        waiting = [asyncio.ensure_future(one()) for _ in range(8)]
        await asyncio.sleep(0)
        most.clear()
        left.set()
        await asyncio.gather(*first, *waiting)
        return most, gate.in_flight

    most, rest = asyncio.run(crowd())
    assert len(most) == 8
    assert max(most) <= 5
    assert rest == 0


def test_deadlines_of_triton_narrow_the_gate_of_a_gateway():
    client = FakeClient()
    with gateway(client, max_in_flight=10) as g:
        g.run(g.http.get("/readyz"))
        client.failure = ServerTimeout("late", remedy="wait")
        assert g.run(g.http.post(EMBED, content=BODY)).status_code == 504
        metrics = g.run(g.http.get("/metrics")).text
    assert "clip_gateway_room 7.0" in metrics


def test_others_are_served_while_the_gate_is_full():
    client = FakeClient()
    with gateway(client, index=FakeIndex(), max_in_flight=1, max_waiting=0) as g:

        async def look():
            client.hold = asyncio.Event()
            first = asyncio.ensure_future(g.http.post(EMBED, content=BODY))
            await _until(lambda: client.embedding == 1)
            paths = ("/livez", "/readyz", "/metrics", "/api/v1/images/a%20folder/1.jpg")
            got = [(await g.http.get(path)).status_code for path in paths]
            client.hold.set()
            await first
            return got

        assert g.run(look()) == [200] * 4


def test_turns_go_by_arrival_and_those_who_gave_up_are_passed_over():
    async def line() -> list[int]:
        gate = Gate(GatewaySettings("h:1", max_in_flight=1, max_wait_s=5))
        order: list[int] = []
        go = asyncio.Event()

        async def visit(i: int) -> None:
            async with gate.turn():
                order.append(i)
                if i == 0:
                    await go.wait()

        tasks = []
        for i in range(5):
            tasks.append(asyncio.ensure_future(visit(i)))
            await asyncio.sleep(0)
        tasks[2].cancel()
        go.set()
        await asyncio.sleep(0)
        tasks[1].cancel()  # whose turn has perhaps just come
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.in_flight, gate.waiting) == (0, 0)
        async with gate.turn():
            assert gate.in_flight == 1
        return order

    order = asyncio.run(line())
    assert [i for i in order if i != 1] == [0, 3, 4]


def test_a_cancellation_that_comes_as_the_work_ends_is_kept():
    async def both(end) -> None:
        work = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(within(work, 5))
        await asyncio.sleep(0)
        end(work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        work.exception()

    asyncio.run(both(lambda work: work.set_result(1)))
    asyncio.run(both(lambda work: work.set_exception(OSError())))


def test_work_that_takes_too_long_is_cancelled():
    async def late() -> None:
        work = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(work, 0.01)
        assert work.cancelled()

    asyncio.run(late())


def test_bodies_together_are_bounded():
    client = FakeClient()
    limits = {"max_upload_bytes": 2000, "max_buffered_bytes": 3000}
    with gateway(client, **limits) as g:

        async def two():
            client.hold = asyncio.Event()
            body = BODY + b" " * 1900
            first = asyncio.ensure_future(g.http.post(EMBED, content=body))
            await _until(lambda: client.embedding == 1)
            second = await g.http.post(EMBED, content=body)
            client.hold.set()
            await first
            third = await g.http.post(EMBED, content=body)
            return second, third

        second, third = g.run(two())
    assert second.json()["type"].endswith("memory")
    assert third.status_code == 200
    assert g.app.state.service._gate.held_bytes == 0


def test_a_caller_that_goes_ends_its_work():
    client = FakeClient()
    with gateway(client) as g:

        async def leave():
            client.hold = asyncio.Event()
            caller = _Caller()
            task = asyncio.ensure_future(g.app(caller.scope, caller.receive, caller.send))
            await _until(lambda: client.embedding == 1)
            caller.left.set()
            await task
            return caller.status

        assert g.run(leave()) == 0
        gate = g.app.state.service._gate
        assert (client.cancelled, gate.in_flight, gate.held_bytes) == (1, 0, 0)
    assert (g.lines()[0]["status"], g.lines()[0]["refused"]) == (499, "gone")


def test_a_caller_that_goes_while_it_sends_leaves_nothing():
    client = FakeClient()
    with gateway(client) as g:

        async def leave():
            caller = _Caller(body=None)
            caller.left.set()
            await g.app(caller.scope, caller.receive, caller.send)

        g.run(leave())
    assert client.request_ids == []
    assert g.app.state.service._gate.in_flight == 0


@pytest.mark.parametrize("length", [b"-1", b"1e9", b"9" * 5000, "²".encode()])
def test_a_length_that_is_none_is_refused(length: bytes):
    with gateway() as g:

        async def ask():
            caller = _Caller(headers=((b"content-length", length),))
            await g.app(caller.scope, caller.receive, caller.send)
            return caller.status, caller.reads

        status, reads = g.run(ask())
    assert status in (400, 413)
    assert reads == 0


def test_a_large_upload_is_in_memory_at_most_three_times():
    """As it came in pieces, as one body, and as the file cut out of it."""
    size = 4 * 2**20
    client = FakeClient()

    async def prepare(images):
        return (await FakeClient().prepare_images([jpeg()])).repeat(len(images), 0)

    client.prepare_images = prepare
    with gateway(client, FakeIndex()) as g:
        form = image_form(jpeg() + b"\0" * size)
        g.post("/api/v1/search/image", **form)
        tracemalloc.start()
        g.post("/api/v1/search/image", **form)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 5.5 * size  # httpx holds some, too


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data; boundary=x"),
        (b"--x\r\n", "multipart/form-data; boundary=x"),
        (b"--x--\r\n", "multipart/form-data; boundary=x"),
        (b"hello", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\n\r\n--x--", "multipart/form-data"),
        (b"--x\r\n\r\n\r\n--x--", "text/plain"),
        (b"--x\r\n\r\n\r\n--x--", ""),
        (b"x", "multipart/form-data; boundary=" + "b" * 5000),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\ncut',
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\n" + b"A: b\r\n" * 1000 + b"\r\n--x--", "multipart/form-data; boundary=x"),
        (b"--x\r\n" + b"A" * 100_000 + b": b\r\n\r\n--x--", "multipart/form-data; boundary=x"),
    ],
)
def test_forms_that_are_none_are_refused(body: bytes, kind: str):
    with pytest.raises(Problem):
        uploaded(body, kind)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\r\n", b"\r\n--x", b"--x\r\n\r\n", bytes(range(256)) * 9]
)
def test_the_file_of_a_form_comes_out_as_it_went_in(data: bytes):
    head = b'Content-Disposition: form-data; name="file"; filename="a; name=b.jpg"\r\n'
    other = b'Content-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
    boundary = b"----boundary7"
    body = b"".join(
        (
            *(b"--", boundary, b"\r\n", other),
            *(b"--", boundary, b"\r\n", head, b"\r\n", data, b"\r\n"),
            *(b"--", boundary, b"--\r\n"),
        )
    )
    assert uploaded(body, f'multipart/form-data; boundary="{boundary.decode()}"') == data


@pytest.mark.processes
def test_connections_that_never_come_to_a_request_are_closed():
    """Nothing sent; a head that trickles in; and the rest of a body that was refused long ago."""
    code = """
import sys
from clip_deploy.errors import ServerTimeout
from clip_deploy.gateway import GatewaySettings
from clip_deploy.gateway.running import run
settings = GatewaySettings("127.0.0.1:9", port=0, head_timeout_s=0.5, max_upload_bytes=1024)
run(settings, None, lambda url: print(url, flush=True))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n"
        for first, then in (
            (b"", b""),
            (head, b"X-A: b\r\n"),
            (head + b"Content-Length: 99999999\r\n\r\n", b"x" * 1000),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as wire:
                began = time.monotonic()
                wire.settimeout(0.1)
                got = b""
                with contextlib.suppress(ConnectionError):
                    wire.sendall(first)
                    while time.monotonic() - began < 10:
                        with contextlib.suppress(TimeoutError):
                            piece = wire.recv(65536)
                            if not piece:
                                break
                            got += piece
                        wire.sendall(then)
                assert 0.3 < time.monotonic() - began < 8
                assert (b" 413 " in got) is (b"Length" in first)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()
