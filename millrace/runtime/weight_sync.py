"""The weight sync on the driver's side: from the trainer's ranks to the replicas that take part."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from millrace.ports import TransferReport
from millrace.runtime.remote import all_of, first_error
from millrace.runtime.rpc import Peer
from millrace.types import PolicyVersion


class RemoteWeightSync:
    """A WeightSync between workers. `regroup` says which replicas take part."""

    def __init__(self, trainers: Sequence[Peer]) -> None:
        self.generation = 0
        self._trainers = trainers
        self._members: Mapping[int, Peer] = {}
        self._sending: PolicyVersion | None = None

    async def regroup(self, members: Mapping[int, Peer]) -> None:
        """Let the replicas `members` take part from now on, and no others."""
        self.generation += 1
        self._members, self._sending = dict(members), None
        where = (self.generation, sorted(members))
        calls = [p.call("sender.regroup", where) for p in self._trainers]
        calls += [p.call("receiver.regroup", where) for p in members.values()]
        await first_error([*self._trainers, *members.values()], calls)

    async def keep(self, version: PolicyVersion) -> None:
        """Keep a version. The trainer's ranks begin to send it at once."""
        await all_of(self._trainers, "sender.keep", (version,))
        self._sending = version

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        sending, self._sending = self._sending, None
        if sending == version:
            return await self._arrival(version)
        replicas = [*self._members.values()]
        calls = [p.call("sender.transfer", (version,), TransferReport) for p in self._trainers]
        calls += [p.call("receiver.transfer", (version,), TransferReport) for p in replicas]
        reports = await first_error([*self._trainers, *replicas], calls)
        return TransferReport(reports[-1].bytes, max(r.seconds for r in reports))

    async def _arrival(self, version: PolicyVersion) -> TransferReport:
        """Wait until all replicas have the version that is on its way, and return the report.

        A version that arrived and was proven needs no answer from the senders. They answer only
        after their next step. If a sender failed or died, its error is the one raised.
        """
        replicas = [*self._members.values()]
        arrived = asyncio.ensure_future(
            all_of(replicas, "receiver.transfer", (version,), TransferReport)
        )
        sent = asyncio.ensure_future(all_of(self._trainers, "sender.sent"))
        try:
            await asyncio.wait([arrived, sent], return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
            await asyncio.wait([arrived])
            if arrived.exception() and not any(p.death for p in replicas):
                await sent
            received = arrived.result()
            return TransferReport(received[0].bytes, max(r.seconds for r in received))
        finally:
            arrived.cancel()
            sent.cancel()

    async def link(self) -> TransferReport:
        """Return the bytes of a transfer, and the seconds that the link alone needs for them."""
        sent, received = await asyncio.gather(
            all_of(self._trainers, "sender.link", (), TransferReport),
            all_of([*self._members.values()], "receiver.link", (), TransferReport),
        )
        return TransferReport(received[0].bytes, max(r.seconds for r in sent))

    async def transport(self) -> str:
        """Return the name of the transport, such as nccl or gloo."""
        (name, *_) = await all_of(self._trainers, "sender.transport", (), str)
        return str(name)

    async def activate(self, version: PolicyVersion) -> float:
        return max(await all_of([*self._members.values()], "receiver.activate", (version,), float))
