"""RUN/accounts.jsonl: where every token and every second of every device went.

Each attempt has a line for its start, one for each version and one for its end. Tokens are those
of the surviving history. All other figures are those of the attempt.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from millrace.persist.history import Count, Version

FILE = "accounts.jsonl"


Seconds = Annotated[float, msgspec.Meta(ge=-1e-3)]
"""Seconds, which rounding may put just below zero. A line with fewer is damaged."""


class Device(msgspec.Struct, frozen=True):
    """The devices of one track."""

    count: Count
    seconds: dict[str, Seconds]
    """Seconds of one of the devices, by state. They add up to the line's `seconds`."""


class Work(msgspec.Struct, frozen=True):
    """Calls, their seconds and their tokens."""

    count: Count = 0
    seconds: Seconds = 0.0
    tokens: Count = 0
    busy: Seconds = 0.0
    """Seconds with at least one call. Only the rewards have it."""


class Line(msgspec.Struct, frozen=True):
    """The accounts at one moment."""

    event: str
    """One of start, version and end."""
    attempt: Count
    version: Version
    time: float
    """Unix time."""
    seconds: Seconds
    """Seconds of this attempt so far."""
    generated: Count
    """Tokens drawn. `tokens` adds up to it."""
    tokens: dict[str, Count]
    """Tokens by bucket (report/accounts.py)."""
    prefill: Count = 0
    """Tokens that this attempt has read into KV caches."""
    devices: dict[str, Device] = {}
    slots: dict[str, Seconds] = {}
    """Sample-seconds by the sample's state."""
    samples: dict[str, Count] = {}
    """Samples that are in each state now."""
    retired: Count = 0
    """Samples that this attempt has trained to a live version."""
    requests: Work = Work()
    scores: Work = Work()
    loads: dict[str, tuple[float, float]] = {}
    """Of each bin of the load: seconds, and the integral of the load (report/accounts.py)."""
    price: float = 0.0
    """Money that one device costs per hour."""
    limit: Count | None = None
    """Samples that the whole run trains."""
    share_cores: bool = False
    """Whether the devices are processes on the cores of one CPU."""


DECODER = msgspec.json.Decoder(Line)  # made now, for threads: see waits/ask.py
