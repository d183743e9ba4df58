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
        # Most varints have one byte, and a call costs more than the rest of the step.
        key, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
        kind = key & 7
        if kind == LENGTH and at < size:
            start, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
            start, at = at, at + start
        elif kind == VARINT:
            start, at = varint(data, at)
        elif kind in (FIXED64, FIXED32):
            start, at = at, at + (8 if kind == FIXED64 else 4)
        else:
            raise Damaged(f"wire type {kind} at byte {at}")
        if at > size:
            raise Damaged(f"{at - size} bytes are missing at the end")
        if key < 8:
            raise Damaged(f"no field has number 0, at byte {at}")
        yield key >> 3, kind, start, at


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
