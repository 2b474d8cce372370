"""Bugs of the recovery of a lost trainer, which the simulation must find."""

from __future__ import annotations

from typing import Any

from millrace.errors import WorkerError
from millrace.pipeline.replay import Replay
from millrace.ports import StepReport
from millrace.process.rpc import all_of
from millrace.replicas.trainer_group import TrainerGroup
from tests.faults.planting import patched


def recovery_makes_a_step_twice() -> Any:
    """A recovery trains the last step twice."""

    def make(again: Any) -> Any:
        async def mutant(self: Replay, engine: Any, *args: Any) -> Any:
            step, batches = engine.step, list[Any]()

            async def noted(batch: Any) -> Any:
                batches.append(batch)
                return await step(batch)

            engine.step = noted
            found = await again(self, engine, *args)
            for batch in batches[-1:]:
                await step(batch)
            return found

        return mutant

    return patched(Replay, "replay", make)


def recovery_leaves_out_a_step() -> Any:
    """A recovery does not train the first step again."""

    def make(again: Any) -> Any:
        async def mutant(self: Replay, engine: Any, *args: Any) -> Any:
            step, left_out = engine.step, list[Any]()

            async def late(batch: Any) -> Any:
                return await step(batch) if left_out else left_out.append(batch)

            engine.step = late
            return await again(self, engine, *args)

        return mutant

    return patched(Replay, "replay", make)


def recovery_forgets_a_kept_version() -> Any:
    """A recovery does not keep the version again that is on its way."""

    def make(again: Any) -> Any:
        async def mutant(self: Replay, engine: Any, kept: Any, keep: Any) -> Any:
            return await again(self, engine, None, keep)

        return mutant

    return patched(Replay, "replay", make)


def late_answer_of_a_lost_rank() -> Any:
    """The ranks of a recovery go on with the samples that a lost rank may not have trained."""

    def make(again: Any) -> Any:
        async def mutant(self: TrainerGroup, *call: Any) -> Any:
            incarnation = self.incarnation
            try:
                return await all_of(self.peers, f"engine.{call[0]}", *call[1:])
            except WorkerError:
                if self.able and await self.gone(incarnation):
                    return [StepReport(1)]
                return await again(self, *call)

        return mutant

    return patched(TrainerGroup, "_all", make)


def hung_sender_is_kept() -> Any:
    """Ranks whose transfers break off again and again are not started anew."""

    def make(lose: Any) -> Any:
        def mutant(self: TrainerGroup, why: str) -> None:
            if "that broke off" not in why:
                lose(self, why)

        return mutant

    return patched(TrainerGroup, "lose", make)


RECOVERIES = {
    "recovery makes a step twice": recovery_makes_a_step_twice,
    "recovery leaves out a step": recovery_leaves_out_a_step,
    "recovery forgets a kept version": recovery_forgets_a_kept_version,
    "late answer of a lost rank": late_answer_of_a_lost_rank,
    "hung sender is kept": hung_sender_is_kept,
}
"""The planted bugs by name."""
