"""How the driver combines the answers of several workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.errors import BrokenTransfer, ConfigError, SyncError, WorkerError
from millrace.ports import TransferReport
from millrace.process.rpc import first_error
from millrace.replicas.roster import Roster
from millrace.replicas.trainer_group import TrainerGroup
from millrace.replicas.weight_sync import WeightSyncDriver
from tests.waiting import HANG_S

pytestmark = pytest.mark.virtual_clock
NEVER = object()
"""The answer to a call that is never answered."""


class Answers:
    """A peer with one answer for each method. An answer that is an exception is raised."""

    deadline_s = HANG_S

    def __init__(self, name: str, death: str = "", **answers: Any) -> None:
        self.name, self.death, self.answers = (
            name,
            death,
            {"regroup": None, "resend": None} | answers,
        )
        self.asked: list[Any] = []

    async def call(self, method: str, args: tuple[object, ...] = (), result: object = None) -> Any:
        self.asked.append(method)
        answer = self.answers[method.partition(".")[2]]
        if isinstance(answer, Exception):
            raise answer
        if answer is NEVER:
            await asyncio.Event().wait()
        return answer


BROKEN = BrokenTransfer("rollout-0: a weight transfer broke off")


class Meetings:
    """A launcher that starts nothing."""

    async def meet(self, replica: int, peer: Answers) -> None: ...


async def sync_of(trainer: Answers, *replicas: Answers) -> WeightSyncDriver:
    ranks = TrainerGroup(cast("Any", [trainer]), cast("Any", Meetings()), max_restarts=0)
    engines = cast("Any", [SimpleNamespace(peer=peer) for peer in replicas])
    sync = WeightSyncDriver(ranks, engines, Roster(len(replicas)), deadline_s=HANG_S)
    await sync.connect()
    for peer in (trainer, *replicas):
        assert peer.asked.pop().endswith(".regroup")
    return sync


@pytest.mark.parametrize(
    "trainer, cause",
    [
        (
            Answers("trainer-0", keep=None, sent=SyncError("trainer-0: out of memory")),
            "trainer-0: out of memory",
        ),
        (
            Answers("trainer-0", "trainer-0 was killed", keep=None, sent=WorkerError("gone")),
            "trainer-0 was killed",
        ),
        (Answers("trainer-0", keep=None, sent=None), "rollout-0: a weight transfer broke off"),
        (Answers("trainer-0", keep=None, sent=NEVER), "rollout-0 was killed"),
    ],
)
async def test_if_a_version_that_is_on_its_way_does_not_arrive_the_side_that_failed_is_the_error(
    trainer: Answers, cause: str
) -> None:
    replica = Answers("rollout-0", cause if "rollout-0 was" in cause else "", transfer=BROKEN)
    sync = await sync_of(trainer, replica)
    await sync.keep(3)
    with pytest.raises((SyncError, WorkerError), match=cause):
        await sync.transfer(3)


async def test_a_sender_that_failed_is_the_error_though_its_replica_waits() -> None:
    trainer, replica = (
        Answers("trainer-0", keep=None, sent=SyncError("out of memory")),
        Answers("rollout-0", transfer=NEVER),
    )
    sync = await sync_of(trainer, replica)
    await sync.keep(3)
    with pytest.raises(SyncError, match="out of memory"):
        await sync.transfer(3)


async def test_a_version_that_arrived_does_not_wait_for_its_senders_step() -> None:
    trainer = Answers("trainer-0", keep=None, sent=NEVER)
    sync = await sync_of(trainer, Answers("rollout-0", transfer=TransferReport(8, 0.2)))
    await sync.keep(3)
    assert (await sync.transfer(3)).bytes == 8


@pytest.mark.parametrize("call", ["build", "connect"])
async def test_a_worker_that_is_killed_is_the_error_and_not_what_it_broke_in_others(
    call: str,
) -> None:
    """The process of a killed worker frees its memory before it is known to be dead.

    By then, the other workers' connections to it have failed.
    """
    killed, other = Answers("trainer-0"), Answers("trainer-1")
    killed.answers, other.answers = (
        {call: NEVER},
        {call: WorkerError("trainer-1: connection closed by peer")},
    )
    asyncio.get_running_loop().call_later(
        0.4, setattr, killed, "death", "worker trainer-0 was killed by SIGKILL"
    )
    with pytest.raises(WorkerError, match="trainer-0 was killed by SIGKILL"):
        await first_error([killed, other], [p.call(f"x.{call}") for p in (killed, other)])  # type: ignore[list-item]


async def test_an_error_of_a_workers_own_is_told_at_once() -> None:
    peers = [
        Answers("trainer-0", build=ConfigError("model.path: no such folder")),
        Answers("trainer-1", build=NEVER),
    ]
    with pytest.raises(ConfigError, match="no such folder"):
        await asyncio.wait_for(first_error(peers, [p.call("x.build") for p in peers]), HANG_S)  # type: ignore[arg-type]


async def test_what_was_begun_is_begun_once() -> None:
    """The version is sent in the background once. Afterwards, it is sent like any other.

    A further run on the same engines may send the same version again.
    """
    trainer = Answers("trainer-0", keep=None, sent=None, transfer=TransferReport(8, 0.1))
    replica = Answers("rollout-0", transfer=TransferReport(8, 0.2), activate=0.1)
    sync = await sync_of(trainer, replica)
    await sync.keep(3)
    await sync.transfer(3)
    assert trainer.asked == ["sender.keep", "sender.sent"]
    await sync.activate(3)
    await sync.transfer(3)
    assert (
        trainer.asked[2:] == ["sender.transfer"] and replica.asked[::2] == ["receiver.transfer"] * 2
    )
