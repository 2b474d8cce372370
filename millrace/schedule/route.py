"""Which replica serves a request: its home, where its prefix is in the KV cache, else the least loaded."""

from __future__ import annotations

from collections.abc import Sequence


def route(home: int | None, loads: Sequence[int], slack: int = 8) -> int:
    """Index of the replica for a request.

    `loads` are the running requests of each replica; `home` is the replica that served the same session last, or a sibling of
    the same sample. A request stays at home unless home has `slack` requests more than the least loaded replica. Ties go to the
    lowest index.
    """
    if not loads:
        raise ValueError("no replica to route to")
    least = min(range(len(loads)), key=loads.__getitem__)
    return home if home is not None and loads[home] - loads[least] < slack else least
