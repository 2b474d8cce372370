"""Recoveries of the trainer's ranks: bounded tries, their pauses, and the errors that end them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from millrace import codec
from millrace.errors import NotFinite, WorkerError
from millrace.ports import TrainBatch
from millrace.process.rpc import Peer
from millrace.replicas.trainer_group import TrainerGroup
from millrace.types import Prompt, Sample, tokens_of

pytestmark = pytest.mark.virtual_clock


class Rank(Peer):
    """A rank whose calls raise `error`, or succeed. It is dead before if it `dies`."""

    def __init__(self, error: Exception | None = None, *, dies: str = "") -> None:
        super().__init__("trainer-0", lambda frame: None, deadline_s=60.0)
        self.error, self.dies, self.calls = error, dies, list[str]()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.calls.append(method)
        if self.dies:
            self.mark_dead(self.dies)
        if self.error is not None:
            raise self.error


class Machine:
    """Starts ranks, the first `fails` times in vain."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.starts: list[float] = []
        self.ended: list[Peer] = []

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        self.starts.append(asyncio.get_running_loop().time())
        made = Rank()
        started(made)
        if len(self.starts) <= self.fails:
            raise WorkerError("the GPU is gone")
        return [made]

    async def end(self, peer: Peer) -> None:
        self.ended.append(peer)

    async def meet(self, replica: int, peer: Peer) -> None: ...


class Nothing:
    """A past in which nothing was trained."""

    async def replay(self, *args: Any) -> tuple[int, int]:
        return 0, 0


def ranks_of(machine: Machine, rank: Rank | None = None, most: int = 3) -> TrainerGroup:
    ranks = TrainerGroup([rank or Rank()], cast("Any", machine), max_restarts=most)
    ranks.follow(lambda work, name: asyncio.create_task(work, name=name))
    return ranks


async def test_a_broken_call_is_made_again_by_the_next_incarnation() -> None:
    machine = Machine(fails=2)
    old = Rank(WorkerError("connection closed by peer"), dies="killed by SIGKILL")
    ranks = ranks_of(machine, old)
    with ranks.recalled(Nothing()):
        await ranks.begin("rl", 1)
    assert machine.starts == [1.0, 3.0, 7.0], "pauses of 1, 2 and 4 s"
    new = cast("Rank", ranks.peers[0])
    assert new is not old and new.death is None and old.calls == new.calls == ["engine.begin"]
    assert machine.ended[0] is old and len(machine.ended) == 3
    assert (ranks.incarnation, ranks.losses, ranks.restarts) == (1, 1, 1)


async def test_when_the_tries_are_used_up_the_error_is_that_of_the_last_loss() -> None:
    machine = Machine(fails=9)
    ranks = ranks_of(machine, most=2)
    with ranks.recalled(Nothing()):
        ranks.lose("worker trainer-0 was killed by SIGKILL")
        for _ in range(2):  # whoever asks later gets it too
            with pytest.raises(WorkerError, match="the GPU is gone"):
                await ranks.ready()
    assert len(machine.starts) == 2


async def test_a_checkpoint_gives_all_tries_back() -> None:
    ranks = ranks_of(Machine(fails=0), most=1)
    with ranks.recalled(Nothing()):
        for _ in range(3):
            ranks.lose("gone")
            await ranks.ready()
            await ranks.save("folder")
        assert ranks.restarts == 3
        ranks.lose("gone")
        await ranks.ready()
        ranks.lose("gone for good")
        with pytest.raises(WorkerError, match="gone for good"):
            await ranks.ready()


@pytest.mark.parametrize("error", [WorkerError("step raised OutOfMemory"), NotFinite("3 steps")])
async def test_an_error_of_the_engine_itself_is_no_loss(error: Exception) -> None:
    machine = Machine(fails=0)
    ranks = ranks_of(machine, Rank(error))
    with ranks.recalled(Nothing()), pytest.raises(type(error)) as caught:
        await ranks.begin("rl", 1)
    assert caught.value is error and not machine.starts


async def test_on_shared_devices_new_ranks_start_when_the_trainer_has_its_turn() -> None:
    machine = Machine(fails=0)
    ranks = ranks_of(machine, Rank(WorkerError("gone"), dies="gone"))
    with ranks.recalled(Nothing()):
        await ranks.sleep()
        assert machine.ended and not machine.starts, "the devices are free at once"
        await asyncio.sleep(100.0)
        assert not machine.starts
        await ranks.wake()
    assert machine.starts == [100.0]


async def test_without_a_recovery_a_loss_is_the_error() -> None:
    ranks = ranks_of(Machine(fails=0), Rank(WorkerError("gone")), most=0)
    ranks.lose("gone")
    with ranks.recalled(Nothing()), pytest.raises(WorkerError, match="gone"):
        await ranks.begin("rl", 1)


async def test_a_stop_ends_a_recovery_that_takes_longer_than_its_grace() -> None:
    machine = Machine(fails=9)
    ranks = ranks_of(machine)
    with ranks.recalled(Nothing()):
        ranks.lose("worker trainer-0 was killed")
        ranks.stop(2.0)
        with pytest.raises(WorkerError, match=r"(?s)trainer-0 was killed.*trainer\.resume=auto"):
            await ranks.ready()
    assert asyncio.get_running_loop().time() == 2.0


async def test_the_grace_of_a_stop_ends_with_its_run() -> None:
    """A session may run again after a stop. Recoveries of the later run have their full time."""
    ranks = ranks_of(Machine(fails=2))
    with ranks.recalled(Nothing()):
        ranks.stop(2.0)
        ranks.stop(2.0)
    ranks.stop(2.0)
    with ranks.recalled(Nothing()):
        ranks.lose("worker trainer-0 was killed")
        await ranks.ready()
    assert asyncio.get_running_loop().time() == 1 + 2 + 4, "after the third start"


def test_a_batch_that_ends_the_run_can_be_read_again(tmp_path: Path) -> None:
    samples = (Sample(Prompt(5, tokens_of([1, 2]), "x", "sim"), (), 3),)
    batch = TrainBatch(samples, 3)
    error = NotFinite("trainer-0: 3 optimizer steps in a row")

    def train(folder: Path) -> None:
        machine = cast("Any", Machine(fails=0))
        engine = TrainerGroup([Rank(error)], machine, max_restarts=3, folder=folder)
        asyncio.run(engine.step(batch))

    with pytest.raises(
        NotFinite, match=r"in a row\. The last batch is in .*nonfinite-000003\.json"
    ):
        train(tmp_path)
    assert codec.from_json((tmp_path / "nonfinite-000003.json").read_bytes(), TrainBatch) == batch
    with pytest.raises(NotFinite, match="could not be saved"):
        train(tmp_path / "missing")
