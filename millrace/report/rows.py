"""Samples as rows of Arrow tables: one row for each trajectory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from millrace.codec import sendable
from millrace.types import PolicyVersion, Sample, Score, Tokens, Trajectory

Decode = Callable[[Tokens], str]

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
        ("admitted_version", pa.int32()),
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

`reward` is the value that training used, and `raw` the value before any shaping.
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
        for i, trajectory in enumerate(sample.trajectories):
            response, tokens = self._add_segments(trajectory)
            reward, raw, answer = self._add_score(trajectory.score)
            stop = str(trajectory.stop) if trajectory.stop else None
            self._rows.append(
                (
                    *(version, prompt.index, i, outcome, source, text, response, truth),
                    *(reward, raw, answer, size, tokens, stop, sample.admitted_version),
                )
            )

    def take(self) -> pa.RecordBatch:
        """Return the rows as one batch, and forget them."""
        plain = [f for f in SCHEMA if f.name not in ("components", "segments")]
        columns = list(zip(*self._rows, strict=True)) or [()] * len(plain)
        arrays = {f.name: pa.array(c, f.type) for f, c in zip(plain, columns, strict=True)}
        names, values = list(zip(*self._components, strict=True)) or ((), ())
        arrays["components"] = pa.MapArray.from_arrays(
            pa.array(self._component_ends, pa.int32()),
            pa.array(names, pa.string()),
            pa.array(values, pa.float64()),
        )
        fields = list(SCHEMA.field("segments").type.value_type)
        parts = list(zip(*self._segments, strict=True)) or [()] * len(fields)
        arrays["segments"] = pa.ListArray.from_arrays(
            pa.array(self._segment_ends, pa.int32()),
            pa.StructArray.from_arrays(
                [pa.array(c, f.type) for f, c in zip(fields, parts, strict=True)], fields=fields
            ),
        )
        self._clear()
        return pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)

    def _add_segments(self, trajectory: Trajectory) -> tuple[str, int]:
        """Add the segments of a response. Return its text and its length."""
        for s in trajectory.segments:
            text = _clean(self._decode(s.tokens))
            self._segments.append((s.version, str(s.author), len(s.tokens), text))
        self._segment_ends.append(len(self._segments))
        if len(trajectory.segments) == 1:
            return text, len(s.tokens)
        # A character may begin in one segment and end in the next one.
        return _clean(self._decode(trajectory.tokens)), trajectory.num_tokens

    def _add_score(self, score: Score | None) -> tuple[float | None, float | None, str | None]:
        """Add the components of a score. Return reward, raw and answer."""
        if score is not None:
            self._components += [(_clean(k), float(v)) for k, v in score.extra.items()]
        self._component_ends.append(len(self._components))
        if score is None:
            return None, None, None
        return score.value, score.unshaped, None if score.answer is None else _clean(score.answer)


def _clean(text: str) -> str:
    return text if text.isascii() else sendable(text)


def _text(value: Any) -> str | None:
    """Return a ground truth as text. Anything but a text is JSON."""
    if value is None or isinstance(value, str):
        return value if value is None else _clean(value)
    return _clean(json.dumps(value, default=str, ensure_ascii=False))
