"""Tests of the weight sync over real gloo groups.

Replicas serve exactly the weights that the trainer sent, and never any others.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.config import Config
from millrace.errors import SyncError
from millrace.run.engines import sync_options
from millrace.sync import collective, table
from millrace.sync.buckets import ALIGN, Bucket, plan, specs_of
from millrace.sync.collective import Receiver, Sender
from tests.sync.fleet import (
    REPLICAS,
    TRAINERS,
    Deaf,
    Forgetful,
    Holder,
    Source,
    equal,
    fleet,
    model,
)
from tests.waiting import HANG_S, until


async def test_every_replica_serves_what_the_trainer_sent_version_after_version() -> None:
    async with fleet() as f:
        for version in (0, 1, 2):
            new = model(50 + version)
            for source in f.sources:
                source.tensors = new
            before = [{k: t.clone() for k, t in h.live.items()} for h in f.holders]
            sent, received = await f.transfer(version)
            assert all(equal(h.live, b) for h, b in zip(f.holders, before, strict=True)), (
                "a transfer touches nothing live"
            )
            paused = await f.activate(version)
            assert all(equal(h.live, new) and h.version == version for h in f.holders)
            size = sum(t.numel() * t.element_size() for t in new.values())
            assert all(size <= r.bytes < size + ALIGN * len(new) * TRAINERS for r in received)
            assert (
                sum(s.bytes for s in sent) == received[0].bytes and min(s.bytes for s in sent) > 0
            ), "ranks share the work"
            assert all(r.seconds > 0 for r in [*sent, *received])
            assert all(0 < p < 5 for p in paused)
        assert [h.swaps for h in f.holders] == [[0, 1, 2]] * 2


async def test_weights_that_were_kept_arrive_though_the_trainer_has_stepped_on() -> None:
    async with fleet() as f:
        for version in (0, 1, 2, 3):
            at_the_cut = model(50 + version)
            for source in f.sources:
                source.tensors = {name: tensor.clone() for name, tensor in at_the_cut.items()}
            if version == 2:  # an awaited transfer between kept ones
                await f.transfer(version)
            else:
                for sender in f.senders:
                    await sender.keep(version)
                for tensor in (t for source in f.sources for t in source.tensors.values()):
                    tensor.add_(1)
                await asyncio.gather(*(r.transfer(version) for r in f.receivers))
                await asyncio.gather(*(s.sent() for s in f.senders))
            await f.activate(version)
            assert all(equal(h.live, at_the_cut) and h.version == version for h in f.holders)


class Slow(Sender):
    """A sender that waits 0.2 s and sends nothing; it raises `failure` if that is set."""

    failure: Exception | None = None

    def _send(self, buckets: list[Bucket], packed: Iterator[Tensor]) -> bool:
        for tensor in packed:
            self.last = weakref.ref(tensor)
        time.sleep(0.2)
        if self.failure is not None:
            raise self.failure
        return True


async def test_who_gives_up_waiting_for_what_was_kept_ends_nothing_and_a_failure_is_told_once() -> (
    None
):
    tensors = model(1)
    source = Source(tensors, 0)
    sender = Slow(
        source,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        0,
        plan([*specs_of({n: t for n, *_, t in source.shards()})], 1 << 20),
        torch.device("cpu"),
    )
    await sender.keep(1)
    waiting = asyncio.ensure_future(sender.transfer(2))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    await sender.transfer(2)
    sender.failure = SyncError("broken")
    await sender.keep(3)
    with pytest.raises(SyncError, match="broken"):
        await sender.sent()
    await sender.sent()
    sender.failure = None
    await sender.keep(4)
    until(lambda: sender.last() is None)  # The event loop stands still, as in a step.
    await sender.sent()


async def test_of_several_copies_of_the_model_the_first_is_sent_alone() -> None:
    async with fleet(copies=2) as f, fleet() as one:
        for version in (0, 1):
            for source in [*f.sources, *one.sources]:
                source.tensors = model(50 + version)
            # All ranks accept `keep`, but only those of the first copy send the kept weights.
            if version == 0:
                await asyncio.gather(*(s.keep(version) for s in f.senders))
                await asyncio.gather(*(r.transfer(version) for r in f.receivers))
            sent, received = await f.transfer(version)
            assert [s.bytes for s in sent] == [
                s.bytes for s in (await one.transfer(version))[0]
            ] + [0, 0]
            assert {r.bytes for r in received} == {sum(s.bytes for s in sent)}
            await f.activate(version)
            assert all(equal(h.live, model(50 + version)) for h in f.holders)
        sending = [asyncio.to_thread(asyncio.run, s.link()) for s in f.senders]  # type: ignore[arg-type]
        link = await asyncio.gather(*sending, *(r.link() for r in f.receivers))
        assert [report.bytes for report in link] == [s.bytes for s in sent] + [
            r.bytes for r in received
        ]
        assert [await s.transport() for s in f.senders] == ["gloo", "gloo", "none", "none"]


async def test_the_pause_is_the_holders_own_and_no_part_of_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica waits 200 s for its turn and still serves. It does not report this as a pause."""
    now = [0.0]

    class Waiting(Holder):
        async def swap(self, version: int, staged: Mapping[str, Tensor]) -> float:
            now[0] += 200.0
            await super().swap(version, staged)
            return 0.001

    async with fleet(lambda i: Waiting(model(i))) as f:
        await f.transfer(1)
        monkeypatch.setattr(collective, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        assert await f.activate(1) == pytest.approx([0.001] * REPLICAS)


async def test_a_tensor_corrupted_while_it_is_staged_is_refused_at_activation() -> None:
    async with fleet() as f:
        await f.transfer(1)
        f.receivers[1].inbox.staged["layer.1.w"].view(torch.int32)[3, 5] ^= 1
        await f.receivers[0].activate(1)
        with pytest.raises(
            SyncError,
            match=r"replica 1: live weights of version 1 are not the trainer's: layer\.1\.w",
        ):
            await f.receivers[1].activate(1)
        with pytest.raises(
            SyncError, match="replica 1 cannot serve version 1: its staged version is None"
        ):
            await f.receivers[1].activate(1)


def test_a_bit_that_flips_on_the_way_is_refused_before_it_can_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bit of each bucket flips after the sender took its checksums."""
    honest = collective.start_broadcast

    def flips(group: Any, tensor: Tensor) -> Any:
        if group is broken and tensor.dtype == torch.uint8:
            tensor[1000] ^= 4
        return honest(group, tensor)

    async def main() -> None:
        nonlocal broken  # type: ignore[misc]
        async with fleet() as f:
            broken = f.senders[1]._membership.groups[1]
            monkeypatch.setattr(collective, "start_broadcast", flips)
            with pytest.raises(
                SyncError,
                match=r"replica \d: received weights of version 4 are not the trainer's: embed and 1 more tensors differ in checksum "
                r"\(rows of trainer rank 1\)",
            ):
                await f.transfer(4)
            for i, receiver in enumerate(f.receivers):
                with pytest.raises(
                    SyncError,
                    match=f"replica {i} cannot serve version 4: its staged version is None",
                ):
                    await receiver.activate(4)
            assert all(not h.swaps for h in f.holders)

    broken: Any = None
    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "named"), [(Deaf, "embed and 6 more tensors"), (Forgetful, "layer.0.b differ")]
)
async def test_a_replica_that_keeps_old_weights_behind_a_swap_is_caught(
    kind: type[Holder], named: str
) -> None:
    """Some engines confirm an update and serve the old weights.

    The proof therefore reads live tensors and does not trust a message.
    """
    async with fleet(lambda i: kind(model(9)) if i == 0 else Holder(model(9))) as f:
        await f.transfer(1)
        with pytest.raises(SyncError, match=r"replica 0: live weights of version 1") as caught:
            await f.receivers[0].activate(1)
        assert named in str(caught.value)
        await f.receivers[1].activate(1)


async def test_a_tensor_that_changed_behind_the_back_of_its_replica_is_found_by_the_next_sync() -> (
    None
):
    async with fleet() as f:
        await f.transfer(1)
        await f.activate(1)
        f.holders[1].live["layer.1.b"][3] += 1e-3
        with pytest.raises(
            SyncError,
            match=r"replica 1: live weights of version 1 are no longer the trainer's: "
            r"layer\.1\.b changed after the sync. Tokens .* carry version 1, but other weights",
        ):
            await f.transfer(2)
        with pytest.raises(SyncError, match="replica 1 cannot serve version 2"):
            await f.receivers[1].activate(2)
        await f.activate(2, [0])


async def test_a_replica_refuses_a_version_that_it_does_not_hold() -> None:
    async with fleet() as f:
        with pytest.raises(
            SyncError, match="replica 0 cannot serve version 0: its staged version is None"
        ):
            await f.receivers[0].activate(0)
        await f.transfer(1)
        with pytest.raises(
            SyncError, match="replica 0 cannot serve version 2: its staged version is 1"
        ):
            await f.receivers[0].activate(2)
        assert all(not h.swaps for h in f.holders)


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layer.0.b", "layer.0.bias"): t for name, t in tensors.items()}


def reshaped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"layer.1.w": torch.zeros(400, 512)}


def retyped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"head": tensors["head"].float()}


def shorter(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            renamed,
            r"replica 0 has layer\.0\.bias float32\[200\] where the trainer has layer\.0\.b float32\[200\]",
        ),
        (
            reshaped,
            r"replica 0 has layer\.1\.w float32\[400, 512\] where the trainer has layer\.1\.w float32\[512, 400\]",
        ),
        (
            retyped,
            r"replica 0 has head float32\[511, 301\] where the trainer has head bfloat16\[511, 301\]",
        ),
        (shorter, "replica 0 has 6 tensors, the trainer 7"),
    ],
)
def test_models_that_differ_are_refused_by_replica_and_tensor(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    store = dist.HashStore()
    store.set(
        table.PLAN,
        msgspec.json.encode(specs_of(model(0))),  # type: ignore[arg-type]
    )  # the rest of Sender.join waits for the replicas
    with pytest.raises(SyncError, match=message):
        asyncio.run(
            Receiver.join(
                Holder(change(model(0))), store, 0, sync_options(Config(sync={"timeout_s": HANG_S}))
            )
        )


async def test_a_trainer_that_sends_another_order_than_planned_is_refused() -> None:
    async with fleet() as f:
        source = f.sources[0]
        source.tensors = dict(reversed(source.tensors.items()))
        with pytest.raises(
            SyncError, match=r"the train engine sends head, but the plan expects embed"
        ):
            await f.senders[0].transfer(1)
