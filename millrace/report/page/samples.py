"""The samples of a report: the choice of those that fit, and their texts.

The first pass reads the columns without texts of every file. The second pass reads the texts of
the chosen samples alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.report.page.figures import Array
from millrace.report.samples import store as store
from millrace.types import WINDOW

_LIGHT = ("version", "sample", "reward", "tokens")
_NEVER_NULL = ("version", "sample", "trajectory", "tokens", "outcome")
_FILES = 48
"""The most files whose texts are read."""
_MOST_TEXT = 6000
"""The most characters of one text. Longer ones keep their beginning and their end."""
_MOST_SAMPLES = 2000
_MOST_MESSAGES = 60
"""The most messages of one conversation. Longer ones keep their beginning and their end."""


@dataclass
class Table:
    """The columns without texts of all kept trajectories."""

    files: list[Path]
    notes: list[str]
    file: Array
    version: Array
    sample: Array
    reward: Array
    tokens: Array
    trained: Array

    def __len__(self) -> int:
        return len(self.version)


def read_table(run_dir: Path) -> Table:
    """Read the columns without texts. Files that are not readable are counted in a note."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    files: list[Path] = []
    columns: list[tuple[Array, ...]] = []
    bad = 0
    notes = list[str]()
    for path in store.files(run_dir, notes):
        try:
            with pq.ParquetFile(path) as file:
                read = file.read([*_LIGHT, "trajectory", "outcome"], use_threads=False)
            if any(read[name].null_count for name in _NEVER_NULL):
                raise ValueError("a row without its sample")
            arrays = [read[name].cast(pa.float64()).to_numpy() for name in _LIGHT]
            trained = pc.equal(read["outcome"], "trained").to_numpy()
        except (OSError, pa.ArrowException, KeyError, ValueError):
            bad += 1
            continue
        columns.append((np.full(len(trained), len(files)), *arrays, trained))
        files.append(path)
    notes += [f"RUN/samples: {bad} files are not readable"] if bad else []
    empty = [np.empty(0)] * 6
    whole = map(np.concatenate, zip(*columns, strict=True)) if columns else empty
    types = np.int64, np.int64, np.int64, float, float, bool
    return Table(files, notes, *(p.astype(t) for p, t in zip(whole, types, strict=True)))


def count(table: Table) -> int:
    """Return the number of samples."""
    return len(np.unique(np.column_stack([table.file, table.sample]), axis=0)) if len(table) else 0


def choose(table: Table) -> list[tuple[int, int]]:
    """Return (file, sample) in the order in which they should be shown while there is room.

    In turn come: samples of evenly spaced versions, of the first and the last one, with the
    largest and the least reward, the largest spread, dropped ones, and the longest ones.
    """
    if not len(table):
        return []
    pairs, first, inverse = np.unique(
        np.column_stack([table.file, table.sample]), axis=0, return_index=True, return_inverse=True
    )
    inverse = inverse.ravel()
    size = np.bincount(inverse)
    reward = np.nan_to_num(table.reward)
    mean = np.bincount(inverse, reward) / size
    spread = np.sqrt(np.maximum(0, np.bincount(inverse, reward**2) / size - mean**2))
    length = np.bincount(inverse, table.tokens) / size
    version, dropped = table.version[first], ~table.trained[first]
    order = np.argsort(version, kind="stable")
    even = order[_spread_out(len(order))]
    ends = np.column_stack([order, order[::-1]]).ravel()
    lists = [
        even, ends, even, np.argsort(-mean, kind="stable"), np.argsort(mean, kind="stable"),
        even, np.argsort(-spread, kind="stable"), np.flatnonzero(dropped),
        np.argsort(-length, kind="stable"),
    ]  # fmt: skip
    chosen: dict[int, None] = {}
    places = [iter(each.tolist()) for each in lists]
    files: set[int] = set()
    while places and len(chosen) < min(len(pairs), _MOST_SAMPLES):
        for place in list(places):
            for index in place:
                file = int(pairs[index, 0])
                if index not in chosen and (file in files or len(files) < _FILES):
                    files.add(file)
                    chosen[index] = None
                    break
            else:
                places.remove(place)
    return [(int(pairs[i, 0]), int(pairs[i, 1])) for i in chosen]


def _spread_out(count: int) -> Array:
    """Return 0 to count - 1 in an order whose every beginning is evenly spaced."""
    reverse = np.zeros(1, np.int64)
    while len(reverse) < max(count, 2):  # each round adds a bit at the low end
        reverse = np.concatenate([2 * reverse, 2 * reverse + 1])
    return reverse[reverse < count]


def read_texts(
    table: Table, chosen: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the chosen samples with all their responses, as the browser reads them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    wanted: dict[int, list[int]] = {}
    for file, sample in chosen:
        wanted.setdefault(file, []).append(sample)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for file, ids in wanted.items():
        try:
            read = pq.read_table(table.files[file], partitioning=None)
            mine = read.filter(pc.is_in(read["sample"], pa.array(ids, read["sample"].type)))
            rows = mine.to_pylist(maps_as_pydicts="lossy")
        except (OSError, pa.ArrowException, KeyError, ValueError):
            continue
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(int(row["sample"]), []).append(row)
        found |= {(file, sample): _sample(group) for sample, group in groups.items()}
    return found


def _sample(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    return {
        "id": first["sample"],
        "version": first["version"],
        "admitted": first.get("admitted_version"),
        "outcome": str(first["outcome"]),
        "source": str(first.get("data_source") or ""),
        "prompt": _cut(first.get("prompt")),
        "truth": _cut(first.get("ground_truth")),
        "mean": _round(np.mean(rewards)) if rewards else None,
        "spread": _round(np.std(rewards)) if rewards else None,
        "length": _round(np.mean([row["tokens"] for row in rows])),
        "responses": [_response(row) for row in sorted(rows, key=lambda r: r["trajectory"])],
    }


def _response(row: dict[str, Any]) -> dict[str, Any]:
    segments = row.get("segments") or []
    parts = [[s.get("version"), str(s.get("author")), s.get("tokens"), _cut(s.get("text"))] for s in segments]  # fmt: skip
    if not any(part[3] for part in parts):
        version = parts[0][0] if parts else row["version"]
        parts = [[version, "policy", row["tokens"], _cut(row.get("response"))]]
    spoken, ended = _messages(row.get("messages")), str(row.get("ended") or "")
    _name_authors(parts, spoken)
    return {
        "reward": _round(row.get("reward")),
        "raw": _round(row.get("raw")),
        "components": {str(k): _round(v) for k, v in dict(row.get("components") or {}).items()},
        "answer": _cut(row.get("answer")),
        "stop": str(row.get("stop") or ""),
        "tokens": row["tokens"],
        "ended": ended if spoken or (row.get("threads") or 1) > 1 else _window(row, ended),
        "threads": row.get("threads") or 1,
        "segments": parts,
        "messages": spoken,
    }


def _window(row: dict[str, Any], ended: str) -> str:
    """Return which part of a response a row is. Empty if it is the whole one."""
    number, goes_on = 1 + (row.get("windows_before") or 0), ended == WINDOW
    if number == 1 and not goes_on:
        return ""
    end = "goes on" if goes_on else str(row.get("stop") or "")
    return f"window {number} of the response that sample {row.get('first')} began, {end}"


def _messages(packed: object) -> list[list[str]]:
    """Return the author and the text of each message of a conversation."""
    if not isinstance(packed, str):
        return []
    try:
        found = json.loads(packed)
    except (ValueError, RecursionError):
        return []
    messages = [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
    shown, half = messages, _MOST_MESSAGES // 2
    if len(messages) > _MOST_MESSAGES:
        shown = messages[:half] + messages[-half:]
    said = [[str(m.get("role") or "?"), _cut(_said(m)) or ""] for m in shown]
    if len(shown) < len(messages):
        said.insert(half, ["…", f"[{len(messages) - len(shown):,} messages are left out]"])
    return said


def _said(message: dict[str, Any]) -> str:
    """Return the text of a message, with a line for each call of a tool."""
    content, calls = message.get("content"), message.get("tool_calls")
    words = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    for call in calls if isinstance(calls, list) else []:
        tool = call.get("function") if isinstance(call, dict) else None
        given = tool if isinstance(tool, dict) else {}
        arguments = given.get("arguments")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        words.append(f"calls {given.get('name')}({shown})")
    return "\n".join(word for word in words if word and word != "null")


def _name_authors(parts: list[list[Any]], spoken: list[list[str]]) -> None:
    """Replace the author `environment` by the roles of its messages, where they surely fit."""
    gaps: list[list[str]] = []
    for before, after in itertools.pairwise([role for role, _ in spoken]):
        if after == "assistant":
            continue
        if before == "assistant":
            gaps.append([])
        if gaps and after not in gaps[-1]:
            gaps[-1].append(after)
    others = [part for part in parts if part[1] == "environment"]
    if len(others) == len(gaps) and not any(part[1] == "opening" for part in parts):
        for part, roles in zip(others, gaps, strict=True):
            part[1] = ", ".join(roles)


def _round(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{float(value):.4g}")


def _cut(value: object) -> str | None:
    if value is None:
        return None
    shown = str(value)
    if len(shown) <= _MOST_TEXT:
        return shown
    half = _MOST_TEXT // 2
    left = len(shown) - 2 * half
    return f"{shown[:half]}\n[… {left:,} characters are left out …]\n{shown[-half:]}"
