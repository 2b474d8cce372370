"""Sums over weights in one pass at memory speed, for NVIDIA GPUs.

This module is imported at first use, because only torch's CUDA builds include Triton.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 1024
_ELEMENTS = 4096
_PROGRAMS = 128
"""Programs that share a tensor."""
_KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


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
def _sums(table, out, KIND: tl.constexpr, ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = table + tl.program_id(1) * 3
    count, numbers = tl.load(row + 1), tl.load(row).to(tl.pointer_type(KIND))
    if ALIGNED:
        numbers = tl.multiple_of(numbers, 16)
    place, share = tl.arange(0, ELEMENTS), tl.zeros((ELEMENTS,), tl.int64)
    # Whole blocks need no mask. With one, each number would be a load of its own.
    for block in range(tl.program_id(0), count // ELEMENTS, tl.num_programs(0)):
        share += tl.load(numbers + tl.cast(block, tl.int64) * ELEMENTS + place).to(tl.int64)
    if tl.program_id(0) == 0:
        rest = count // ELEMENTS * ELEMENTS + place
        share += tl.load(numbers + rest, mask=rest < count, other=0).to(tl.int64)
    tl.atomic_add(out + tl.load(row + 2), tl.sum(share, 0))


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
    """Return the sum of each tensor's integers modulo 2^64, int64 [tensors].

    The tensors are contiguous and on one GPU. One launch reads all tensors of an element size and
    of an alignment. Raises ValueError for a tensor that is elsewhere.
    """
    device = tensors[0].device
    launches: dict[tuple[int, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if tensor.device != device:  # The kernel would read the address of another memory.
            raise ValueError(f"tensor {i} is on {tensor.device}, and the first one on {device}")
        start = tensor.data_ptr()
        if count := tensor.numel():
            launches[tensor.element_size(), start % 16 == 0].append((start, count, i))
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    # A copy to the GPU waits for the kernels before it, so all copies come first.
    tables = {
        kind: torch.tensor(rows, dtype=torch.int64, device=device)
        for kind, rows in launches.items()
    }
    for (size, aligned), table in tables.items():
        _sums[(_PROGRAMS, len(table))](table, out, _KINDS[size], _ELEMENTS, aligned, num_warps=8)
    return out
