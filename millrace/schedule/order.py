"""The order of training: strict order of admission, or a bounded look ahead of it.

Let `u` be the oldest admitted sample that is not finished. A finished sample with id `i` may be
trained once `i < u + lookahead`. The samples with the smallest ids come first. So a sample waits
for at most `lookahead - 1` younger ones, and a lookahead of 1 is strict order of admission.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from heapq import heapify, heappop, heappush, nsmallest


class TrainingOrder:
    """The samples that are not taken yet, by id. Each operation costs O(log n), amortised."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        # A plain dict finds its first key in O(n) after many deletions. OrderedDict is a linked
        # list.
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        self._open: list[int] = []
        """Heap of finished samples that may be trained now."""
        self._early: list[int] = []
        """Heap of finished samples that are still too far ahead of `u`."""

    def __len__(self) -> int:
        """The number of samples that may be trained now."""
        return len(self._open)

    def admit(self, sample_id: int) -> None:
        """Add an unfinished sample. Ids must come in ascending order."""
        self._unfinished[sample_id] = None

    def finish(self, sample_id: int) -> None:
        """Mark a sample as finished."""
        heappush(self._early, sample_id)
        self._leave(sample_id)

    def drop(self, sample_id: int) -> None:
        """Remove a sample, finished or not. Removing a finished one costs O(n) and is rare."""
        if sample_id in self._unfinished:
            self._leave(sample_id)
            return
        heap = self._open if sample_id in self._open else self._early
        heap.remove(sample_id)
        heapify(heap)

    def first(self, count: int) -> list[int]:
        """Return the first `count` samples that may be trained, in order, without taking them."""
        return nsmallest(count, self._open)

    def take(self, count: int) -> list[int]:
        """Remove and return the first `count` samples that may be trained, in order."""
        return [heappop(self._open) for _ in range(count)]

    def _leave(self, sample_id: int) -> None:
        del self._unfinished[sample_id]
        oldest = next(iter(self._unfinished), math.inf)
        while self._early and self._early[0] < oldest + self._lookahead:
            heappush(self._open, heappop(self._early))
