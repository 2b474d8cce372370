"""Where ranks meet: what waits there waits for a rank that loads a model, perhaps from the hub."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from millrace.worker import Worker


@pytest.mark.parametrize("wait_s", [1800.0, 7.5])
def test_ranks_wait_for_each_other_as_long_as_any_wait_may_take(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setenv("MILLRACE_HOST", "127.0.0.1")
    first, other = Worker(), Worker()
    address = asyncio.run(first.listen())
    for worker in (first, other):
        assert worker._meet(address, wait_s).timeout == timedelta(seconds=wait_s)
