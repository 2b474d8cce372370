"""Which samples come next: strict order of admission, or a bounded look ahead of it."""

from __future__ import annotations

from collections.abc import Iterable


def choose(pending: Iterable[tuple[int, bool]], count: int, lookahead: int) -> list[int]:
    """The next `count` ready samples, or [] if they cannot be had yet.

    `pending` are (sample id, ready) of every sample that is admitted and not yet taken, in order of admission. Each pick
    is the first ready one among the ids below `oldest pending + lookahead`; so a sample waits for at most
    `lookahead - 1` younger ones, and 1 is strict order.
    """
    queue = list(pending)
    chosen: list[int] = []
    head = 0  # everything before it is taken
    taken: set[int] = set()
    while len(chosen) < count:
        while head < len(queue) and queue[head][0] in taken:
            head += 1
        if head == len(queue):
            return []
        horizon = queue[head][0] + lookahead
        pick = None
        for sample_id, ready in queue[head:]:
            if sample_id >= horizon:
                break
            if ready and sample_id not in taken:
                pick = sample_id
                break
        if pick is None:
            return []
        taken.add(pick)
        chosen.append(pick)
    return chosen
