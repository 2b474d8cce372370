"""Choice of the replica for a request.

A request prefers its home replica, whose KV cache has its prefix, to the least loaded one.
"""

from __future__ import annotations

from collections.abc import Sequence


def route(home: int | None, loads: Sequence[int], slack: int = 8) -> int:
    """Return the index of the replica for a request.

    `loads` has the number of running requests of each replica. `home` is the replica that last
    served the same session or a sibling of the same sample. A request stays at home unless home has
    `slack` requests more than the least loaded replica. Ties go to the lowest index.
    """
    if not loads:
        raise ValueError("no replica to route to")
    least = min(loads)
    return home if home is not None and loads[home] - least < slack else loads.index(least)
