"""Saves a run whose replicas with the live weights are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millrace.pipeline.record import RunRecord
from millrace.pipeline.trainer import Trainer
from millrace.rollout.replica_wait import check
from millrace.rollout.roster import Change, Roster
from millrace.run.stop import StopRequest
from millrace.waits.registry import current


@contextmanager
def saved_without_replicas(roster: Roster, stop: StopRequest) -> Iterator[None]:
    """Stop and save the run once every replica is given up, and then raise ReplicaLost.

    Every change of a replica is an event on its track.
    """
    check(roster)
    stream = current().registry

    def changed(change: Change) -> None:
        stream.at(f"rollout-{change.replica}", f"replica_{change.to}", why=change.why)
        if roster.over:
            stop.request()

    roster.saves = True
    try:
        with roster.subscribe(changed):
            yield
    finally:
        roster.saves = False
    check(roster)


async def validate_now(trainer: Trainer, record: RunRecord, phase: str) -> None:
    """Validate the live weights. Send them again if the replicas that had them are lost."""
    while not await record.validate_now(trainer.queue.ledger.version, phase):
        await trainer.republish_live()
        check(trainer.rollouter.pool.roster)
