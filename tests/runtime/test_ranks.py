"""Recoveries of the trainer's ranks: bounded tries, their pauses, and the errors that end them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace import codec
from millrace.errors import NotFinite, WorkerError
from millrace.ports import TrainBatch
from millrace.runtime.recovering import RecoveringTrainEngine
from millrace.runtime.rpc import Peer
from millrace.runtime.trainer_group import TrainerGroup
from millrace.simulate.clock import VirtualLoop
from millrace.types import Prompt, Sample, tokens_of


def peer(name: str = "trainer-0") -> Peer:
    return Peer(name, lambda frame: None, deadline_s=60.0)


class Machine:
    """Starts ranks, the first `fails` times in vain."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.starts: list[float] = []
        self.ended: list[Peer] = []

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        self.starts.append(asyncio.get_running_loop().time())
        made = peer()
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


def run(work: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())  # type: ignore[arg-type]


def ranks_of(machine: Machine, most: int = 3) -> TrainerGroup:
    ranks = TrainerGroup([peer()], machine, max_restarts=most)
    ranks.follow(lambda work, name: asyncio.create_task(work, name=name))
    return ranks


def test_a_broken_call_is_made_again_by_the_next_incarnation() -> None:
    async def main() -> None:
        machine = Machine(fails=2)
        ranks = ranks_of(machine)
        old, calls = ranks.peers[0], list[Peer]()

        async def call() -> str:
            calls.append(ranks.peers[0])
            if len(calls) == 1:
                old.mark_dead("worker trainer-0 was killed by SIGKILL")
                raise WorkerError("connection closed by peer")
            return "done"

        with ranks.recalled(Nothing()):
            assert await ranks.call_with_recovery(call) == "done"
        assert machine.starts == [1.0, 3.0, 7.0], "pauses of 1, 2 and 4 s"
        assert calls[1] is not old and calls[1].death is None
        assert machine.ended[0] is old and len(machine.ended) == 3
        assert (ranks.incarnation, ranks.losses, ranks.restarts) == (1, 1, 1)

    run(main)


def test_when_the_tries_are_used_up_the_error_is_that_of_the_last_loss() -> None:
    async def main() -> None:
        machine = Machine(fails=9)
        ranks = ranks_of(machine, most=2)
        with ranks.recalled(Nothing()):
            ranks.lose("worker trainer-0 was killed by SIGKILL")
            for _ in range(2):  # whoever asks later gets it too
                with pytest.raises(WorkerError, match="the GPU is gone"):
                    await ranks.ready()
        assert len(machine.starts) == 2

    run(main)


def test_a_checkpoint_gives_all_tries_back() -> None:
    async def main() -> None:
        ranks = ranks_of(Machine(fails=0), most=1)
        with ranks.recalled(Nothing()):
            for _ in range(3):
                ranks.lose("gone")
                await ranks.ready()
                ranks.saved()
            assert ranks.restarts == 3
            ranks.lose("gone")
            await ranks.ready()
            ranks.lose("gone for good")
            with pytest.raises(WorkerError, match="gone for good"):
                await ranks.ready()

    run(main)


@pytest.mark.parametrize("error", [WorkerError("step raised OutOfMemory"), NotFinite("3 steps")])
def test_an_error_of_the_engine_itself_is_no_loss(error: Exception) -> None:
    async def main() -> None:
        machine = Machine(fails=0)
        ranks = ranks_of(machine)

        async def call() -> None:
            raise error

        with ranks.recalled(Nothing()), pytest.raises(type(error)) as caught:
            await ranks.call_with_recovery(call)
        assert caught.value is error and not machine.starts

    run(main)


def test_on_shared_devices_new_ranks_start_when_the_trainer_has_its_turn() -> None:
    async def main() -> None:
        machine = Machine(fails=0)
        ranks = ranks_of(machine)

        async def sleep() -> None:
            ranks.lose("gone")
            raise WorkerError("gone")

        with ranks.recalled(Nothing()):
            await ranks.give_room(sleep)
            assert machine.ended and not machine.starts, "the devices are free at once"
            await asyncio.sleep(100.0)
            assert not machine.starts
            ranks.take_room()
            await ranks.ready()
        assert machine.starts == [100.0]

    run(main)


def test_without_a_recovery_a_loss_is_the_error() -> None:
    async def main() -> None:
        ranks = ranks_of(Machine(fails=0), most=0)
        ranks.lose("gone")
        with ranks.recalled(Nothing()), pytest.raises(WorkerError, match="gone"):
            await ranks.call_with_recovery(lambda: ranks.peers[0].call("engine.step"))

    run(main)


def test_a_stop_ends_a_recovery_that_takes_longer_than_its_grace() -> None:
    async def main() -> None:
        machine = Machine(fails=9)
        ranks = ranks_of(machine)
        with ranks.recalled(Nothing()):
            ranks.lose("worker trainer-0 was killed")
            ranks.stop(2.0)
            with pytest.raises(
                WorkerError, match=r"(?s)trainer-0 was killed.*trainer\.resume=auto"
            ):
                await ranks.ready()
        assert asyncio.get_running_loop().time() == 2.0

    run(main)


def test_the_grace_of_a_stop_ends_with_its_run() -> None:
    """A session may run again after a stop. Recoveries of the later run have their full time."""

    async def main() -> None:
        ranks = ranks_of(Machine(fails=2))
        with ranks.recalled(Nothing()):
            ranks.stop(2.0)
            ranks.stop(2.0)
        ranks.stop(2.0)
        with ranks.recalled(Nothing()):
            ranks.lose("worker trainer-0 was killed")
            await ranks.ready()
        assert asyncio.get_running_loop().time() == 1 + 2 + 4, "after the third start"

    run(main)


class Diverged(Machine):
    """A rank whose steps are not finite."""

    name, death = "trainer-0", None

    async def call(self, *call: Any) -> None:
        raise NotFinite("trainer-0: 3 optimizer steps in a row")


def test_a_batch_that_ends_the_run_can_be_read_again(tmp_path: Path) -> None:
    samples = (Sample(Prompt(5, tokens_of([1, 2]), "x", "sim"), (), 3),)
    batch = TrainBatch(samples, 3)
    rank: Any = Diverged(fails=0)
    engine = RecoveringTrainEngine(TrainerGroup([rank], rank, max_restarts=3))
    engine.folder = tmp_path
    with pytest.raises(
        NotFinite, match=r"in a row\. The last batch is in .*nonfinite-000003\.json"
    ):
        asyncio.run(engine.step(batch))
    assert codec.from_json((tmp_path / "nonfinite-000003.json").read_bytes(), TrainBatch) == batch
    engine.folder = tmp_path / "missing"
    with pytest.raises(NotFinite, match="could not be saved"):
        asyncio.run(engine.step(batch))
