"""Tensors packed into flat buckets, by a plan that both sides derive from names, shapes and dtypes alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LANES = 32
_WORDS = _LANES * _LANES
ALIGN = 4 * _WORDS
"""Bytes: every tensor begins with a block of 32 x 32 words, so that the sums of a whole bucket are a few kernels."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: what its bits are read as."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor as both sides must know it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of the plan, one after the other in one message."""

    specs: tuple[Spec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Typed views into `buffer` (uint8 [num_bytes]), by name."""
        return {
            s.name: buffer[o : o + s.num_bytes].view(getattr(torch, s.dtype)).view(s.shape)
            for s, o in zip(self.specs, self.offsets, strict=True)
        }

    def sums(self, buffer: Tensor, *, bits: bool = False) -> Tensor:
        """int64 [tensors, 2] on the buffer's device: each tensor's `checksum`; with `bits` [tensors, 3], its `proof.bit_sum` last.

        Bytes between tensors must be 0.
        """
        owner, number = _blocks(self._counts, buffer.device)
        sums = torch.zeros(len(self.specs), 2 + bits, dtype=torch.int64, device=buffer.device)
        if not len(owner):
            return sums
        blocks = _block_sums(buffer, bits)
        blocks[:, 1] += blocks[:, 0] * number * _WORDS
        sums.index_add_(0, owner, blocks[:, : 2 + bits])
        if bits:
            sizes = [getattr(torch, s.dtype).itemsize for s in self.specs]
            for k, size in enumerate(sizes):
                if size == 4:
                    sums[k, 2] = sums[k, 0]
                elif size != 2:
                    own = buffer[self.offsets[k] : self.offsets[k] + self.specs[k].num_bytes]
                    sums[k, 2] = own.view(INTEGERS[size]).sum(dtype=torch.int64)
        return sums

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(-(-s.num_bytes // ALIGN) for s in self.specs)


def specs_of(tensors: Mapping[str, Tensor]) -> list[Spec]:
    """The specs of live tensors, in their own order."""
    return [
        Spec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]


def rows_of(spec: Spec, part: int, parts: int) -> slice:
    """The rows that rank `part` of `parts` holds, as FSDP2 deals them out: as many on each as on the first, until they end."""
    rows = spec.shape[0]
    each = -(-rows // parts)
    return slice(min(part * each, rows), min((part + 1) * each, rows))


def part_of(specs: list[Spec], part: int, parts: int) -> list[Spec]:
    """What rank `part` of `parts` sends."""
    if parts == 1:
        return specs
    cut = ((s, rows_of(s, part, parts)) for s in specs)
    return [Spec(s.name, (rows.stop - rows.start, *s.shape[1:]), s.dtype) for s, rows in cut]


def plan(specs: list[Spec], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets in order; a tensor larger than a bucket gets one of its own."""
    buckets: list[Bucket] = []
    chosen: list[Spec] = []
    offsets: list[int] = []
    used = 0
    for spec in specs:
        if chosen and used + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(chosen), tuple(offsets), used))
            chosen, offsets, used = [], [], 0
        chosen.append(spec)
        offsets.append(used)
        used += -(-spec.num_bytes // ALIGN) * ALIGN
    return [*buckets, Bucket(tuple(chosen), tuple(offsets), used)] if chosen else buckets


def checksum(tensor: Tensor) -> Tensor:
    """int64 [2] on the tensor's device: the sum of its bits as 32-bit words, and their position-weighted sum (from 1).

    A flipped bit changes the first. Two words swapped change the second: (a - b)(i - j) is no multiple of 2^64, modulo which
    both are taken.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := data.numel() % ALIGN:
        data = torch.cat([data, data.new_zeros(ALIGN - rest)])
    blocks = _block_sums(data, False)
    number = torch.arange(len(blocks), device=data.device)
    return torch.stack([blocks[:, 0].sum(), (blocks[:, 1] + blocks[:, 0] * number * _WORDS).sum()])


def _block_sums(data: Tensor, bits: bool) -> Tensor:
    """int64 [blocks, 2 or 3]: each block's sum of words, of words times their place in it (from 1), with `bits` of 16-bit halves."""
    if data.is_cuda:
        from millrace.sync import kernels

        return kernels.block_sums(data)
    words = data.view(torch.int32).view(-1, _LANES, _LANES)
    # Word r, c has place 32 r + c + 1: sums along r and along c are all it takes, and nothing of the words' size is written.
    lane = torch.arange(_LANES)
    rows, columns = words.sum(2, dtype=torch.int64), words.sum(1, dtype=torch.int64)
    found = [rows.sum(1), (rows * lane).sum(1) * _LANES + (columns * (lane + 1)).sum(1)]
    if bits:
        found.append(data.view(torch.int16).view(-1, ALIGN // 2).sum(1, dtype=torch.int64))
    return torch.stack(found, 1)


@functools.lru_cache(maxsize=1024)
def _blocks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block of a bucket: the index of its tensor, and its number in that tensor."""
    each = torch.tensor(counts, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), each)
    number = torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]
    return owner.to(device), number.to(device)
