"""Frames on a stream of bytes: payloads, each after its length."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Iterator

_LENGTH = struct.Struct("<Q")
_SHORT = 1 << 20
"""A copy of as many bytes takes less time than a system call."""


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Write a frame. A short one takes a single system call, and a long one is not copied."""
    if len(payload) < _SHORT:
        writer.write(framed(payload))
    else:
        writer.write(_LENGTH.pack(len(payload)))
        writer.write(payload)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def payloads_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield payloads until the other end closes or dies."""
    try:
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            yield await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return


class Frames:
    """A parser of frames from a byte stream in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that `data` completes."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size + length
            yield bytes(self._buffer[at - length : at])
        del self._buffer[:at]
