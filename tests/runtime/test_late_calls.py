"""Calls that arrive twice, or after the message that ends them."""

from __future__ import annotations

import asyncio

from millrace.runtime.host import Host
from millrace.runtime.rpc import Peer


def test_a_call_that_arrives_twice_runs_once() -> None:
    async def main() -> tuple[list[int], int]:
        seen: list[int] = []

        class Counter:
            async def add(self, number: int) -> int:
                seen.append(number)
                return len(seen)

        async with asyncio.TaskGroup() as tasks:
            host = Host(Counter(), lambda frame: peer.receive(frame), tasks)

            def twice(frame: bytes) -> None:
                host.receive(frame)
                host.receive(frame)

            peer = Peer("rollout-0", twice, deadline_s=20.0)
            return seen, await peer.call("add", (7,), int)

    assert asyncio.run(main()) == ([7], 1)


def test_a_call_that_ended_before_it_arrived_does_not_run() -> None:
    """The link gives the message that ends the call first, and then the call."""

    async def main() -> list[str]:
        ran: list[str] = []

        class Sender:
            async def transfer(self, what: str) -> str:
                ran.append(what)
                return what

        async with asyncio.TaskGroup() as tasks:
            host = Host(Sender(), lambda frame: peer.receive(frame), tasks)
            held: list[bytes] = []
            peer = Peer("trainer-0", held.append, deadline_s=20.0)
            given_up = asyncio.ensure_future(peer.call("transfer", ("old",), str))
            await asyncio.sleep(0.01)
            given_up.cancel()
            await asyncio.sleep(0.01)
            for frame in reversed(held):
                host.receive(frame)
            held.clear()
            new = asyncio.ensure_future(peer.call("transfer", ("new",), str))
            await asyncio.sleep(0.01)
            host.receive(held[0])
            assert await new == "new"
            return ran

    assert asyncio.run(main()) == ["new"]
