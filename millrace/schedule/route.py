"""Which replica serves a request: the one that its session used last, else the least loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def route(session: str, loads: Sequence[int], homes: Mapping[str, int], slack: int = 8) -> int:
    """Index of the replica for `session`.

    `loads` are the running requests of each replica, `homes` the replica that each session used last. A session stays
    at home, where its KV cache is, unless home has `slack` requests more than the least loaded replica. Ties go to the
    lowest index.
    """
    if not loads:
        raise ValueError("no replica to route to")
    least = min(range(len(loads)), key=loads.__getitem__)
    home = homes.get(session)
    if home is not None and loads[home] - loads[least] < slack:
        return home
    return least
