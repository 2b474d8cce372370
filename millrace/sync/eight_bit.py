"""Weights in 8 bits: float8_e4m3fn numbers, and a float32 scale for each output channel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from millrace.sync.proof import bit_sums, integers, unfused

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of DTYPE."""
SCALE = "_scale"
"""A weight's name with this is the name of its scales."""
PAIRS = "_pairs"
"""A weight's name with this is the name of its sum of pairs."""
_LEAST = torch.finfo(torch.float32).tiny
"""The smallest scale: a channel of zeros stays zero, and no channel becomes NaN."""


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [..., K] as numbers of DTYPE, and the scale of each row, float32 [..., 1].

    The largest number of a row becomes LARGEST. Numbers are rounded to the nearest, ties to even.
    """
    exact = rows.float()
    largest = exact.new_full((), LARGEST)  # On a GPU, a number would become its rounded inverse.
    scale = (exact.abs().amax(-1, keepdim=True) / largest).clamp_(min=_LEAST)
    return (exact / scale).clamp_(-LARGEST, LARGEST).to(DTYPE), scale


def rounded(rows: Tensor) -> Tensor:
    """Return the values that remain of rows [..., K] in 8 bits, in the dtype of the rows."""
    numbers, scale = quantise(rows)
    return (numbers.float() * scale).to(rows.dtype)


def quantised_names(live: Collection[str], fused: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the names of the weights that an engine with these live tensors keeps in 8 bits.

    live   the names of its tensors; one with a scale is in 8 bits
    fused  the parts of each fused module, as in `proof.not_live`
    """
    found = [name.removesuffix(SCALE) for name in live if name.endswith(f".weight{SCALE}")]
    return frozenset([*found, *(part for name in found for part in unfused(name, fused))])


def in_eight_bits(
    weights: Mapping[str, Tensor],
    names: Collection[str],
    device: torch.device,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the weights, those with one of the `names` in 8 bits on `device`, and their scales.

    `into` is an earlier result, whose memory the tensors in 8 bits take.
    """
    result = dict[str, Tensor]()
    for name, tensor in weights.items():
        result[name] = tensor
        if name in names:
            for key, part in zip((name, name + SCALE), quantise(tensor.to(device)), strict=True):
                result[key] = part if into is None else into[key].copy_(part)
    return result


def pair_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum over the rows of each weight in 8 bits: its numbers' bits times its scale's.

    Scales that change places have the same bit sum, and another one of pairs. As bit sums do, it
    adds up over the parts of a fused weight, and over devices that have rows or columns of it.
    """
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if (scale := tensors.get(name + SCALE)) is not None:
            rows = integers(tensor).sum(-1, dtype=torch.int64)
            found[name + PAIRS] = (rows * integers(scale).flatten()).sum()
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return all sums that prove these tensors live."""
    return bit_sums(tensors) | pair_sums(tensors)
