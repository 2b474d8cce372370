"""Tests of the table of senders: any way to cut tensors into rows arrives whole, and no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.errors import SyncError
from millrace.sync.buckets import Spec, specs_of
from millrace.sync.collective import NullSender, Receiver, Sender, join_sender
from millrace.sync.options import SyncOptions
from millrace.sync.proof import bit_sums
from millrace.sync.table import PLAN, Rows, Shards, check_cover, part_of, rows_in, tell
from tests.sync.fleet import Holder, equal, regroup
from tests.waiting import HANG_S

Cut = dict[str, list[tuple[int, int]]]
"""(first row, rows) of each tensor, by sender."""


def drawn(seed: int, senders: int) -> tuple[dict[str, Tensor], Cut]:
    """Return tensors and a random table: uneven rows in any order, and senders without rows."""
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [(draw.randint(0, 40), draw.randint(1, 300)) for _ in range(6)] + [(5, 2, 3), (3,), ()]
    tensors, cut = {}, {}
    for i, shape in enumerate(shapes):
        dtype = draw.choice([torch.float32, torch.bfloat16])
        tensors[f"w{i}"] = torch.randn(shape, generator=noise).to(dtype)
        rows = shape[0] if shape else 1
        ends = sorted(draw.randint(0, rows) for _ in range(senders - 1))
        parts = [(a, b - a) for a, b in zip([0, *ends], [*ends, rows], strict=True)]
        if draw.random() < 0.4 or not shape:  # one sender has the whole tensor
            parts = [(0, rows)] + [(draw.randint(0, rows), 0)] * (senders - 1)
        draw.shuffle(parts)
        cut[f"w{i}"] = parts
    return tensors, cut


@dataclass
class Source:
    """A trainer rank with its rows of a random table."""

    tensors: dict[str, Tensor]
    cut: Cut
    rank: int
    device = torch.device("cpu")

    def shards(self) -> Shards:
        for name, tensor in self.tensors.items():
            first, count = self.cut[name][self.rank]
            rows = tensor if tensor.dim() or count else tensor.view(1)
            own = rows[first : first + count] if rows.dim() else rows
            yield name, tuple(tensor.shape), tensor.dtype, first, own

    def adapters(self) -> Iterator[None]:
        raise AssertionError("there are no adapters")


def agreement(ranks: int, *, vllm: bool = False) -> SyncOptions:
    return SyncOptions(
        ranks=ranks,
        devices=1,
        bucket_bytes=20_000,
        timeout_s=HANG_S,
        wait_deadline_s=120,
        stall_s=60,
        colocated=False,
        gloo=False,
        serving=vllm,
        adapter_scale=None,
    )


@pytest.mark.parametrize("seed", range(8))
async def test_any_table_that_covers_each_row_once_arrives_whole(seed: int) -> None:
    senders = 1 + seed % 4
    tensors, cut = drawn(seed, senders)
    agreed = agreement(senders + 1, vllm=seed % 2 == 1)  # the last rank has no rows
    for parts in cut.values():
        parts.append((0, 0))
    store = dist.HashStore()
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    holder = Holder(live)
    sources = [Source(tensors, cut, rank) for rank in range(senders + 1)]
    *ends, receiver = await asyncio.gather(
        *(join_sender(source, store, i, agreed) for i, source in enumerate(sources)),  # type: ignore[arg-type]
        Receiver.join(holder, store, 0, agreed),
    )
    await regroup(ends, {0: receiver})
    assert isinstance(ends[-1], NullSender) and any(isinstance(end, Sender) for end in ends)
    for version in range(2):
        for tensor in tensors.values():
            tensor.add_(1)
        sending = [asyncio.to_thread(asyncio.run, end.transfer(version)) for end in ends]  # type: ignore[arg-type]
        *sent, received = await asyncio.gather(*sending, receiver.transfer(version))
        assert sum(report.bytes for report in sent) == received.bytes
        assert equal(receiver.inbox.staged, tensors)
        if agreed.serving:
            assert receiver.inbox.bit_sums == bit_sums(tensors)
        else:
            await receiver.activate(version)
            assert equal(live, tensors)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_a_row_without_a_sender_or_with_two_is_an_error_with_its_name(
    seed: int, senders: int
) -> None:
    tensors, cut = drawn(seed, senders)
    specs = specs_of(tensors)

    def table() -> dict[int, Rows]:
        return {
            r: {name: parts[r] for name, parts in cut.items() if parts[r][1]}
            for r in range(senders)
        }

    check_cover(specs, table())
    draw = random.Random(seed)
    rank = draw.choice([r for r, rows in table().items() if rows])
    name = draw.choice(sorted(table()[rank]))
    first, count = table()[rank][name]
    for wrong in (None, (first, count - 1), (first + 1, count), (first, count + 1)):
        broken = table()
        del broken[rank][name]
        if wrong is not None and wrong[1]:
            broken[rank][name] = wrong
        with pytest.raises(SyncError, match=rf"\b{name}\b"):
            check_cover(specs, broken)
    twice = table()
    twice[senders] = {name: (first + count - 1, 1)}
    with pytest.raises(SyncError, match=rf"row {first + count - 1} of {name}, and one of them"):
        check_cover(specs, twice)


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_the_specs_of_a_part_are_those_of_its_rows(seed: int, senders: int) -> None:
    tensors, cut = drawn(seed, senders)
    for rank in range(senders):
        rows = {name: parts[rank] for name, parts in cut.items() if parts[rank][1]}
        views = {name: rows_in(tensor, name, rows) for name, tensor in tensors.items()}
        assert specs_of(views) == part_of(specs_of(tensors), rows)


def test_a_table_with_a_hole_ends_the_join_of_the_replica() -> None:
    store, agreed, tensors = dist.HashStore(), agreement(2), {"w": torch.zeros(5, 2)}
    for rank, (first, count) in enumerate([(0, 2), (3, 2)]):
        tell(Source(tensors, {"w": [(first, count)] * 2}, rank).shards(), store, rank)
    with pytest.raises(SyncError, match=r"no trainer rank sends row 2 of w float32\[5, 2\]"):
        asyncio.run(Receiver.join(Holder(tensors), store, 0, agreed))


def test_a_rank_that_lists_other_tensors_is_named() -> None:
    store, cut = dist.HashStore(), {"a": [(0, 1)] * 2, "b": [(0, 1)] * 2}
    tell(Source({"a": torch.zeros(1), "b": torch.zeros(1)}, cut, 0).shards(), store, 0)
    with pytest.raises(SyncError, match=r"trainer rank 1 has b .* where trainer rank 0 has a "):
        tell(Source({"b": torch.zeros(1), "a": torch.zeros(1)}, cut, 1).shards(), store, 1)
    stray = {0: {"a": (0, 1)}, 1: {"c": (0, 1)}}
    with pytest.raises(SyncError, match="trainer rank 1 sends c, which trainer rank 0 lacks"):
        check_cover([Spec("a", (1,), "float32")], stray)
    assert store.check([f"{PLAN}/0"]) and not store.check([f"{PLAN}/1"])
