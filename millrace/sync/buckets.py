"""Tensors packed into flat buckets.

Both sides derive the plan from names, shapes and dtypes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LANES = 32
_WORDS = _LANES * _LANES
ALIGN = 4 * _WORDS
"""Alignment of tensors in bytes: the size of a block of 32 x 32 words.

With whole blocks, a few kernels compute the sums of a whole bucket.
"""
_PACKED = 4 << 20
"""Bytes of small tensors whose checksums are computed together."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype that reads an element's bits, by the element's size in bytes."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The name, shape and dtype of one tensor, equal on both sides."""

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
    """One message of the plan: several tensors, one after the other."""

    specs: tuple[Spec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return typed views into `buffer` (uint8 [num_bytes]), by name."""
        return {
            s.name: buffer[o : o + s.num_bytes].view(getattr(torch, s.dtype)).view(s.shape)
            for s, o in zip(self.specs, self.offsets, strict=True)
        }

    def sums(self, buffer: Tensor, *, bits: bool = False) -> Tensor:
        """Return each tensor's `checksum`, int64 [tensors, 2] on the buffer's device.

        With `bits`, the result is [tensors, 3], and its last column is `proof.bit_sum`. Bytes
        between tensors must be 0.
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
    """Return the specs of live tensors, in their own order."""
    return [
        Spec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]


def plan(specs: list[Spec], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets in order. A tensor larger than a bucket gets its own bucket."""
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
    """Return the sum of a tensor's 32-bit words, and the sum of words times position (from 1).

    The result is int64 [2] on the tensor's device. A flipped bit changes the first sum. Two swapped
    words change the second, because (a - b)(i - j) is not a multiple of 2^64, the modulus of both
    sums.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := data.numel() % ALIGN:
        data = torch.cat([data, data.new_zeros(ALIGN - rest)])
    blocks = _block_sums(data, False)
    number = torch.arange(len(blocks), device=data.device)
    return torch.stack([blocks[:, 0].sum(), (blocks[:, 1] + blocks[:, 0] * number * _WORDS).sum()])


def checksums(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return the `checksum` of each tensor of `names`, int64 [names, 2].

    On a CPU, small tensors are packed first: a copy takes less time than their many operations.
    """
    chosen = {name: tensors[name].detach() for name in names}
    if any(tensor.is_cuda for tensor in chosen.values()):
        return torch.stack([checksum(tensor) for tensor in chosen.values()])
    return torch.cat([_sums_of(bucket, chosen) for bucket in plan(specs_of(chosen), _PACKED)])


def _sums_of(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
    own = [tensors[spec.name] for spec in bucket.specs]
    if len(own) == 1:
        return checksum(own[0])[None]
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    torch._foreach_copy_(list(bucket.views(buffer).values()), own)
    return bucket.sums(buffer)


def _block_sums(data: Tensor, bits: bool) -> Tensor:
    """Return the sums of each block, int64 [blocks, 2 or 3].

    The columns are the sum of 32-bit words, the sum of words times their place in the block (from
    1), and the sum of 16-bit halves. On a CPU, the third column exists only with `bits`.
    """
    if data.is_cuda:
        from millrace.sync import kernels

        return kernels.block_sums(data)
    words = data.view(torch.int32).view(-1, _LANES, _LANES)
    # Word (r, c) has place 32 r + c + 1. Row sums and column sums are enough, so there is no
    # temporary tensor as large as the words.
    lane = torch.arange(_LANES)
    rows, columns = words.sum(2, dtype=torch.int64), words.sum(1, dtype=torch.int64)
    sums = [rows.sum(1), (rows * lane).sum(1) * _LANES + (columns * (lane + 1)).sum(1)]
    if bits:
        sums.append(data.view(torch.int16).view(-1, ALIGN // 2).sum(1, dtype=torch.int64))
    return torch.stack(sums, 1)


@functools.lru_cache(maxsize=1024)
def _blocks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each block of a bucket: the index of its tensor, and its number in that tensor."""
    each = torch.tensor(counts, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), each)
    number = torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]
    return owner.to(device), number.to(device)
