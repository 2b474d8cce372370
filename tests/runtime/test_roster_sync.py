"""A weight sync and its errors: who counts as lost, after how long, and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.errors import BrokenTransfer, MillraceError, NoAnswer, ReplicaLost, WorkerError
from millrace.ports import TransferReport
from millrace.process.rpc import Peer
from millrace.replicas.roster import Roster
from millrace.replicas.trainer_group import TrainerGroup
from millrace.replicas.weight_sync import WeightSyncDriver
from millrace.simulate.clock import VirtualLoop

RESULTS = {"receiver.transfer": TransferReport(8, 0.1), "sender.transfer": TransferReport(8, 0.1)}


class Worker(Peer):
    """A worker that answers at once, but fails calls of `on` after `takes_s`, `fails` times."""

    def __init__(self, name: str, *, fails: int = 0, takes_s: float = 1.0) -> None:
        super().__init__(name, lambda frame: None, deadline_s=60.0)
        self.fails, self.takes_s, self.on = fails, takes_s, "transfer"
        self.error: Callable[[], MillraceError] = lambda: BrokenTransfer("timed out")

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        if self.death:
            raise WorkerError(self.death)
        if method.endswith(f".{self.on}") and self.fails:
            self.fails -= 1
            await asyncio.sleep(self.takes_s)
            raise self.error()
        return RESULTS.get(method)

    def silent(self) -> MillraceError:
        error = NoAnswer(f"{self.name} did not answer sender.transfer in time")
        error.worker = self.name
        return error


class Machine:
    """Starts ranks that work."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.fails = 0
        """Transfers of new ranks that fail."""

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        self.starts.append(asyncio.get_running_loop().time())
        return [Worker("trainer-0", fails=self.fails)]

    async def end(self, peer: Peer) -> None: ...

    async def meet(self, replica: int, peer: Peer) -> None: ...

    async def replay(self, *args: Any) -> tuple[int, int]:
        return 0, 0


class World:
    """A rank, and replicas that work."""

    def __init__(
        self, rank: Worker, *replicas: Worker, most: int = 3, deadline_s: float = 600.0
    ) -> None:
        self.machine, self.roster, self.notes = Machine(), Roster(len(replicas)), list[str]()
        machine, note = cast("Any", self.machine), self.notes.append
        self.ranks = TrainerGroup([rank], machine, max_restarts=most, note=note)
        self.ranks.follow(lambda work, name: asyncio.create_task(work, name=name))
        engines = [cast("Any", SimpleNamespace(peer=peer)) for peer in replicas]
        self.sync = WeightSyncDriver(self.ranks, engines, self.roster, deadline_s=deadline_s)

    def transfer(self, *, after_s: float = 0.0, kept: bool = False) -> float:
        """Send a version, which may be kept before. Return when it has arrived."""

        async def main() -> float:
            with self.ranks.recalled(self.machine):
                if kept:
                    await self.sync.connect()
                await asyncio.sleep(after_s)
                if kept:
                    await self.sync.keep(1)
                await self.sync.transfer(1)
            return asyncio.get_running_loop().time()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main())


@pytest.mark.parametrize(
    "takes_s, tries", [(1.0, 3), (150.0, 2), (300.0, 1)], ids=["often", "long", "too long"]
)
def test_ranks_with_a_sender_that_hangs_are_lost_before_the_deadline(
    takes_s: float, tries: int
) -> None:
    """Whoever waits for the version has the same deadline, and the recovery needs time too."""
    world = World(Worker("trainer-0", fails=9, takes_s=takes_s), Worker("rollout-0"))
    assert world.transfer() < 600
    assert world.ranks.restarts == 1 and world.roster.losses == 0
    assert sum("is made again" in note for note in world.notes) == tries - 1


def test_breaks_of_long_ago_do_not_count() -> None:
    rank = Worker("trainer-0", fails=2, takes_s=50.0)
    world = World(rank, Worker("rollout-0"))
    world.transfer()
    rank.fails = 2
    world.transfer()
    assert world.ranks.losses == 0 and len(world.notes) == 4


def test_the_waits_for_a_death_that_never_comes_leave_time_to_send_again() -> None:
    """Each break waits for one, and the deadline is short."""
    world = World(Worker("trainer-0", fails=2), Worker("rollout-0"), deadline_s=60.0)
    world.transfer()
    assert world.ranks.losses == 0 and len(world.notes) == 2


@pytest.mark.parametrize("on", ["regroup", "keep"])
def test_the_time_before_the_first_break_does_not_count(on: str) -> None:
    rank = Worker("trainer-0", fails=1)
    rank.on = on
    world = World(rank, Worker("rollout-0"))
    assert world.transfer(after_s=5000.0, kept=on == "keep") > 5000
    assert world.ranks.losses == 0 and not rank.fails and len(world.notes) == 1


def test_breaks_of_lost_ranks_do_not_count_for_those_in_their_place() -> None:
    rank = Worker("trainer-0", fails=3, takes_s=1.0)
    world = World(rank, Worker("rollout-0"))
    rank.error = lambda: BrokenTransfer("closed") if rank.fails else rank.silent()
    world.machine.fails = 2
    world.transfer()
    assert world.ranks.losses == 1


def test_without_recoveries_a_transfer_is_made_again_as_often_however_long_it_takes() -> None:
    rank = Worker("trainer-0", fails=9, takes_s=300.0)
    world = World(rank, Worker("rollout-0"), most=0)
    with pytest.raises(BrokenTransfer):
        world.transfer()
    assert rank.fails == 6 and rank.death is None


def test_a_rank_that_does_not_answer_is_lost_if_another_one_can_have_its_place() -> None:
    rank = Worker("trainer-0", fails=1)
    rank.error = rank.silent
    world = World(rank, Worker("rollout-0"))
    world.transfer()
    assert world.ranks.restarts == 1 and rank.death and world.roster.losses == 0


def test_without_recoveries_the_missed_deadline_is_the_error_of_the_run() -> None:
    """`trainer.wait_deadline_s` has notes of its own, and the rank may still save."""
    rank = Worker("trainer-0", fails=1)
    rank.error = rank.silent
    world = World(rank, Worker("rollout-0"), most=0)
    with pytest.raises(NoAnswer):
        world.transfer()
    assert rank.death is None


def test_a_replica_whose_engine_stands_still_is_lost_and_the_others_get_the_version() -> None:
    """Its process answers, and says so. Without requests, nothing else shows it."""
    bad = Worker("rollout-0", fails=1)
    bad.error = lambda: ReplicaLost("rollout-0: vLLM stood still")
    world = World(Worker("trainer-0"), bad, Worker("rollout-1"))
    world.transfer()
    assert "stood still" in str(bad.death) and [*world.roster.present] == [1]
    assert world.ranks.losses == 0


def test_an_engine_that_stands_still_at_the_first_connection_ends_the_run() -> None:
    """Nobody starts replicas anew yet."""
    bad = Worker("rollout-0", fails=1)
    bad.error, bad.on = lambda: ReplicaLost("rollout-0: vLLM stood still"), "regroup"
    with pytest.raises(ReplicaLost, match="stood still"):
        World(Worker("trainer-0"), bad).transfer()


@pytest.mark.parametrize("on", ["regroup", "transfer"])
def test_replicas_that_fail_because_a_rank_died_are_not_lost(on: str) -> None:
    """The store of the groups dies with rank 0. The replicas see that before the driver does."""
    rank, replicas = Worker("trainer-0"), [Worker(f"rollout-{i}", fails=1) for i in range(2)]
    for replica in replicas:
        replica.on, replica.takes_s = on, 0.1
        replica.error = lambda: WorkerError("receiver.transfer raised DistNetworkError: reset")
    rank.fails, rank.on, rank.takes_s = 1, on, 0.6

    def dies() -> MillraceError:
        rank.mark_dead("worker trainer-0 was killed by SIGKILL")
        return WorkerError(str(rank.death))

    rank.error = dies
    world = World(rank, *replicas)
    world.transfer()
    assert world.ranks.restarts == 1 and world.roster.losses == 0


def test_a_replica_that_does_not_answer_is_lost_and_the_others_get_the_version() -> None:
    bad = Worker("rollout-0", fails=1)
    bad.error = bad.silent
    world = World(Worker("trainer-0"), bad, Worker("rollout-1"))
    world.transfer()
    assert bad.death and [*world.roster.present] == [1] and world.ranks.losses == 0
