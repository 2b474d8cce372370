"""Calls that arrive twice, after a later call, or after the message that ends them."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from millrace.process.rpc import Peer
from millrace.runtime.host import Host
from tests.waiting import HANG_S


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

            peer = Peer("rollout-0", twice, deadline_s=HANG_S)
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
            peer = Peer("trainer-0", held.append, deadline_s=HANG_S)
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


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
async def test_calls_begin_in_the_order_in_which_they_were_made(order: tuple[int, ...]) -> None:
    """The link changes the order, and gives each message twice. The second call is given up."""
    began: list[int] = []

    class Root:
        async def note(self, number: int) -> int:
            began.append(number)
            return number

    async with asyncio.TaskGroup() as tasks:
        held: list[bytes] = []
        host = Host(Root(), lambda frame: peer.receive(frame), tasks)
        peer = Peer("trainer-0", held.append, deadline_s=HANG_S)
        calls = []
        for number in range(3):
            calls.append(asyncio.ensure_future(peer.call("note", (number,), int)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.sleep(0.01)
        assert len(held) == 4, "three calls, and the end of one"
        for k in order:
            host.receive(held[k])
            host.receive(held[k])
        await asyncio.sleep(0.01)
        assert [await calls[0], await calls[2]] == [0, 2]
        assert began == [0, 2] and not host._early
