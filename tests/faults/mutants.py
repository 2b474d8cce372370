"""Bugs that the simulation must find. Each is planted in the real code while a block runs.

`python -m tests.faults.mutants` prints how many seeds each bug needs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, islice
from typing import Any

from millrace.data.curriculum import Curriculum
from millrace.errors import WorkerError
from millrace.extras.faults.scenario import draw
from millrace.extras.faults.world import run_world
from millrace.observe import metrics
from millrace.pipeline import journal_file, trainer
from millrace.pipeline.checkpoint import Checkpoints
from millrace.pipeline.record import RunRecord
from millrace.pipeline.replay import JournalState
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.trainer import Trainer
from millrace.process.rpc import Peer
from millrace.replicas.pool import RolloutPool
from millrace.replicas.roster import ReplicaState, Roster
from millrace.replicas.trainer_group import TrainerGroup
from millrace.replicas.weight_sync import WeightSyncDriver
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger, State
from tests.faults.planting import patched
from tests.faults.recoveries import RECOVERIES
from tests.faults.scalings import SCALINGS

Plant = Callable[[], Any]


def ledger_drop() -> Any:
    """A sample that is dropped takes its younger neighbour along."""

    def make(drop: Any) -> Any:
        def mutant(self: Ledger, sample_id: int, reason: str) -> None:
            drop(self, sample_id, reason)
            if sample_id + 1 in self.ids(State.READY):
                drop(self, sample_id + 1, "")
                self.dropped.pop("")
                self.admitted -= 1

        return mutant

    return patched(Ledger, "drop", make)


def lag_off_by_one() -> Any:
    """A slot is free one window too early: when its weights are sealed."""

    def make(can_admit: Any) -> Any:
        def mutant(self: Ledger) -> bool:
            sealed = self.count(State.SEALED)
            self._most = self.schedule.capacity + sealed
            room = len(self._slots) < self._most
            return room and (self.limit is None or self.retired + self.occupied < self.limit)

        return mutant

    return patched(Ledger, "can_admit", make)


def capacity_inflated_by_a_resume() -> Any:
    """Restored samples do not count against the capacity."""

    def make(restore: Any) -> Any:
        def mutant(cls: type[Ledger], schedule: Any, snapshot: Any, limit: Any = None) -> Ledger:
            ledger: Ledger = restore.__func__(cls, schedule, snapshot, limit)
            share = schedule.staleness_threshold + ledger.occupied / schedule.window
            ledger.schedule = replace(schedule, staleness_threshold=share)
            ledger._most = ledger.schedule.capacity
            return ledger

        return classmethod(mutant)

    return patched(Ledger, "restore", make)


def lost_slot() -> Any:
    """The slot of a dropped sample is never free again."""

    def make(can_admit: Any) -> Any:
        def mutant(self: Ledger) -> bool:
            lost = sum(self.dropped.values())
            return bool(can_admit(self)) and self.occupied + lost < self.schedule.capacity

        return mutant

    return patched(Ledger, "can_admit", make)


def cursor_ahead_of_consumption() -> Any:
    """A checkpoint leaves out samples that have not started, but counts them as dropped."""

    def make(snapshot: Any) -> Any:
        def mutant(self: Ledger) -> Any:
            cut = snapshot(self)
            slots = [(i, s) for i, s in cut.slots if s.state is State.READY or s.progress]
            lost = len(cut.slots) - len(slots)
            return replace(cut, slots=slots, dropped=cut.dropped | ({"": lost} if lost else {}))

        return mutant

    return patched(Ledger, "snapshot", make)


def swallowed_exception() -> Any:
    """The loss of a replica looks like an interruption, and nobody hears of it."""

    def make(mark_dead: Any) -> Any:
        def mutant(self: Peer, reason: str) -> None:
            if self.name.startswith("rollout"):
                self.on_death = lambda reason: None
            mark_dead(self, reason)

        return mutant

    def make_pool(generate: Any) -> Any:
        async def mutant(self: RolloutPool, *args: Any) -> Any:
            replica = self.roster.live[0] if self.roster.live else 0
            try:
                return await self.draw_on(replica, *args)
            except WorkerError:
                return ()

        return mutant

    stack = ExitStack()
    stack.enter_context(patched(Peer, "mark_dead", make))
    stack.enter_context(patched(RolloutPool, "generate", make_pool))
    return stack


def stale_replica_serving() -> Any:
    """A sync forgets the last of several replicas."""

    def make(activate: Any) -> Any:
        async def mutant(self: WeightSyncDriver, replica: int, *where: int) -> float:
            if where[-1] and len(self._proven) > 1 and replica == max(self._proven):
                return 0.0
            return float(await activate(self, replica, *where))

        return mutant

    return patched(WeightSyncDriver, "_activate", make)


def restarted_replica_serving_at_once() -> Any:
    """A restarted replica serves before a sync has proven its weights."""

    def make(restarted: Any) -> Any:
        def mutant(self: Roster, replica: int) -> int:
            incarnation: int = restarted(self, replica)
            self.proven(replica, incarnation)
            return incarnation

        return mutant

    return patched(Roster, "restarted", make)


def restarted_replica_idle_for_ever() -> Any:
    """A replica that was restarted never serves again, if others do."""

    def make(proven: Any) -> Any:
        def mutant(self: Roster, replica: int, incarnation: int) -> bool:
            stale = self.state(replica) is ReplicaState.STALE
            return bool(stale and self.live) or bool(proven(self, replica, incarnation))

        return mutant

    return patched(Roster, "proven", make)


def double_commit() -> Any:
    """A step whose answer is late is made again."""

    def make(step: Any) -> Any:
        async def mutant(self: TrainerGroup, batch: Any) -> Any:
            loop = self.peers[0]
            report = await step(self, batch)
            if loop._next_id % 7 == 0:
                report = await step(self, batch)
            return report

        return mutant

    return patched(TrainerGroup, "step", make)


def final_validation_skipped() -> Any:
    """A run that saved its last version does not validate it."""

    def make(validate_now: Any) -> Any:
        async def mutant(self: RunRecord, version: int, phase: str) -> bool:
            return self._saved == version or bool(await validate_now(self, version, phase))

        return mutant

    return patched(RunRecord, "validate_now", make)


def wrong_denominator() -> Any:
    """The mean reward of a version divides by one more, if its window is short."""

    def make(rewards: Any) -> Any:
        def mutant(self: Any) -> Any:
            row = rewards(self)
            count = sum(len(s.trajectories) for s, _ in self._samples)
            if len(self._samples) % 2:
                row["reward/mean"] *= count / (count + 1)
            return row

        return mutant

    return patched(metrics.VersionMetrics, "_rewards", make)


def filter_off_after_a_failover() -> Any:
    """Samples with equal outcomes are trained once a replica was lost."""

    def make(finish: Any) -> Any:
        def mutant(self: Rollouter, *finished: Any) -> None:
            if self.pool.roster.losses:
                self.dynamic_sampling = None
            finish(self, *finished)

        return mutant

    return patched(Rollouter, "_finish", make)


def pause_without_end() -> Any:
    """Rollouts stay paused after an interrupted pause for a version."""

    def make(publish: Any) -> Any:
        async def mutant(self: Trainer) -> None:
            await publish(self)
            if self.queue.ledger.version == 2:
                self.rollouter._gate.clear()

        return mutant

    return patched(Trainer, "_publish", make)


def older_checkpoint() -> Any:
    """A resume takes the oldest complete checkpoint."""

    def make(all_: Any) -> Any:
        return lambda self: all_(self)[:1]

    return patched(Checkpoints, "all", make)


def last_save_skipped() -> Any:
    """A run ends without the checkpoint of its last version."""

    def make(checkpoint: Any) -> Any:
        async def mutant(self: RunRecord, snapshot: Any, *, last: bool = False) -> None:
            if not last:
                await checkpoint(self, snapshot)

        return mutant

    return patched(RunRecord, "checkpoint", make)


def journal_replays_a_trained_sample() -> Any:
    """A resume gives a slot the result of the sample before, which is used already."""

    def make(recall: Any) -> Any:
        def mutant(self: JournalState, *args: Any) -> Any:
            known = recall(self, *args)
            if known is None or known.sample is None:
                return known
            used = self.__dict__.get("used", known.sample)
            self.__dict__["used"] = known.sample
            return replace(known, sample=used)

        return mutant

    return patched(JournalState, "recall", make)


def torn_tail_accepted() -> Any:
    """The journal's reader takes a record that a crash cut short."""

    def make(payload: Any) -> Any:
        def mutant(data: bytes, offset: int) -> Any:
            start = offset + journal_file._HEAD.size
            return payload(data, offset) or memoryview(data)[start:] if start < len(data) else None

        return mutant

    return patched(journal_file, "_payload", make)


def journal_forgets_what_it_synced() -> Any:
    """A resume leaves out the last finished sample of the journal."""

    def make(settle: Any) -> Any:
        def mutant(self: JournalState, ledger: Ledger, **options: Any) -> None:
            if self.finished:
                self.finished.popitem()
            settle(self, ledger, **options)

        return mutant

    return patched(JournalState, "drop_unusable", make)


def sampler_sees_the_newest_outcomes() -> Any:
    """The row of a prompt depends on the outcomes that happen to be known when it is admitted."""

    def make(outcomes: Any) -> Any:
        def mutant(self: Curriculum, count: int) -> Any:
            return outcomes(self, self._ended)

        return mutant

    return patched(Curriculum, "_outcomes", make)


def sampler_does_not_wait() -> Any:
    """A prompt is admitted although an outcome that decides its row is not known yet."""
    return patched(Curriculum, "ready", lambda ready: lambda self, i: True)


def sampler_forgets_outcomes() -> Any:
    """After a resume, the first prompts have other scores."""

    def make(restore: Any) -> Any:
        def mutant(self: Curriculum, checkpoint: Any, admitted: int, slots: Any) -> None:
            restore(self, checkpoint, admitted, slots)
            self._scores[: self._count // 2] = 0.0

        return mutant

    return patched(Curriculum, "restore", make)


def window_twice() -> Any:
    """A response goes on twice."""

    def make(published: Any) -> Any:
        def mutant(self: Ledger) -> list[int]:
            ids: list[int] = published(self)
            self._rests.extend([*self._rests][-1:])
            self._going_on = self.continued + self.resting
            return ids

        return mutant

    return patched(Ledger, "published", make)


def window_lost() -> Any:
    """The last of the responses that go on is forgotten."""

    def make(published: Any) -> Any:
        def mutant(self: Ledger) -> list[int]:
            ids: list[int] = published(self)
            if len(self._rests) > 1:
                self._rests.pop()
                self._going_on -= 1
            return ids

        return mutant

    return patched(Ledger, "published", make)


def window_lost_by_a_resume() -> Any:
    """A resume forgets the responses that have no slot."""

    def make(restore: Any) -> Any:
        def mutant(cls: type[Ledger], schedule: Any, snapshot: Any, limit: Any = None) -> Ledger:
            bare = replace(snapshot, rests=[])
            ledger: Ledger = restore.__func__(cls, schedule, bare, limit)
            return ledger

        return classmethod(mutant)

    return patched(Ledger, "restore", make)


def window_with_values_of_another() -> Any:
    """A response keeps the values of its newest window alone."""

    def make(after: Any) -> Any:
        def mutant(sample: Any, values: Any) -> Any:
            prompt = after(sample, values)
            drawn = len(prompt.response_before)
            wrong = (values * drawn)[:drawn]
            return replace(prompt, continues=replace(prompt.continues, values=wrong))

        return mutant

    return patched(trainer, "next_prompt", make)


def window_ended_early() -> Any:
    """A response that fills its window ends there, and is scored."""
    return patched(SampleRoller, "_in_window", lambda cut: lambda self, prompt, i, t: t)


MUTANTS: dict[str, Plant] = {
    "ledger drop": ledger_drop,
    "lag off by one": lag_off_by_one,
    "capacity inflated by a resume": capacity_inflated_by_a_resume,
    "lost slot": lost_slot,
    "cursor ahead of consumption": cursor_ahead_of_consumption,
    "swallowed exception": swallowed_exception,
    "stale replica serving": stale_replica_serving,
    "restarted replica serving at once": restarted_replica_serving_at_once,
    "restarted replica idle for ever": restarted_replica_idle_for_ever,
    "double commit": double_commit,
    "final validation skipped": final_validation_skipped,
    "wrong denominator": wrong_denominator,
    "filter off after a failover": filter_off_after_a_failover,
    "rollouts idle for ever": pause_without_end,
    "older checkpoint": older_checkpoint,
    "last save skipped": last_save_skipped,
    "journal replays a trained sample": journal_replays_a_trained_sample,
    "torn tail accepted": torn_tail_accepted,
    "journal forgets what it synced": journal_forgets_what_it_synced,
    "sampler sees the newest outcomes": sampler_sees_the_newest_outcomes,
    "sampler does not wait": sampler_does_not_wait,
    "sampler forgets outcomes at a resume": sampler_forgets_outcomes,
    "window twice": window_twice,
    "window lost": window_lost,
    "window lost by a resume": window_lost_by_a_resume,
    "window with values of another": window_with_values_of_another,
    "window ended early": window_ended_early,
    **RECOVERIES,
    **SCALINGS,
}
"""The planted bugs by name."""


_NEEDS = {
    "joiner": "scale",
    "leaver": "scale",
    "gone": "node_leaves",
    "still": "rank_stands",
    "hung": "sender_hangs",
}
"""The kind of fault that a bug needs, by the first word of its name."""


def seeds_of(name: str, most: int) -> Sequence[int]:
    """Return the seeds for a bug.

    Those of a recovery need worlds in which the trainer is lost. Others need a kind of fault.
    """
    if kind := _NEEDS.get(name.partition(" ")[0]):
        worlds = (k for k in count() if any(kind in fault.kind for fault in draw(k).faults))
        return [*islice(worlds, most)]
    if name.startswith("window"):
        return [*islice((k for k in count() if draw(k).config.algorithm.tppo.window), most)]
    return range(3, 4 * most, 4) if name.startswith("recovery") else range(most)


def first_seed(plant: Plant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed that finds a bug, and what it says. None if no seed does."""
    with plant():
        for seed in seeds:
            if violation := run_world(draw(seed)).violation:
                return seed, violation
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    missed = 0
    for name in options.names or MUTANTS:
        start = time.process_time()
        found = first_seed(MUTANTS[name], seeds_of(name, options.most))
        seconds = time.process_time() - start
        missed += found is None
        seeds, text = ("none", "not found") if found is None else (found[0] + 1, found[1][:70])
        sys.stdout.write(f"| {name} | {seeds} | {seconds:.1f} | {text} |\n")
        sys.stdout.flush()
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
