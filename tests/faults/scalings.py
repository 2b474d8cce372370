"""Bugs of replicas that join and leave, with their nodes too, and of ranks that stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from millrace.replicas.roster import Roster
from millrace.replicas.scaling import Scaler
from millrace.replicas.supervisor import ReplicaSupervisor
from millrace.replicas.trainer_group import TrainerGroup
from tests.faults.planting import patched


def joiner_serving_at_once() -> Any:
    """A replica that joins serves before a sync has proven its weights."""

    def make(join: Any) -> Any:
        def mutant(self: Roster, replica: int) -> int:
            incarnation: int = join(self, replica)
            self.proven(replica, incarnation)
            return incarnation

        return mutant

    return patched(Roster, "join", make)


def leaver_ended_too_early() -> Any:
    """A replica that leaves gets requests until the end of its worker, which is then a loss."""

    def make(leave: Any) -> Any:
        async def mutant(self: ReplicaSupervisor, replica: int) -> None:
            engine = self.engines[replica]
            await self.starter.end(engine.peer)
            self.roster.lose(replica, self.roster.incarnation(replica), "it left")
            await leave(self, replica)

        return mutant

    return patched(ReplicaSupervisor, "leave", make)


def gone_node_counts_as_a_failure() -> Any:
    """A replica whose node is gone fails again and again, and is given up."""

    def make(leave: Any) -> Any:
        def mutant(self: Roster, replica: int, *why: str) -> None:
            (self.start_failed if why else partial(leave, self))(replica, *why)

        return mutant

    return patched(Roster, "leave", make)


def gone_node_is_followed_by_none() -> Any:
    """A replica that left with its node does not come back."""

    def make(fill: Any) -> Any:
        async def mutant(self: Scaler) -> None:
            return None

        return mutant

    return patched(Scaler, "_fill", make)


def rank_that_pauses_is_lost() -> Any:
    """A rank that stands still for a while is lost at once."""

    def make(all_: Any) -> Any:
        async def mutant(self: TrainerGroup, *args: Any) -> Any:
            try:
                async with asyncio.timeout(4.0):
                    return await all_(self, *args)
            except TimeoutError:
                self.peers[0].mark_dead("too slow")
                return await all_(self, *args)

        return mutant

    return patched(TrainerGroup, "_all", make)


SCALINGS: dict[str, Callable[[], Any]] = {
    "joiner serving at once": joiner_serving_at_once,
    "leaver ended too early": leaver_ended_too_early,
    "gone node counts as a failure": gone_node_counts_as_a_failure,
    "gone node is followed by none": gone_node_is_followed_by_none,
    "still rank is lost at once": rank_that_pauses_is_lost,
}
