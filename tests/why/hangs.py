"""Hangs of other systems, enacted again: real loops on the virtual clock, with one planted hang.

Each hang has the name of the thread that reports it. What it plants is the pattern of the wait, not
the code of that system.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from millrace.extras.faults.engines import (
    FaultyRollouts,
    FaultyTrainer,
    Ranks,
    Receiver,
    Sender,
)
from millrace.extras.faults.wire import Wire
from millrace.extras.faults.world import WorldLoop
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.ports import StepReport
from millrace.rollout.episode import EnvironmentAgent
from millrace.schedule.ledger import Ledger, Topic
from millrace.types import Ending
from millrace.waits.verdict import Verdict
from tests.why.enact import MOST_S, Hung, enact, never, patched, scenario, stuck


@dataclass(frozen=True)
class Hang:
    """One hang, and what must be said about it."""

    thread: str
    story: str
    plant: Callable[[Hung], Any]
    """Plants the hang: a context manager, or None if it acted on the attempt."""
    culprit: str
    """The whole name of the culprit."""
    says: str
    """A part of the sentence."""
    mode: str = "async_partial"
    validates: bool = False

    @property
    def name(self) -> str:
        return f"{self.thread}: {self.story}"


def run(hang: Hang) -> Verdict:
    """Run the loops until they stand still, and return the verdict."""
    made = scenario(hang.mode, validates=hang.validates, heals=False)
    verdict = enact(made, hang.plant, MOST_S)[-1]
    assert verdict.state == "still", f"{verdict.state}: {verdict.sentence}"
    return verdict


# -- what is planted


def at(seconds: float, act: Callable[[Hung], None]) -> Callable[[Hung], Any]:
    """Return a plant that acts after some virtual seconds."""

    def plant(attempt: Hung) -> None:
        asyncio.get_running_loop().call_later(seconds, act, attempt)

    return plant


def _reward(attempt: Hung) -> None:
    attempt.reward.hangs_s = 1e6


def _stops(attempt: Hung) -> None:
    worker = attempt.workers["rollout-1"]
    worker.stopped = True
    worker.link.stall(float("inf"))


def _unreported(attempt: Hung) -> None:
    worker = attempt.workers["rollout-1"]
    worker.dead = worker.link.closed = True


def _answers_lost(attempt: Hung) -> None:
    attempt.workers["rollout-1"].link.stall(float("inf"), 1)


def _all_stand_still(attempt: Hung) -> None:
    for name in ("rollout-0", "rollout-1"):
        attempt.workers[name].root.engine.stand_still(1e6)


def _one_stands_still(attempt: Hung) -> None:
    attempt.workers["rollout-1"].root.engine.stand_still(1e6)


def _tool(attempt: Hung) -> None:
    class Game:
        """An environment whose third reply never comes."""

        replies = 0

        async def open(self, prompt: Any) -> Any:
            return prompt.tokens

        async def reply(self, segments: Any) -> Any:
            Game.replies += 1
            if Game.replies > 3:
                await never()

        async def score(self) -> None:
            return None

        async def close(self) -> None:
            return None

    attempt.agent = EnvironmentAgent(lambda prompt: Game())  # type: ignore[arg-type,return-value]


def _own_agent(attempt: Hung) -> None:
    class Agent:
        """An agent that waits for an event of its own."""

        plays = 0

        async def play(self, session: Any) -> Any:
            Agent.plays += 1
            if Agent.plays > 4:
                await never()
            await session.draw(session.prompt.tokens)
            return Ending()

        async def close(self) -> None:
            return None

    attempt.agent = Agent()


def _task_swallowed(attempt: Hung) -> Any:
    def make(roll: Any) -> Any:
        async def planted(self: Rollouter, sample_id: int) -> None:
            if sample_id == 3:
                self.queue.do(self.queue.ledger.start, sample_id)
                return  # The error of the task is lost, and so is the sample.
            await roll(self, sample_id)

        return planted

    return patched(Rollouter, "_roll", make)


def _permit_leaks(attempt: Hung) -> Any:
    def make(drop: Any) -> Any:
        return lambda self, sample_id, prompt, error: None

    attempt.reward.failures = 1
    return patched(Rollouter, "_drop", make)


def _wake_up_lost(attempt: Hung) -> Any:
    def make(wake: Any) -> Any:
        def planted(self: SampleQueue, topic: Topic) -> None:
            if topic is not Topic.SLOTS or self.ledger.version < 1:
                wake(self, topic)

        return planted

    return patched(SampleQueue, "wake", make)


def _gate_stays_closed(attempt: Hung) -> Any:
    def make(interrupt: Any) -> Any:
        async def planted(self: Rollouter) -> None:
            await interrupt(self)
            self._gate.set = lambda: None  # type: ignore[method-assign]

        return planted

    return patched(Rollouter, "_interrupt", make)


def _nothing_admitted(attempt: Hung) -> Any:
    def make(can_admit: Any) -> Any:
        return lambda self: self.version < 1 and can_admit(self)

    return patched(Ledger, "can_admit", make)


def _parcels_lost(attempt: Hung) -> Any:
    """Rank 1 believes that its bucket arrived."""

    def make(send: Any) -> Any:
        async def planted(self: Any, name: str, *what: int) -> Any:
            box, own = self._of(name).boxes["rollout-1"], asyncio.current_task()
            if name != "trainer-1":
                return await send(self, name, *what)
            put = box.put_nowait

            def loses(parcel: Any) -> None:
                if asyncio.current_task() is own:
                    parcel.staged.set_result(True)
                else:
                    put(parcel)

            box.put_nowait = loses
            return await send(self, name, *what)

        return planted

    return patched(Wire, "send", make)


def _network(attempt: Hung) -> Any:
    def make(meet: Any) -> Any:
        async def planted(self: Ranks) -> None:
            self.count += self.count == 2 and self._meetings > 2
            await meet(self)

        return planted

    return patched(Ranks, "meet", make)


def _rank_leaves(attempt: Hung) -> Any:
    """Rank 1 ends its step without the all-reduce of the others."""

    def make(step: Any) -> Any:
        @wraps(step)
        async def planted(self: FaultyTrainer, batch: Any) -> Any:
            if self._rank == 1 and len(self.lineage) >= 4:
                return StepReport(1)
            return await step(self, batch)

        return planted

    return patched(FaultyTrainer, "step", make)


def _thread(attempt: Hung) -> Any:
    """Threads that write to the disk never return, from the first checkpoint on."""

    def make(run_in_executor: Any) -> Any:
        def planted(self: Any, executor: Any, func: Any, *args: Any) -> Any:
            if "_finish" in repr(func) or any("_finish" in repr(a) for a in args):
                return self.create_future()
            return run_in_executor(self, executor, func, *args)

        return planted

    return patched(WorldLoop, "run_in_executor", make)


def _rank(number: int) -> Callable[..., bool]:
    return lambda self, *_: self._rank == number


def _end(name: str) -> Callable[..., bool]:
    """Return the condition of one end of the weight sync."""
    return lambda self, *_: self._name == name


def _session(start: str) -> Callable[..., bool]:
    return lambda self, tokens, params, session: session.startswith(start)


HANGS = [
    Hang("verl#6673", "one score blocks the run for ever", at(2, _reward), "the reward", "the score of prompt"),
    Hang("SkyRL#1173", "29 hours at 127 of 128: one straggler of a group",
         lambda a: stuck(FaultyRollouts, "generate", _session("4/1")), "rollout-*/engine.generate", "has served engine.generate", "colocate_sync"),
    Hang("SkyRL#1691", "an error lost in a task: its sample never ends", _task_swallowed, "rollouter and trainer", "each waits for the other"),
    Hang("verl#6544", "a permit leaks on the path of a failure", _permit_leaks, "rollouter and trainer", "each waits for the other"),
    Hang("TRL#6796", "a wake-up of the producer is lost", _wake_up_lost, "rollouter and trainer", "a free slot"),
    Hang("prime-rl#3004", "the trainer waits for rollouts, and they for the end of a pause", _gate_stays_closed, "*trainer*", "the end of the pause"),
    Hang("NeMo#3066", "nothing is admitted after a resume", _nothing_admitted, "rollouter and trainer", "each waits for the other"),
    Hang("verl#7990", "colocated: the replica does not wake for the sync",
         lambda a: stuck(FaultyRollouts, "wake_weights", call=3), "rollout-?/engine.wake_weights", "engine.wake_weights", "colocate_partial"),
    Hang("ms-swift#6962", "colocated: the replica does not sleep",
         lambda a: stuck(FaultyRollouts, "sleep", call=3), "rollout-?/engine.sleep", "engine.sleep", "colocate_sync"),
    Hang("verl#7846", "a doubled resume locks all engines", at(2, _all_stand_still), "rollout-?/engine.generate", "nothing in it has moved"),
    Hang("verl-omni#433", "one engine is dead inside and still answers", at(2, _one_stands_still), "rollout-1/engine.generate", "nothing in it has moved"),
    Hang("verl#7180", "an interrupted request does not come back",
         lambda a: stuck(FaultyRollouts, "generate", _session("5/")), "rollout-?/engine.generate", "wait"),
    Hang("prime-rl#2912", "the validation holds the nodes",
         lambda a: stuck(FaultyRollouts, "generate", _session("val/")), "rollout-?/engine.generate", "engine.generate", validates=True),
    Hang("prime#784", "a score of the first validation never comes", lambda a: stuck(type(a.reward), "score", lambda self, prompt, _: prompt.index >= 10_000), "the reward", "the score of prompt 1000", validates=True),
    Hang("NeMo#3488", "a rank does not come to the all-reduce", lambda a: stuck(FaultyTrainer, "step", _rank(1), 3), "trainer-1/engine.step", "everyone else waits for its all-reduce"),
    Hang("NeMo#3938", "all ranks come to the all-reduce, and it does not end", _network, "the network of a step", "all have come to all-reduce"),
    Hang("verl#3734", "a rank makes fewer micro-batches than the others", _rank_leaves, "trainer-1", "trainer rank 1 does not serve all-reduce"),
    Hang("NeMo#3238", "a rank does not send its weights", lambda a: stuck(Sender, "transfer", _end("trainer-1"), 3), "trainer-1/sender.transfer", "sender.transfer"),
    Hang("prime-rl#3030", "a replica does not come to the meeting of a sync", lambda a: stuck(Receiver, "regroup", _end("rollout-1")), "rollout-1/receiver.regroup", "everyone else waits for its meeting"),
    Hang("open-instruct#1535", "a bucket is lost on the way to a replica", _parcels_lost, "trainer-?", "does not serve bucket 1"),
    Hang("trl#3467", "a replica does not make the new weights live", lambda a: stuck(Receiver, "activate", _end("rollout-1"), 3), "rollout-1/receiver.activate", "receiver.activate"),
    Hang("verl#5815", "a rank does not come to the save", lambda a: stuck(FaultyTrainer, "save", _rank(1)), "trainer-1/engine.save", "everyone else waits for its all-reduce"),
    Hang("NeMo#3504", "a shared file system does not take a checkpoint", _thread, "the disk", "the files of version"),
    Hang("OpenRLHF#865", "a rank does not come to the start", lambda a: stuck(FaultyTrainer, "begin", _rank(1)), "trainer-1/engine.begin", "trainer rank 1"),
    Hang("ROLL#215", "a replica's process is stopped", at(2, _stops), "rollout-1", "is stopped"),
    Hang("SkyRL#1350", "a process is dead, and nobody reports it", at(2, _unreported), "rollout-1", "is dead"),
    Hang("NeMo#2899", "the answers of a replica are lost", at(2, _answers_lost), "rollout-1", "rollout-1 does not serve"),
    Hang("verl#4334", "an environment does not answer", _tool, "the environment", "the answer to reply"),
    Hang("prime-rl#1934", "an agent waits for an event of its own", _own_agent, "session */*", "waits for nothing that is registered"),
]  # fmt: skip
