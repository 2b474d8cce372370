"""The replica's end of a sync with vLLM, over a real store: who is late, and who stands still."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore

from millrace.config import Config
from millrace.errors import ReplicaLost, SyncError
from millrace.ports import RolloutStats
from millrace.run.engines import sync_options
from millrace.serving import receiver
from millrace.serving.receiver import EngineReceiver


class Engine:
    """Workers that report after `report_s`, and answer a probe after `probe_s`."""

    name = "vLLM"

    def __init__(self, store: TCPStore, report_s: float | None, probe_s: float) -> None:
        self._store, self._report_s, self._probe_s = store, report_s, probe_s

    async def stats(self) -> RolloutStats:
        return RolloutStats(tokens=5)

    def check_alive(self) -> None: ...

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        if method == "check_health":
            await asyncio.sleep(self._probe_s)
        elif self._report_s is not None:
            report = json.dumps({"bytes": 1, "version": 1})
            key = f"millrace/sync/staged/0/0/{args[-1]}"
            asyncio.get_running_loop().call_later(self._report_s, self._store.set, key, report)
        return []


def made(
    patch: pytest.MonkeyPatch, *, timeout_s: float, report_s: float | None, probe_s: float
) -> EngineReceiver:
    patch.setattr(receiver, "_PROBE_S", 0.2)
    patch.setattr(receiver, "_POLL_S", 0.1)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agreed = replace(sync_options(Config()), timeout_s=timeout_s, stall_s=1.5)
    return EngineReceiver(cast("Any", Engine(store, report_s, probe_s)), store, 0, agreed)


def test_workers_that_do_not_answer_a_probe_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    end = made(monkeypatch, timeout_s=8, report_s=None, probe_s=60)
    with pytest.raises(ReplicaLost, match=r"did not answer check_health within 1\.5 s"):
        asyncio.run(asyncio.wait_for(end.transfer(1), 5))


def test_a_report_that_comes_during_a_probe_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step of the workers takes long. The transfer is complete."""
    end = made(monkeypatch, timeout_s=8, report_s=0.5, probe_s=60)
    assert asyncio.run(end.transfer(1)).bytes == 1


def test_a_probe_does_not_move_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    end = made(monkeypatch, timeout_s=1, report_s=None, probe_s=60)
    with pytest.raises(SyncError, match="received no weights within 1 s"):
        asyncio.run(end.transfer(1))


async def test_a_cancelled_transfer_does_not_block_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next group of the sync needs the store at once."""
    end = made(monkeypatch, timeout_s=3, report_s=None, probe_s=0)

    transfer = asyncio.create_task(end.transfer(1))
    await asyncio.sleep(0.5)
    transfer.cancel()
    await asyncio.wait([transfer])
    start = time.monotonic()
    end._store.delete_key("x")
    assert time.monotonic() - start < 1
