"""Messages between the pool and its workers: msgpack frames, each after its 4-byte length."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from millrace.codec import decoder, pack
from millrace.types import Score

_LENGTH = struct.Struct("<I")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of the reward function: the completions of one prompt."""

    id: int
    prompt: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any]
    completions: list[str]


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call: scores, or the reason and detail of a RewardError."""

    id: int
    scores: list[Score] = []
    reason: str = ""
    detail: str = ""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """A worker's first frame: the function is loaded, or the error of the load."""

    is_async: bool
    whole_group: bool = False
    """Whether the function gets all completions of a sample in one call."""
    error: str = ""


calls_decoder = decoder(list[Call])
reply_decoder = decoder(Reply)
hello_decoder = decoder(Hello)


def frame(value: Any) -> bytes:
    """Return `value` as one frame. Raise TypeError for a value that msgpack cannot encode."""
    payload = pack(value)
    return _LENGTH.pack(len(payload)) + payload


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
