"""The order of training: strict order of admission, or a bounded look ahead of it.

Let `u` be the oldest admitted sample that is not finished. A finished sample with id `i` may be
trained once `i < u + lookahead`. The samples with the smallest ids come first. So a sample waits
for at most `lookahead - 1` younger ones, and a lookahead of 1 is strict order of admission.

A resumed run can have a plan: the order in which an earlier attempt trained. It comes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice


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
        self._plan: deque[int] = deque()
        """The samples to train before all others, in this order."""
        self._planned: set[int] = set()
        self._done: set[int] = set()
        """Planned samples that are finished."""
        self._led = 0
        """How many of the first samples of the plan are finished."""

    def __len__(self) -> int:
        """The number of samples that may be trained now."""
        return self._led + (len(self._open) if self._led == len(self._plan) else 0)

    def follow(self, plan: Iterable[int]) -> None:
        """Train these samples first, in this order. An empty plan ends the one before."""
        finished = [*self._done, *self._open, *self._early]
        self._plan = deque(plan)
        self._planned = set(self._plan)
        self._done = self._planned.intersection(finished)
        self._open, self._early = [], [i for i in finished if i not in self._planned]
        heapify(self._early)
        self._led = 0
        self._advance()

    def admit(self, sample_id: int) -> None:
        """Add an unfinished sample. Ids must come in ascending order."""
        self._unfinished[sample_id] = None

    def finish(self, sample_id: int) -> None:
        """Mark a sample as finished."""
        if sample_id in self._planned:
            self._done.add(sample_id)
        else:
            heappush(self._early, sample_id)
        del self._unfinished[sample_id]
        self._advance()

    def drop(self, sample_id: int) -> None:
        """Remove a sample, finished or not. Removing a finished one costs O(n) and is rare."""
        if sample_id in self._planned:
            self.follow(i for i in [*self._plan] if i != sample_id)
        if sample_id in self._unfinished:
            del self._unfinished[sample_id]
            self._advance()
            return
        heap = self._open if sample_id in self._open else self._early
        heap.remove(sample_id)
        heapify(heap)

    def first(self, count: int) -> list[int]:
        """Return the first `count` samples that may be trained, in order, without taking them."""
        planned = [*islice(self._plan, min(count, self._led))]
        return planned + nsmallest(count - len(planned), self._open)

    def take(self, count: int) -> list[int]:
        """Remove and return the first `count` samples that may be trained, in order."""
        planned = [self._plan.popleft() for _ in range(min(count, self._led))]
        self._led -= len(planned)
        self._done.difference_update(planned)
        self._planned.difference_update(planned)
        return planned + [heappop(self._open) for _ in range(count - len(planned))]

    def _advance(self) -> None:
        while self._led < len(self._plan) and self._plan[self._led] in self._done:
            self._led += 1
        oldest = next(iter(self._unfinished), math.inf)
        while self._early and self._early[0] < oldest + self._lookahead:
            heappush(self._open, heappop(self._early))
