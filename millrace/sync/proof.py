"""Proves that an engine serves the weights that were sent, where it fused, split or padded them.

Sums of bits are the same for a tensor whole and in parts: q, k and v in one matrix, rows on two devices, rows of zeros at the
end. So what is live is proven by sums, without knowing how it was laid out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from millrace.sync.buckets import INTEGERS

_WRAP = 1 << 64


def bit_sum(tensor: Tensor) -> Tensor:
    """int64 scalar on the tensor's device: the sum of its elements' bits, read as integers, modulo 2^64. Zeros add nothing."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`bit_sum` of each, by name, with one copy from the device."""
    if not tensors:
        return {}
    if next(iter(tensors.values())).is_cuda:
        from millrace.sync import kernels

        numbers = [
            t.detach().contiguous().view(INTEGERS[t.element_size()]) for t in tensors.values()
        ]
        values: list[int] = kernels.sums(numbers).tolist()
    else:
        values = torch.stack([bit_sum(t) for t in tensors.values()]).tolist()
    return dict(zip(tensors, values, strict=True))


def not_live(
    sent: Mapping[str, int], live: Sequence[Mapping[str, int]], fused: Mapping[str, Sequence[str]]
) -> list[str]:
    """Names of live tensors, or of sent ones, that do not agree; empty if all of what was sent is what is served.

    `sent`: bit sums of what was sent. `live`: those of what each device of a replica serves. `fused`: parts of a module's name
    that stand for several sent ones, as vLLM's packed_modules_mapping: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}. A device
    may hold a part of a tensor, or all of it: each sent tensor is there once, on every device, or on every k-th.

    Tensors under names of their own (experts in one block) are proven together on one device; on several they cannot be, and
    are returned.
    """
    copies = [k for k in range(1, len(live) + 1) if len(live) % k == 0]
    wrong: list[str] = []
    strange: list[str] = []
    claimed: set[str] = set()
    for name in live[0]:
        sources = _sources(name, sent, fused)
        if not sources:
            strange.append(name)
            continue
        claimed.update(sources)
        served = sum(device[name] for device in live)
        ways = itertools.product(copies, repeat=len(sources))
        if not any(
            (served - sum(k * sent[s] for k, s in zip(way, sources, strict=True))) % _WRAP == 0
            for way in ways
        ):
            wrong.append(name)
    rest = [name for name in sent if name not in claimed]
    together = sum(live[0][name] for name in strange) - sum(sent[name] for name in rest)
    if (strange and len(live) > 1) or together % _WRAP:
        wrong += strange or rest
    return wrong


def _sources(name: str, sent: Mapping[str, int], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The sent tensors that a live one is made of."""
    if name in sent:
        return [name]
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in fused:
            names = [".".join([*parts[:i], one, *parts[i + 1 :]]) for one in fused[part]]
            return names if all(n in sent for n in names) else []
    return []
