"""Samples as rows of Arrow tables: one row for each trajectory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.codec import sendable
from millrace.types import PolicyVersion, Sample, Tokens, Trajectory, tokens_of

Decode = Callable[[Tokens], str]

_DTYPES = {
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.float64(): np.float64,
}
_MOST_BYTES = 2**31 - 1
"""Bytes of the texts of one column in memory."""

SCHEMA = pa.schema(
    [
        ("version", pa.int32()),
        ("sample", pa.int64()),
        ("trajectory", pa.int16()),
        ("outcome", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("ground_truth", pa.string()),
        ("reward", pa.float64()),
        ("raw", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("answer", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("stop", pa.string()),
        ("ended", pa.string()),
        ("threads", pa.int16()),
        ("messages", pa.string()),
        ("admitted_version", pa.int32()),
        ("first", pa.int64()),
        ("windows_before", pa.int32()),
        (
            "segments",
            pa.list_(
                pa.struct(
                    [
                        ("version", pa.int32()),
                        ("author", pa.string()),
                        ("tokens", pa.int32()),
                        ("text", pa.string()),
                    ]
                )
            ),
        ),
    ]
)
"""The columns. `version` is the version that the row trained. A dropped row has the live version.

`reward` is the value that training used, and `raw` the value before any shaping. `messages` is the
conversation by author as JSON. `first` is the sample that began the response, and `windows_before`
the number of its windows before this one: 0 if it is trained whole. A segment of the author
"opening" begins each thread but the first, and has the thread's own opening.
"""


class Rows:
    """Rows in memory, column by column. Lists of whole columns are the fastest way into Arrow."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._clear()

    def __len__(self) -> int:
        return len(self._rows)

    def _clear(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        """The plain columns, in the order of SCHEMA."""
        self._segments: list[tuple[int, str, int, str]] = []
        self._segment_ends, self._component_ends = [0], [0]
        self._components: list[tuple[str, float]] = []

    def add(self, sample: Sample, version: PolicyVersion, outcome: str) -> None:
        """Add every trajectory of a sample."""
        prompt = sample.prompt
        source, text = _clean(prompt.data_source), _clean(prompt.text)
        truth, size = _text(prompt.ground_truth), len(prompt.tokens)
        window = prompt.continues.number if prompt.continues is not None else 0
        for i, trajectory in enumerate(sample.trajectories):
            response, tokens = self._add_segments(trajectory)
            reward = raw = answer = None
            if (score := trajectory.score) is not None:
                self._components += [(_clean(k), float(v)) for k, v in score.extra.items()]
                reward, raw, answer = score.value, score.unshaped, _text(score.answer)
            self._component_ends.append(len(self._components))
            stop = str(trajectory.stop) if trajectory.stop else None
            spoken = _text(list(trajectory.messages)) if trajectory.messages else None
            episode = trajectory.ended or None, len(trajectory.threads), spoken
            self._rows.append(
                (
                    *(version, prompt.index, i, outcome, source, text, response, truth),
                    *(reward, raw, answer, size, tokens, stop, *episode),
                    *(sample.admitted_version, prompt.first, window),
                )
            )

    def take(self) -> pa.RecordBatch:
        """Return the rows as one batch, and forget them."""
        plain = [f for f in SCHEMA if f.name not in ("components", "segments")]
        arrays = dict(zip((f.name for f in plain), _columns(plain, self._rows), strict=True))
        fields = list(SCHEMA.field("segments").type.value_type)
        segments = pa.StructArray.from_arrays(_columns(fields, self._segments), fields=fields)
        keys = [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.float64())]
        arrays["components"] = pa.MapArray.from_arrays(
            _numbers(pa.int32(), self._component_ends), *_columns(keys, self._components)
        )
        arrays["segments"] = pa.ListArray.from_arrays(
            _numbers(pa.int32(), self._segment_ends), segments
        )
        self._clear()
        return pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)

    def _add_segments(self, trajectory: Trajectory) -> tuple[str, int]:
        """Add the segments of a response. Return its text and its length."""
        for i, thread in enumerate(trajectory.threads):
            if i or thread.opening is not None:
                opening = tokens_of() if thread.opening is None else thread.opening
                shown = _clean(self._decode(opening))
                self._segments.append((-1, "opening", len(opening), shown))
            for s in thread.segments:
                text = _clean(self._decode(s.tokens))
                self._segments.append((s.version, str(s.author), len(s.tokens), text))
        self._segment_ends.append(len(self._segments))
        if len(trajectory.segments) == 1:
            return text, len(s.tokens)
        # A character may begin in one segment and end in the next one.
        return _clean(self._decode(trajectory.tokens)), trajectory.num_tokens


def _columns(fields: Sequence[pa.Field], rows: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
    """Return the columns of `rows`. pa.array would import pandas, which takes half a second."""
    columns = list(zip(*rows, strict=True)) or [()] * len(fields)
    makers = [_texts if f.type == pa.string() else partial(_numbers, f.type) for f in fields]
    return [make(column) for make, column in zip(makers, columns, strict=True)]


def _texts(values: Sequence[str | None]) -> pa.Array:
    encoded = [b"" if value is None else value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    if ends[-1] > _MOST_BYTES:
        return pa.array(values, pa.string())  # It raises, or finds a way.
    buffers = [
        _present(values),
        pa.py_buffer(ends.astype(np.int32)),
        pa.py_buffer(b"".join(encoded)),
    ]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _numbers(kind: pa.DataType, values: Sequence[float | None]) -> pa.Array:
    whole = [0 if value is None else value for value in values]
    data = pa.py_buffer(np.array(whole, dtype=_DTYPES[kind]))
    return pa.Array.from_buffers(kind, len(values), [_present(values), data])


def _present(values: Sequence[object]) -> pa.Buffer | None:
    """Return a bit for each value that is not None, or None if all are present."""
    if None not in values:
        return None
    return pa.py_buffer(np.packbits([v is not None for v in values], bitorder="little"))


def _clean(text: str) -> str:
    return text if text.isascii() else sendable(text)


def _text(value: Any) -> str | None:
    """Return a value as text. Anything but a text is JSON."""
    if value is None:
        return None
    is_text = isinstance(value, str)
    return _clean(value if is_text else json.dumps(value, default=str, ensure_ascii=False))
