"""The protobuf wire format, as far as a linter needs it: fields of a message, without copying what is large.

A graph of any size is read through a memory map: the walk touches the heads of the fields and skips the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    Buffer = memoryview

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class Damaged(ValueError):
    """The bytes are not a protobuf message: cut off, or something else."""


def fields(data: Buffer) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, start, end) of every field; start and end enclose a length-delimited payload.

    For a varint, ``start`` is its value and ``end`` its position.

    Raises:
        Damaged: the message is cut off, or no message at all.
    """
    at, size = 0, len(data)
    while at < size:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise Damaged(f"no field has number 0, at byte {at}")
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value, at
            continue
        if kind == LENGTH:
            length, at = varint(data, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise Damaged(f"wire type {kind} at byte {at}")
        if at + length > size:
            raise Damaged(f"{at + length - size} bytes are missing at the end")
        yield number, kind, at, at + length
        at += length


def varint(data: Buffer, at: int) -> tuple[int, int]:
    """A varint and the position after it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Damaged(f"cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def encoded(value: int) -> bytes:
    """A varint's bytes."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def delimited(number: int, payload: bytes) -> bytes:
    """A length-delimited field's bytes."""
    return encoded(number << 3 | LENGTH) + encoded(len(payload)) + payload
