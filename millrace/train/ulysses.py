"""Sequence parallelism: ranks share the tokens of a micro-batch, and exchange them for heads.

Outside of attention, a rank has some tokens with all heads. In attention, it has all tokens with
some heads, so attention sees whole rows. Both train engines use this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Division:
    """The ranks that share the tokens of every micro-batch."""

    group: dist.ProcessGroup | None = None
    """None: this rank has all tokens."""
    multiple: int = 1
    """Divides the tokens of a micro-batch, after padding."""

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def share(self, tokens: int) -> Share:
        """Return this rank's share of a micro-batch."""
        each = math.lcm(self.ranks, self.multiple)
        own = -(-tokens // each) * each // self.ranks
        return Share(tokens, own, 0 if self.group is None else self.group.rank(), self.group)


@dataclass(slots=True)
class Share:
    """This rank's tokens of a micro-batch. All ranks have equally many, and the last ones padding.

    It is part of a Layout, which says why it is not frozen.
    """

    tokens: int
    """Tokens of the micro-batch, without padding."""
    own: int
    """Tokens of each rank, with padding."""
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def first(self) -> int:
        """This rank's first token in the micro-batch."""
        return self.rank * self.own

    @property
    def padding(self) -> int:
        """The tokens of padding of all ranks."""
        return self.ranks * self.own - self.tokens

    def part(self, values: Tensor) -> Tensor:
        """Return this rank's part [own, ...] of values [tokens, ...]. Padding is 0."""
        found = values[self.first :][: self.own]
        missing = self.own - len(found)
        return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found

    def padded(self, device: torch.device) -> Tensor:
        """Return [own] bool: whether a token of this rank is padding."""
        return torch.arange(self.first, self.first + self.own, device=device) >= self.tokens

    def whole(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of this rank's heads, without padding, from own tokens of all heads.

        All are [tokens, heads, size]. If the ranks do not divide the heads of keys, each of those
        is repeated as often as needed.
        """
        if self.group is not None:
            repeats = math.lcm(k.shape[1], self.ranks) // k.shape[1]
            if repeats > 1:
                k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            # [rank, own tokens, heads of that rank x size]
            parts = [x.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(2) for x in (q, k, v)]
            found = _exchanged(torch.cat(parts, 2), self.group).flatten(0, 1)
            widths = [part.shape[2] for part in parts]
            q, k, v = (
                rows.unflatten(1, (-1, x.shape[2]))
                for rows, x in zip(found.split(widths, 1), (q, k, v), strict=True)
            )
        return q[: self.tokens], k[: self.tokens], v[: self.tokens]

    def all_heads(self, out: Tensor) -> Tensor:
        """Return own tokens of all heads, from all tokens of this rank's heads. Undoes `whole`."""
        if self.padding:
            out = F.pad(out, (0, 0, 0, 0, 0, self.padding))
        if self.group is None:
            return out
        found = _exchanged(out.unflatten(0, (self.ranks, -1)), self.group)
        # [rank, own tokens, heads of that rank, size] -> [own tokens, heads, size]
        return found.transpose(0, 1).flatten(1, 2)

    def selected(self, select: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return those of the positions `select` that are this rank's, and their places in it.

        The positions are those among own tokens. Without a group, the places are None: all.
        """
        if self.group is None:
            return select, None
        (mine,) = torch.nonzero(select // self.own == self.rank, as_tuple=True)
        return select[mine] - self.first, mine

    def added(self, counts: Tensor) -> Tensor:
        """Add up counts over the ranks that share the tokens, in place."""
        if self.group is not None and counts.numel():
            dist.all_reduce(counts, group=self.group)
        return counts

    def joined(
        self, outputs: Sequence[Tensor], mine: Tensor | None, count: int
    ) -> tuple[Tensor, ...]:
        """Return the outputs [count] of all ranks' tokens, from those at the places `mine`."""
        if self.group is None:
            return tuple(outputs)
        found: tuple[Tensor, ...] = _Joined.apply(mine, count, self.group, *outputs)  # type: ignore[no-untyped-call]
        return found


class _Exchange(torch.autograd.Function):
    """Send part i to rank i. The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, parts.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    found: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return found


class _Joined(torch.autograd.Function):
    """Outputs of all tokens, from each rank's own. The gradient is that of the own ones.

    So the gradients of all ranks add up to the whole one, if each has the same loss.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, count: int, group: Any, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mine)
        ctx.set_materialize_grads(False)
        joined = own[0].new_zeros(len(own), count)
        joined[:, mine] = torch.stack(own)
        dist.all_reduce(joined, group=group)
        return tuple(row.clone() for row in joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return None, None, None, *(None if g is None else g[mine] for g in grads)
