"""Replicas that leave and join a weight sync, over real gloo groups.

A transfer that breaks ends within seconds, and the same version then reaches those who are left.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from millrace.config import Config
from millrace.errors import BrokenTransfer, SyncError
from millrace.run.engines import sync_options
from millrace.sync.collective import Receiver, join_sender
from millrace.sync.groups import Group, Operation, finish
from tests.sync import test_adapters
from tests.sync.fleet import TRAINERS, Fleet, Holder, Source, equal, fleet, large, model, regroup
from tests.sync.test_adapters import draw, size
from tests.waiting import HANG_S, at_some_pace, until_async

EMPTY = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}


async def broken(f: Fleet, version: int) -> Any:
    """Begin a transfer in which replica 1 stands still. Return the task."""
    task = asyncio.ensure_future(f.transfer(version, [0]))
    await asyncio.sleep(0.2)
    assert not task.done(), "a member that stands still holds up the others"
    return task


async def test_a_replica_that_stands_still_is_left_out_and_a_restarted_one_joins() -> None:
    async with fleet() as f:
        await f.transfer(0)
        await f.activate(0)
        for version in (1, 2):  # twice in a row
            new = model(50 + version)
            for source in f.sources:
                source.tensors = new
            task = await broken(f, version)
            start = time.monotonic()
            await f.regroup([0])
            with pytest.raises(BrokenTransfer, match="broke off"):
                await task
            assert time.monotonic() - start < HANG_S, "it does not wait for sync.timeout_s"
            await f.transfer(version, [0])
            await f.activate(version, [0])
            assert equal(f.holders[0].live, new) and not equal(f.holders[1].live, new)
            await f.replace(1, Holder({n: t.clone() for n, t in EMPTY.items()}))
            with pytest.raises(BrokenTransfer, match="replica 1 takes no part"):
                await f.receivers[1].transfer(version)
            assert await f.regroup([0, 1]) == [version, None]
            await f.transfer(version)
            await f.activate(version, [1])
            assert equal(f.holders[1].live, new)
        assert f.holders[0].swaps == [0, 1, 2]


async def test_a_version_that_was_kept_is_sent_again_from_its_copy() -> None:
    async with fleet() as f:
        at_the_cut = model(51)
        for source in f.sources:
            source.tensors = {name: tensor.clone() for name, tensor in at_the_cut.items()}
        await asyncio.gather(*(s.keep(1) for s in f.senders))
        for tensor in (t for source in f.sources for t in source.tensors.values()):
            tensor.add_(1)
        task = asyncio.ensure_future(f.receivers[0].transfer(1))
        await asyncio.sleep(0.2)
        assert await f.regroup([0]) == [None]
        with pytest.raises(BrokenTransfer):
            await task
        await f.replace(1, Holder({n: t.clone() for n, t in EMPTY.items()}))
        await f.regroup([0, 1])
        await asyncio.gather(*(s.resend(1) for s in f.senders))
        await asyncio.gather(*(r.transfer(1) for r in f.receivers))
        await asyncio.gather(*(s.sent() for s in f.senders))
        await f.activate(1)
        assert all(equal(h.live, at_the_cut) for h in f.holders)
        with pytest.raises(SyncError, match="version 1 cannot be sent again"):
            await f.senders[0].resend(1)


async def test_the_base_of_adapters_is_sent_again_to_those_who_lack_it() -> None:
    async with test_adapters.fleet() as f:
        await f.transfer(0)
        await f.activate(0)
        for version, members in ((1, [0]), (2, [0, 1])):
            if version == 1:
                await broken(f, version)
            else:
                await f.replace(1, Holder({n: t.clone() for n, t in EMPTY.items()}))
            await f.regroup(members)
            low_rank = draw(f, version)
            _, received = await f.transfer(version, members)
            await f.activate(version, members)
            with_base = received[0].bytes > size(low_rank) + size(model(1))
            assert with_base == (version == 2)
        assert equal(f.holders[0].live, f.holders[1].live)


def test_who_does_not_come_is_named_and_a_later_generation_supersedes() -> None:
    async def main(seconds: float) -> None:
        store, sources = dist.HashStore(), [Source(model(1), rank) for rank in range(TRAINERS)]
        trainer = {"n_gpus_per_node": TRAINERS}
        agreed = sync_options(Config(trainer=trainer, sync={"timeout_s": HANG_S}))
        *senders, receiver = await asyncio.gather(
            *(join_sender(source, store, r, agreed) for r, source in enumerate(sources)),  # type: ignore[arg-type]
            Receiver.join(Holder(model(1)), store, 0, agreed),
        )
        late = asyncio.ensure_future(receiver.regroup(1, [0, 1]))
        await until_async(lambda: store.check(["millrace/sync/1/here/replica 0"]))
        object.__setattr__(agreed, "timeout_s", seconds)
        absent = rf"met the other .* but replica 1 did not come within sync.timeout_s = {seconds}"
        with pytest.raises(SyncError, match=absent):
            await asyncio.gather(*(end.regroup(2, [0, 1]) for end in (*senders, receiver)))
        with pytest.raises(SyncError, match="generation 1 were given up for generation 2"):
            await late
        with pytest.raises(SyncError, match="generation 1 were given up for generation 2"):
            await receiver.regroup(1, [0])
        object.__setattr__(agreed, "timeout_s", HANG_S)
        await regroup(senders, {0: receiver}, 3)

    at_some_pace(lambda seconds: asyncio.run(main(seconds)), 0.3)


VICTIM = """
import asyncio, os, signal, sys
from millrace.sync import staging as inbox
from torch.distributed import TCPStore
from tests.sync.fleet import sync_options, Config, Holder, Receiver, large
agreed = sync_options(Config.model_validate_json(sys.argv[2]))
finish, left = inbox.finish, [5]
def dies(work):
    finish(work)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
async def main():
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    receiver = await Receiver.join(Holder(large(3)), store, 1, agreed)
    await receiver.regroup(1, [0, 1])
    inbox.finish = dies
    await receiver.transfer(1)
asyncio.run(main())
"""


@pytest.fixture
def killed() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


async def test_a_receiver_killed_in_the_middle_of_a_transfer(
    killed: list[subprocess.Popen[bytes]],
) -> None:
    """Two trainer ranks send. Replica 1 is another process, which dies by SIGKILL."""
    new = large(1)
    config = Config(
        trainer={"n_gpus_per_node": TRAINERS},
        rollout={"n_gpus_per_node": 2},
        sync={"bucket_mb": 1, "timeout_s": HANG_S},
    )
    agreed = sync_options(config)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    victim = [sys.executable, "-c", VICTIM, str(store.port), config.model_dump_json()]
    killed.append(subprocess.Popen(victim))
    sources, holder = [Source(new, rank) for rank in range(TRAINERS)], Holder(large(2))
    *senders, receiver = await asyncio.gather(
        *(join_sender(source, store, r, agreed) for r, source in enumerate(sources)),  # type: ignore[arg-type]
        Receiver.join(holder, store, 0, agreed),
    )
    await asyncio.gather(*(end.regroup(1, [0, 1]) for end in (*senders, receiver)))
    calls = [asyncio.ensure_future(end.transfer(1)) for end in (*senders, receiver)]
    assert await asyncio.to_thread(killed[0].wait) == -signal.SIGKILL
    start = time.monotonic()
    await asyncio.gather(*(end.regroup(2, [0]) for end in (*senders, receiver)))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(end, BrokenTransfer) for end in ends), ends
    assert time.monotonic() - start < HANG_S
    await asyncio.gather(*(end.transfer(1) for end in (*senders, receiver)))
    await receiver.activate(1)
    assert equal(holder.live, new)


def test_an_operation_that_ends_just_after_its_wait_timed_out_has_not_failed() -> None:
    class Late:
        waits = 0

        def is_completed(self) -> bool:
            return self.waits > 0

        def wait(self, *limit: Any) -> None:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")

    ends = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    late = Late()
    finish(Operation(Group(ends), late))
    assert late.waits == 2
