"""One replica's end of the weight sync, where the engine is vLLM: its workers receive, this process tells them when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from millrace.errors import SyncError
from millrace.ports import TransferReport
from millrace.sync.agreement import Agreement
from millrace.sync.proof import not_live
from millrace.types import PolicyVersion

_LOOK_S = 1.0  # seconds between two looks at whether the engine lives


class VllmHolder(Protocol):
    """The engine as this receiver sees it."""

    async def join_sync(self, init_info: dict[str, Any]) -> None:
        """vLLM's init_weight_transfer_engine, on every worker."""
        ...

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """The method's result on every worker."""
        ...

    def check_alive(self) -> None:
        """Raises WorkerError if the engine has died."""
        ...

    async def swap(self, version: PolicyVersion, prove: Callable[[Sequence[Any]], None]) -> float:
        """Make the staged `version` live between two tokens; `prove` sees what workers say of it before the next one."""
        ...


class VllmReceiver:
    """The replica's end."""

    def __init__(self, engine: VllmHolder, store: Any, replica: int, agreed: Agreement) -> None:
        self._engine = engine
        self._store = store
        self._replica = replica
        self._shards = agreed.devices
        self._timeout_s = agreed.timeout_s
        self._turn = 0
        self._version: PolicyVersion | None = None

    @classmethod
    async def join(
        cls,
        engine: VllmHolder,
        store: Any,
        address: tuple[str, int],
        replica: int,
        tree: dict[str, Any],
        agreed: Agreement,
    ) -> VllmReceiver:
        """Meet every trainer rank that sends, from each of vLLM's workers."""
        host, port = address
        await engine.join_sync({"host": host, "port": port, "replica": replica, "config": tree})
        return cls(engine, store, replica, agreed)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Receive `version` beside the live weights: the engine goes on decoding."""
        self._version = None
        report = await self._on_workers("stage_weights", version)
        self._version = version
        return report

    async def link(self) -> TransferReport:
        """Receive as many bytes as a transfer has, and nothing else."""
        self._version = None
        return await self._on_workers("measure_link")

    async def _on_workers(self, method: str, *args: Any) -> TransferReport:
        """Start it in a thread of every worker, and wait for their reports."""
        start = time.perf_counter()
        self._turn += 1
        await self._engine.call_workers(method, *args, self._turn)
        keys = [
            f"millrace/sync/staged/{self._replica}/{shard}/{self._turn}"
            for shard in range(self._shards)
        ]
        reports = [await self._report(key) for key in keys]
        if errors := [r["error"] for r in reports if "error" in r]:
            raise SyncError(errors[0])
        for key in keys:
            self._store.delete_key(key)
        return TransferReport(reports[0]["bytes"], time.perf_counter() - start)

    async def _report(self, key: str) -> dict[str, Any]:
        """What a worker's thread says under `key`. Raises SyncError at the deadline, WorkerError if vLLM dies meanwhile."""
        waiting = asyncio.ensure_future(
            asyncio.to_thread(self._store.wait, [key], timedelta(seconds=self._timeout_s))
        )
        while not waiting.done():
            await asyncio.wait([waiting], timeout=_LOOK_S)
            self._engine.check_alive()
        if waiting.exception():
            raise SyncError(
                f"replica {self._replica}: vLLM's workers received no weights within {self._timeout_s:g} s"
            )
        report: dict[str, Any] = json.loads(self._store.get(key))
        return report

    async def activate(self, version: PolicyVersion) -> float:
        """Serve the staged version from the next token on. Returns the seconds in which nothing was decoded."""
        if self._version != version:
            raise SyncError(
                f"replica {self._replica} is told to serve version {version}, but holds {self._version}"
            )
        return await self._engine.swap(version, self._prove)

    def _prove(self, workers: Sequence[Any]) -> None:
        """Raise SyncError unless what every worker serves is what was staged."""
        sent, _, fused = workers[0]
        if wrong := not_live(sent, [live for _, live, _ in workers], fused):
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise SyncError(
                f"replica {self._replica}: live weights of version {self._version} are not the trainer's: {wrong[0]}{more} differ "
                "from what was staged; it must not serve them"
            )
