"""Bodies of requests: bounded in bytes and in time, read once, copied once; and the file of an upload form."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from clip_deploy.gateway.pressure import within
from clip_deploy.gateway.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request
    from starlette.responses import Response

    from clip_deploy.gateway.pressure import Turn

_SHAPE = "send multipart/form-data with one file in the field `file`: curl -F file=@cat.jpg …"


def declared_bytes(request: Request, most: int) -> int:
    """What the request says its body takes; 0 where it does not say.

    Raises:
        Problem: more than ``most``.
    """
    said = request.headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", said):
        raise Problem("bad-request", "Content-Length is no number", remedy="send it right, or not")
    if int(said) > most:
        raise _too_large(most)
    return int(said)


async def read(request: Request, turn: Turn, *, most: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        Problem: it is too large, or takes too long.
        ClientDisconnect: its sender has gone.
    """
    turn.hold(declared_bytes(request, most))
    try:
        return await within(_chunks(request, turn, most), timeout_s)
    except asyncio.TimeoutError:
        raise Problem(
            "slow-upload",
            f"the body was not here within {timeout_s:g} s",
            remedy="send it faster, or a smaller picture: the model sees a few hundred pixels of it",
        ) from None


async def _chunks(request: Request, turn: Turn, most: int) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        if size > turn.held_bytes:
            turn.hold(size - turn.held_bytes)
        chunks.append(chunk)
        request.state.exchange.bytes_in = size
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What the work gives; it is cancelled when the caller goes. The body must have been read before.

    Raises:
        ClientDisconnect: the caller has gone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def uploaded(body: bytes, content_type: str) -> bytes:
    """The file of a form's field ``file``; the bytes are copied once.

    Raises:
        Problem: the body is no such form.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise Problem("shape", f"the body is {kind.decode() or 'of no type'}", remedy=_SHAPE)
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Problem("shape", f"the form is damaged: {error}", remedy=_SHAPE) from None
    if not form.ended:
        raise Problem("shape", "the form has no end", remedy=_SHAPE)
    if len(form.files) != 1:
        raise Problem("shape", f"the form has {len(form.files)} fields `file`", remedy=_SHAPE)
    return b"".join(form.files[0])


class _Form:
    """Collects the parts of a form that are called ``file``."""

    def __init__(self) -> None:
        self.files: list[list[memoryview]] = []
        self.ended = False
        self._name, self._value = b"", b""
        self._wanted = False

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._field,
            "on_header_value": self._text,
            "on_header_end": self._header,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._wanted = False

    def _field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _text(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value.decode("latin-1"))
            if options.get(b"name") == b"file":
                self._wanted = True
                self.files.append([])
        self._name, self._value = b"", b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._wanted:
            self.files[-1].append(memoryview(data)[start:end])

    def _end(self) -> None:
        self.ended = True


def _too_large(most: int) -> Problem:
    return Problem(
        "too-large",
        f"a body of more than {most / 2**20:g} MB",
        remedy="send a smaller picture: the model sees a few hundred pixels of it",
    )
