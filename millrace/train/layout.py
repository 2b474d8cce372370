"""The layout of packed rows: which of the packed tokens each cell of a whole row is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.train.ulysses import Share

Ints = NDArray[np.int64]

EXACT_LENGTHS = 12
"""Up to this number of different lengths, each length has its own bucket, without padding."""
FILLED = 7 / 8
"""With more lengths, each row of a bucket has at least this share of the longest row's length."""


@dataclass(slots=True)
class Layout:
    """The map from T packed tokens to the cells of whole rows: C cells, or more with padding.

    Treat a layout as immutable, although the dataclass is not frozen. torch.compile inspects a
    frozen dataclass even if a compiled layer only passes it on. The compiled code would then depend
    on the sizes in it. Other code could then recompute a checkpointed layer than ran its first
    pass.
    """

    lengths: tuple[int, ...]
    """Cells of each row."""
    buckets: tuple[tuple[int, int], ...]
    """(rows, length) of each padded batch, in order; empty for varlen attention."""
    unpack: Tensor | None
    """[cells] int64 token of each cell, row by row, with padding. None if cell i is token i."""
    repack: Tensor | None
    """[T] int64 cell of each token. None if cell i is token i."""
    cu_seqlens: Tensor
    """[rows + 1] int32 on the device: first cell of each row, then C, for varlen attention."""
    share: Share
    """Which of the T tokens this rank reads."""

    @property
    def num_cells(self) -> int:
        """Return C, the number of cells of all rows, without padding."""
        return sum(self.lengths)

    @property
    def num_padded_cells(self) -> int:
        """Return the number of cells in attention's batches, with padding."""
        return sum(rows * length for rows, length in self.buckets) or self.num_cells


def make_layout(
    lengths: Ints, token_of_cell: Ints, share: Share, device: torch.device, *, padded: bool
) -> Layout:
    """Return the layout of rows of `lengths` cells, longest first.

    `token_of_cell` [C] is the token of each cell, row by row. Every token is in at least one cell.
    `padded` selects padded batches. Otherwise, the layout is for varlen attention.
    """
    num_tokens = share.tokens
    unpack = token_of_cell
    buckets: tuple[tuple[int, int], ...] = ()
    if padded:
        buckets, cell = _buckets(lengths)
        unpack = token_of_cell[cell]
    repack = np.empty(num_tokens, dtype=np.int64)
    # In reverse order, the first of several cells of a token is written last and stays. It is never
    # padding, because padding repeats the last cell of its row.
    repack[unpack[::-1]] = np.arange(len(unpack))[::-1]
    plain = len(unpack) == num_tokens and bool((unpack == np.arange(num_tokens)).all())
    return Layout(
        lengths=tuple(lengths.tolist()),
        buckets=buckets,
        unpack=None if plain else torch.from_numpy(unpack).to(device),
        repack=None if plain else torch.from_numpy(repack).to(device),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(
            device
        ),
        share=share,
    )


def _buckets(lengths: Ints) -> tuple[tuple[tuple[int, int], ...], Ints]:
    """Return (rows, length) of each bucket, and for each padded cell its cell without padding."""
    share = 1.0 if len(np.unique(lengths)) <= EXACT_LENGTHS else FILLED
    starts = np.cumsum(lengths) - lengths
    buckets: list[tuple[int, int]] = []
    cells: list[Ints] = []
    first = 0
    while first < len(lengths):
        longest = int(lengths[first])
        # Lengths descend, so the bucket ends before the first row that is too short.
        last = int(np.searchsorted(-lengths, -share * longest, side="right"))
        column = np.minimum(np.arange(longest), lengths[first:last, None] - 1)
        cells.append((starts[first:last, None] + column).ravel())
        buckets.append((last - first, longest))
        first = last
    return tuple(buckets), np.concatenate(cells)
