"""A proof that an engine serves the sent weights, even if it fuses, splits or pads them on loading.

The bit sum of a tensor is the sum of the bit sums of its parts, and zeros add nothing. Examples of
parts are q, k and v in one matrix, rows on two devices, and rows of zeros at the end. Bit sums
therefore verify live weights without knowledge of their layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from millrace.errors import SyncError
from millrace.sync.buckets import INTEGERS
from millrace.types import PolicyVersion

_WRAP = 1 << 64


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the elements' bits, read as integers, modulo 2^64. Zeros add nothing.

    The result is an int64 scalar on the tensor's device.
    """
    return integers(tensor).sum(dtype=torch.int64)


def integers(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, contiguous, in the order of the memory if possible.

    A transposed matrix, as kernels for 8 bits need it, would otherwise be copied.
    """
    tensor = tensor.detach()
    if tensor.ndim == 2 and tensor.T.is_contiguous():
        tensor = tensor.T
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the `bit_sum` of each tensor by name, with one copy from the device."""
    return dict(zip(tensors, start_bit_sums(tensors).tolist(), strict=True))


def start_bit_sums(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the `bit_sum` of each tensor, int64 [tensors], on their device.

    On a GPU, this does not wait for the result.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    if next(iter(tensors.values())).is_cuda:
        from millrace.sync import kernels

        return kernels.sums([integers(t) for t in tensors.values()])
    return torch.stack([bit_sum(t) for t in tensors.values()])


def changed(replica: int, version: PolicyVersion, names: Sequence[str]) -> SyncError:
    """Return the error of a replica whose live tensors `names` changed behind its back."""
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return SyncError(
        f"replica {replica}: live weights of version {version} are no longer the trainer's: "
        f"{names[0]}{more} changed after the sync. Tokens that it drew since then carry version "
        f"{version}, but other weights drew them. The replica must not serve"
    )


def not_live(
    sent: Mapping[str, int], live: Sequence[Mapping[str, int]], fused: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the names of live or sent tensors whose bit sums do not agree.

    sent   bit sums of the sent tensors, by name
    live   for each device of a replica, bit sums of the tensors that it serves, by name
    fused  the sent parts of each fused part of a module's name, as in vLLM's
           packed_modules_mapping: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    The result is empty if all sent weights are live. A device may have a part of a tensor, or all
    of it. Each sent tensor exists once in total, or on every device, or on every k-th device.

    Live tensors with unknown names (experts in one block) are verified together on one device. On
    several devices, that is impossible, and their names are returned.
    """
    copies = [k for k in range(1, len(live) + 1) if len(live) % k == 0]
    wrong: list[str] = []
    unknown: list[str] = []
    claimed: set[str] = set()
    for name in live[0]:
        sources = _sources(name, sent, fused)
        if not sources:
            unknown.append(name)
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
    difference = sum(live[0][name] for name in unknown) - sum(sent[name] for name in rest)
    if (unknown and len(live) > 1) or difference % _WRAP:
        wrong += unknown or rest
    return wrong


def _sources(name: str, sent: Mapping[str, int], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the sent tensors that form the live tensor `name`."""
    names = [name] if name in sent else unfused(name, fused)
    return names if all(n in sent for n in names) else []


def unfused(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the tensors that form the tensor `name` of a fused module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in fused:
            return [".".join([*parts[:i], one, *parts[i + 1 :]]) for one in fused[part]]
    return []
