"""Sums over weights in one pass at memory speed, for NVIDIA GPUs.

This module is imported at first use, because only torch's CUDA builds include Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 1024
_ELEMENTS = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _block_sums(words, out, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WORDS)
    word = tl.load(words + block * WORDS + place)
    wide = word.to(tl.int64)
    halves = ((word << 16) >> 16).to(tl.int64) + (word >> 16).to(tl.int64)
    tl.store(out + block * 3, tl.sum(wide, 0))
    tl.store(out + block * 3 + 1, tl.sum(wide * (place + 1).to(tl.int64), 0))
    tl.store(out + block * 3 + 2, tl.sum(halves, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _sum(numbers, out, count, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    part = tl.load(numbers + place, mask=place < count, other=0)
    tl.atomic_add(out, tl.sum(part.to(tl.int64), 0))


def block_sums(data: Tensor) -> Tensor:
    """Return the sums of each block, int64 [blocks, 3], from uint8 [blocks x 4096].

    Each block has three sums: of its 32-bit words, of its words times their place (from 1), and of
    its 16-bit halves.
    """
    words = data.view(torch.int32)
    out = torch.empty(words.numel() // _WORDS, 3, dtype=torch.int64, device=data.device)
    if len(out):
        _block_sums[(len(out),)](words, out, _WORDS, num_warps=4)
    return out


def sums(tensors: list[Tensor]) -> Tensor:
    """Return the sum of each tensor's integers modulo 2^64, int64 [tensors]."""
    out = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for i, tensor in enumerate(tensors):
        if count := tensor.numel():
            _sum[(triton.cdiv(count, _ELEMENTS),)](tensor, out[i:], count, _ELEMENTS, num_warps=8)
    return out
