"""The table of a weight sync: which sender has which rows of each tensor.

Every trainer rank tells its part once, through the store. The first one also tells the specs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from millrace.errors import SyncError
from millrace.sync.buckets import Spec

PLAN = "millrace/sync/plan"
ADAPTERS = "millrace/sync/adapters"
"""The keys of the specs. The rows of trainer rank r have such a key followed by /r."""

Shards = Iterator[tuple[str, tuple[int, ...], torch.dtype, int, Tensor]]
"""(name, whole shape, dtype of the transfer, first row, rows in any dtype) of each tensor."""

Rows = dict[str, tuple[int, int]]
"""(first row, number of rows) of each tensor of which a sender has rows, by name."""

_encode = msgspec.json.encode


def tell(
    shards: Shards, store: Any, rank: int, key: str = PLAN, *, rows: bool = True
) -> tuple[list[Spec], Rows]:
    """Return the specs of all tensors in order, and this rank's rows, and write both to the store.

    Without `rows`, a replica receives whole tensors from each rank, and needs no table. Raises
    SyncError if this rank's specs differ from those of rank 0.
    """
    specs: list[Spec] = []
    own: Rows = {}
    for name, shape, dtype, first, part in shards:
        specs.append(Spec(name, tuple(shape), str(dtype).removeprefix("torch.")))
        if count := len(part) if part.dim() else 1:
            own[name] = (first, count)
    if rank == 0:
        store.set(key, _encode(specs))
    else:
        first_specs = read_specs(store, key)
        compare_specs(first_specs, specs, "trainer rank 0", f"trainer rank {rank}")
    if rows:
        store.set(f"{key}/{rank}", _encode(own))
    return specs, own


def read_specs(store: Any, key: str = PLAN) -> list[Spec]:
    """Return the specs that trainer rank 0 tells. Blocks until they are there."""
    return msgspec.json.decode(store.get(key), type=list[Spec])


def read_rows(store: Any, specs: Sequence[Spec], ranks: int, key: str = PLAN) -> dict[int, Rows]:
    """Return the rows of every trainer rank. Blocks until all are there.

    Raises SyncError, with the tensor's name, unless every row of every tensor has one sender.
    """
    table = {r: msgspec.json.decode(store.get(f"{key}/{r}"), type=Rows) for r in range(ranks)}
    check_cover(specs, table)
    return table


def check_cover(specs: Sequence[Spec], table: Mapping[int, Rows]) -> None:
    """Raise SyncError, with the tensor's name, unless every row of every tensor has one sender."""
    parts: dict[str, list[tuple[int, int, int]]] = {spec.name: [] for spec in specs}
    for rank, rows in table.items():
        for name, (first, count) in rows.items():
            if name not in parts:
                raise SyncError(f"trainer rank {rank} sends {name}, which trainer rank 0 lacks")
            parts[name].append((first, count, rank))
    for spec in specs:
        end = 0
        for first, count, rank in sorted(parts[spec.name]):
            if first > end:
                break
            if first < end:
                raise SyncError(
                    f"two trainer ranks send row {first} of {spec.name}, and one of them "
                    f"is rank {rank}"
                )
            end += count
        if end > _length(spec):
            raise SyncError(f"{spec.name} has {_length(spec)} rows, but the trainer sends {end}")
        if end < _length(spec):
            raise SyncError(
                f"no trainer rank sends row {end} of {spec.name} {spec.dtype}{list(spec.shape)}"
            )


def sends(rows: Rows, adapters: Rows | None) -> bool:
    """Return whether a trainer rank with these rows sends anything. Both ends decide alike."""
    return bool(rows or adapters)


def part_of(specs: Sequence[Spec], rows: Rows) -> list[Spec]:
    """Return the specs of a sender's rows, in the order of `specs`. It may have none of a tensor.

    A whole tensor keeps its shape, also if it is a scalar.
    """
    cut = ((s, rows.get(s.name, (0, 0))[1]) for s in specs)
    return [
        s if count == _length(s) else Spec(s.name, (count, *s.shape[1:]), s.dtype)
        for s, count in cut
    ]


def rows_in(whole: Tensor, name: str, rows: Rows) -> Tensor:
    """Return the sender's rows of the tensor `whole`, as a view."""
    first, count = rows.get(name, (0, 0))
    if not whole.dim():
        return whole if count else whole.view(1)[:0]
    return whole[first : first + count]


def compare_specs(expected: Sequence[Spec], own: Sequence[Spec], one: str, other: str) -> None:
    """Raise SyncError, with the first tensor that differs, if two ends list different tensors."""
    for s, o in zip(expected, own, strict=False):
        if s != o:
            raise SyncError(
                f"{other} has {o.name} {o.dtype}{list(o.shape)} "
                f"where {one} has {s.name} {s.dtype}{list(s.shape)}"
            )
    if len(expected) != len(own):
        raise SyncError(f"{other} has {len(own)} tensors, {one} {len(expected)}")


def _length(spec: Spec) -> int:
    return spec.shape[0] if spec.shape else 1
