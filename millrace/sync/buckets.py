"""Tensors packed into flat buckets, by a plan that both sides derive from names, shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 16  # bytes: every dtype can be viewed at every tensor's offset
_CHUNK = 1 << 22


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


def specs_of(tensors: Mapping[str, Tensor]) -> list[Spec]:
    """The specs of live tensors, in their own order."""
    return [Spec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]


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
    """int64 [2] on the tensor's device: the sum of its bits as 32-bit words, and their position-weighted sum.

    A flipped bit changes the first. Two words swapped change the second: (a - b)(i - j) is no multiple of 2^64, modulo which
    both are taken.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := data.numel() % 4:
        data = torch.cat([data, data.new_zeros(4 - rest)])
    words = data.view(torch.int32)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=words.device).add_(1)
        total[0] += chunk.sum()
        total[1] += chunk.mul_(weights).sum()
    return total
