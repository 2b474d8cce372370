"""Bugs of replicas that join and leave a running run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.rollout.roster import Roster
from millrace.run.keeper import Keeper
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
        async def mutant(self: Keeper, replica: int) -> None:
            engine = self._engines[replica]
            await self.starter.end(engine.peer)
            self.roster.lose(replica, self.roster.incarnation(replica), "it left")
            await leave(self, replica)

        return mutant

    return patched(Keeper, "leave", make)


SCALINGS: dict[str, Callable[[], Any]] = {
    "joiner serving at once": joiner_serving_at_once,
    "leaver ended too early": leaver_ended_too_early,
}
