"""Progress notes and metrics about restarts of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millrace.rollout.roster import Change, ReplicaState, Roster
from millrace.runtime.replica import RemoteRolloutEngine
from millrace.runtime.trainer_group import TrainerGroup


class RecoveryNotes:
    """A listener of the roster. `note` prints a line for each loss and each recovery."""

    def __init__(
        self, roster: Roster, engines: Sequence[RemoteRolloutEngine], ranks: TrainerGroup
    ) -> None:
        self.note: Callable[[str], None] = lambda text: None
        self._roster, self._engines, self._ranks = roster, engines, ranks
        self._lost_at: dict[int, float] = {}
        """When each replica that does not serve was lost."""
        self._joined_at: dict[int, float] = {}
        """When the worker of each replica that joins was there."""
        self._healed_s: list[float] = []
        """Seconds from a loss until the replica served again, since the last row."""

    def __call__(self, change: Change) -> None:
        replica, now = change.replica, asyncio.get_running_loop().time()
        if change.to is ReplicaState.LEFT:
            self._lost_at.pop(replica, None)
            self._joined_at.pop(replica, None)
            self.note(f"replica rollout-{replica} left the run: {change.why}")
        elif change.to is ReplicaState.LIVE and replica in self._joined_at:
            seconds = now - self._joined_at.pop(replica)
            self.note(f"replica rollout-{replica} serves, {seconds:.1f} s after its worker came")
        elif change.to is ReplicaState.STALE and replica not in self._lost_at:
            self._joined_at[replica] = now
        elif change.to is ReplicaState.LIVE:
            seconds = now - self._lost_at.pop(replica, now)
            self._healed_s.append(seconds)
            self.note(f"replica rollout-{replica} serves again, {seconds:.1f} s after its loss")
        elif change.to is not ReplicaState.STALE:
            self._joined_at.pop(replica, None)
            self._lost(change, again=replica in self._lost_at)
            self._lost_at.setdefault(replica, now)

    def _lost(self, change: Change, *, again: bool) -> None:
        """Say why a replica is lost and what follows. `again` means that its restart failed."""
        replica, roster = change.replica, self._roster
        told = f"replica rollout-{replica} {'did not start' if again else 'was lost'}: {change.why}"
        requests = self._engines[replica].requests
        if requests and not again:
            where = "go on elsewhere" if roster.live else "wait for a replica"
            told += f"; its {requests} requests {where}"
        if change.to is ReplicaState.LOST:
            follows = f"restart in {roster.backoff_s(replica):g} s"
        else:
            left = len(roster) - len(roster.ids(ReplicaState.RETIRED, ReplicaState.LEFT))
            with_whom = f"the run goes on with {left} of {len(roster)} replicas"
            follows = f"it is given up; {with_whom if left else 'no replica is left'}"
        self.note(f"{told}; {follows}")

    def figures(self) -> dict[str, float]:
        """Return the figures for a row, of each side from its first loss on."""
        return self._trainers() | self._replicas()

    def _trainers(self) -> dict[str, float]:
        ranks = self._ranks
        if not ranks.losses:
            return {}
        seconds, ranks.seconds = ranks.seconds, []
        return {
            "trainer/lost": float(ranks.losses),
            "trainer/restarts": float(ranks.restarts),
            "trainer/replayed_steps": float(ranks.replayed),
            **({"trainer/recovery_s": max(seconds)} if seconds else {}),
        }

    def _replicas(self) -> dict[str, float]:
        roster = self._roster
        scaled = roster.joined + roster.left
        if not (roster.losses or scaled):
            return {}
        healed, self._healed_s = self._healed_s, []
        moves = {"replicas/joined": float(roster.joined), "replicas/left": float(roster.left)}
        return {
            "replicas/live": float(len(roster.live)),
            "replicas/lost": float(roster.losses),
            "replicas/restarts": float(roster.restarts),
            **(moves if scaled else {}),
            **({"replicas/heal_s": max(healed)} if healed else {}),
        }
