"""Encoding of the nouns: msgpack between processes, JSON in checkpoints.

Encoding and decoding are typed and use no pickle.
"""

from __future__ import annotations

import base64
from array import array
from functools import cache
from typing import Any

import msgspec

_CODES = {b"i": ("i", 4), b"f": ("f", 4), b"B": ("B", 1), b"H": ("H", 2)}
"""The types of arrays by the first byte of their encoding, with the bytes of an item."""
_INTEGER = 1
"""The msgpack extension for an integer of more than 64 bits: big-endian two's complement."""
_SMALL = range(-(2**63), 2**64)
"""The integers that msgpack encodes without an extension."""


def _encode_hook(value: Any) -> Any:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is not array:
        raise TypeError(f"cannot decode {kind}")
    data = value
    if type(value) is not bytes:
        data = base64.b64decode(value) if isinstance(value, str) else bytes(value)
    code, width = _CODES.get(data[:1], ("", 1))
    if not code or (len(data) - 1) % width:
        raise ValueError(f"not an array: {len(data)} bytes of type {data[:1]!r}")
    return array(code, data[1:])


def _extension_hook(code: int, data: memoryview) -> int:
    if code != _INTEGER:
        raise ValueError(f"cannot decode a msgpack extension of type {code}")
    return int.from_bytes(data, "big", signed=True)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)


def pack(value: Any) -> bytes:
    """Encode a noun or plain data as msgpack. Integers may have any size, except as keys."""
    try:
        return _encoder.encode(value)
    except OverflowError:  # Rare, so only such a value pays for the copy.
        copy = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_encode_hook)
        return _encoder.encode(_extended(copy))


def _extended(value: Any) -> Any:
    """Replace each large integer in built-in types by an extension."""
    if type(value) is dict:
        return {key: _extended(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return [_extended(part) for part in value]
    if type(value) is int and value not in _SMALL:
        data = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        return msgspec.msgpack.Ext(_INTEGER, data)
    return value


def sendable(text: str) -> str:
    """Return `text` with lone surrogates escaped.

    They may be in any error's text, and cannot be encoded.
    """
    return text.encode(errors="backslashreplace").decode()


@cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a reusable decoder for values of type `kind`."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook, ext_hook=_extension_hook)


def to_json(value: Any) -> bytes:
    """Encode a noun or plain data as JSON. Arrays become the base64 of their bytes."""
    return _json_encoder.encode(value)


def from_json(data: bytes, kind: Any) -> Any:
    """Decode a value of type `kind` that `to_json` wrote.

    Raises msgspec.ValidationError on anything else.
    """
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_hook)
