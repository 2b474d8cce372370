"""The nouns as bytes: msgpack between processes, JSON in checkpoints. Typed both ways, no pickle."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import msgspec

_CODES = {"i": 4, "f": 4}


def _encode_hook(value: Any) -> Any:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is not array:
        raise TypeError(f"cannot decode {kind}")
    data = base64.b64decode(value) if isinstance(value, str) else bytes(value)
    code = data[:1].decode("ascii")
    if code not in _CODES or (len(data) - 1) % _CODES[code]:
        raise ValueError(f"not an array: {len(data)} bytes of type {code!r}")
    decoded = array(code)
    decoded.frombytes(data[1:])
    return decoded


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)


def pack(value: Any) -> bytes:
    """Any of the nouns, or plain data, as msgpack."""
    return _encoder.encode(value)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A reusable decoder for values of type `kind`."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook)


def to_json(value: Any) -> bytes:
    """Any of the nouns, or plain data, as JSON; arrays as base64 of their bytes."""
    return _json_encoder.encode(value)


def from_json(data: bytes, kind: Any) -> Any:
    """The value of type `kind` that `to_json` wrote. Raises msgspec.ValidationError on anything else."""
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_hook)
