"""One replica's end of the weight sync with a serving engine, whose workers receive the weights.

This process starts each transfer and waits for the workers' reports.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

from millrace.errors import BrokenTransfer, ReplicaLost, SyncError
from millrace.ports import RolloutStats, TransferReport
from millrace.sync.options import SyncOptions
from millrace.sync.proof import not_live
from millrace.types import PolicyVersion

_POLL_S = 1.0
"""Seconds between two checks that the engine is alive."""
_PROBE_S = 5.0
"""Seconds without a report, after which the workers are asked for a sign of life."""
_FIRST_S = 180.0
"""How long workers may owe an answer before the first token: kernels may be compiled meanwhile."""


class Engine(Protocol):
    """The engine as this receiver sees it."""

    name: str

    async def join_sync(self, init_info: dict[str, Any]) -> None:
        """Connect every worker with the trainer's ranks."""
        ...

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker and return the results."""
        ...

    def check_alive(self) -> None:
        """Raise ReplicaLost if the engine has died."""
        ...

    async def stats(self) -> RolloutStats:
        """Return the totals of the engine."""
        ...

    async def swap(self, version: PolicyVersion, prove: Callable[[Sequence[Any]], None]) -> float:
        """Make the staged `version` live between two tokens.

        `prove` checks the workers' reports on the live weights before the next token.
        """
        ...


class EngineReceiver:
    """The replica's end of the weight sync."""

    def __init__(self, engine: Engine, store: Any, replica: int, agreed: SyncOptions) -> None:
        self._engine = engine
        self._store = store
        self._init = {"replica": replica, "agreed": asdict(agreed)}
        self._replica = replica
        self._shards = agreed.devices
        self._timeout_s = agreed.timeout_s
        self._stall_s = agreed.stall_s
        self._turn = 0
        self._version: PolicyVersion | None = None

    @classmethod
    async def join(
        cls,
        engine: Engine,
        store: Any,
        address: tuple[str, int],
        replica: int,
        agreed: SyncOptions,
    ) -> EngineReceiver:
        """Prepare each of the engine's workers to receive. `regroup` joins the trainer ranks."""
        made = cls(engine, store, replica, agreed)
        await made.meet(store, agreed, address)
        return made

    async def meet(self, store: Any, agreed: SyncOptions, address: tuple[str, int]) -> None:
        """Leave the ranks of a lost trainer, if any, and prepare to join those at `address`."""
        host, port = address
        self._store = store
        await self._engine.join_sync({"host": host, "port": port, **self._init})

    async def regroup(self, generation: int, members: list[int]) -> PolicyVersion | None:
        """Leave the old groups, and join those of `generation` with the replicas `members`.

        A transfer under way breaks off. Return the staged version, which stays.
        """
        reports = await self._on_workers("regroup_weights", generation, members)
        staged = {report["version"] for report in reports}
        self._version = staged.pop() if len(staged) == 1 else None
        return self._version

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Receive `version` into staging memory. The engine continues to decode."""
        self._version = None
        start = time.perf_counter()
        reports = await self._on_workers("stage_weights", version)
        self._version = version
        return TransferReport(reports[0]["bytes"], time.perf_counter() - start)

    async def link(self) -> TransferReport:
        """Receive as many bytes as a transfer has, and nothing else."""
        self._version = None
        start = time.perf_counter()
        reports = await self._on_workers("measure_link")
        return TransferReport(reports[0]["bytes"], time.perf_counter() - start)

    async def _on_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Start `method` in a thread of every worker, and return the reports."""
        self._turn += 1
        keys = [
            f"millrace/sync/staged/{self._replica}/{shard}/{self._turn}"
            for shard in range(self._shards)
        ]
        for key in keys:  # of a replica that died with this index
            self._store.delete_key(key)
        await self._ask(method, *args, self._turn)
        reports = [await self._report(key) for key in keys]
        for report in reports:
            if "error" in report:
                raise (BrokenTransfer if report["broken"] else SyncError)(report["error"])
        for key in keys:
            self._store.delete_key(key)
        return reports

    async def _ask(self, method: str, *args: Any) -> None:
        """Call a method that needs no time. Raise ReplicaLost if a worker does not answer.

        It may be stopped, or its GPU may hang. An engine without requests owes no token, so nobody
        else would see that.
        """
        drew = (await self._engine.stats()).tokens
        limit_s = self._stall_s if drew else max(self._stall_s, _FIRST_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._engine.call_workers(method, *args)
        except TimeoutError:
            raise ReplicaLost(
                f"{self._engine.name} stood still: its workers did not answer {method} within "
                f"{limit_s:g} s (rollout.stall_s)"
            ) from None

    async def _report(self, key: str) -> dict[str, Any]:
        """Return the report that a worker's thread stores under `key`.

        Raise SyncError at the deadline, and ReplicaLost if the engine dies or stands still first.
        """
        # A client answers one call at a time. If this wait is cancelled, the next call must not wait.
        wait, limit = self._store.clone().wait, timedelta(seconds=self._timeout_s)
        waiting = asyncio.ensure_future(asyncio.to_thread(wait, [key], limit))
        asked = time.monotonic()
        while not (await asyncio.wait([waiting], timeout=_POLL_S))[0]:
            self._engine.check_alive()
            if time.monotonic() - asked > _PROBE_S:
                probe = asyncio.ensure_future(self._ask("check_health"))
                try:
                    await asyncio.wait([waiting, probe], return_when=asyncio.FIRST_COMPLETED)
                    if not waiting.done():  # a report says more than a probe
                        probe.result()
                finally:
                    probe.cancel()
                asked = time.monotonic()
        if waiting.exception():
            raise SyncError(
                f"replica {self._replica}: {self._engine.name}'s workers received no weights within "
                f"{self._timeout_s:g} s"
            )
        report: dict[str, Any] = json.loads(self._store.get(key))
        return report

    async def activate(self, version: PolicyVersion) -> float:
        """Serve the staged version from the next token on. Return the seconds without decoding."""
        if self._version != version:
            raise SyncError(
                f"replica {self._replica} must serve version {version}, "
                f"but version {self._version} is staged"
            )
        return await self._engine.swap(version, self._prove)

    def _prove(self, workers: Sequence[Any]) -> None:
        """Raise SyncError unless every worker serves the staged weights."""
        sent, _, fused = workers[0]
        if wrong := not_live(sent, [live for _, live, _ in workers], fused):
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise SyncError(
                f"replica {self._replica}: live weights of version {self._version} are not the "
                f"trainer's: {wrong[0]}{more} differ from the staged weights. "
                "The replica must not serve them"
            )


def check_unchanged(errors: Sequence[str]) -> None:
    """Raise SyncError with the first worker's text that is not empty."""
    if texts := [text for text in errors if text]:
        raise SyncError(texts[0])
