"""Replays the steps since a checkpoint, from the journal.

    consumes   a checkpoint; the journal since then
    produces   for a new driver, the samples and the order of training of an earlier attempt; for
               new ranks, the weights that the lost ones had. On a CPU they are the same bit for bit

A resumed run trains the journal's steps again, from the same samples in the same order. So its
versions are those of the earlier attempt, and tokens of these versions stay valid. This ends where
the settings changed, where the journal has a gap, or at a version that got other samples. Tokens of
later versions are drawn again.

New ranks of the trainer make the same steps without the loops, because the driver has the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from millrace.errors import NotRestorable
from millrace.pipeline import journal_file
from millrace.pipeline.checkpoint import Checkpoints, read_ledger
from millrace.pipeline.journal_file import (
    Batch,
    Finished,
    Header,
    Progress,
    Sealed,
    Step,
    checksum,
)
from millrace.ports import Prompts, TrainBatch, TrainEngine
from millrace.rollout.dynamic_sampling import EQUAL_OUTCOMES
from millrace.schedule.ledger import Ledger, Slot, State
from millrace.types import Author, PolicyVersion, Sample, Thread, Trajectory

_UNDRAWN = Trajectory()


@dataclass(frozen=True, slots=True)
class RecoveredSample:
    """A sample that the journal recovers, whole or in part."""

    version: PolicyVersion = 0
    """The newest version that drew one of its tokens."""
    sample: Sample | None = None
    """The finished sample."""
    progress: tuple[Trajectory, ...] = ()
    dropped: str = ""
    """The reason for which it was dropped."""

    @property
    def tokens(self) -> int:
        """Return the tokens that the policy drew for it."""
        trajectories = self.progress if self.sample is None else _all(self.sample)
        return sum(t.num_policy_tokens + t.dead_tokens for t in trajectories)


@dataclass
class JournalState:
    """The facts of an earlier attempt that the run has not used yet."""

    finished: dict[int, Finished] = field(default_factory=dict)
    progress: dict[int, dict[int, Trajectory]] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    """In their order, once those that are unusable are dropped."""
    sealed: dict[int, Sealed] = field(default_factory=dict)
    valid: PolicyVersion = 0
    """The last version whose tokens may be used."""
    same: bool = True
    """Whether the settings are those of the earlier attempt."""
    lost: int = 0
    """Known tokens that must be drawn again."""
    started: set[int] = field(default_factory=set)
    """Every sample that was admitted."""
    prompts: dict[int, int] = field(default_factory=dict)
    """The checksums of the prompts of running samples."""
    damage: str = ""
    """What is wrong with the rest of the journal, if anything."""

    # -- reading

    def add(self, batch: Batch) -> None:
        """Add the next facts."""
        self.started.update(i for i, _ in batch.admitted)
        for sealed in batch.sealed:
            before = self.sealed.get(sealed.version)
            if before is not None and before.ids != sealed.ids:
                self._cut(sealed.version - 1)
                self._forget_steps(sealed.steps + 1)
            self.sealed[sealed.version] = sealed
        for step in batch.steps:
            if step.number in self.steps and self.steps[step.number].ids != step.ids:
                self._forget_steps(step.number)
            self.steps[step.number] = step
        for one in batch.progress:
            self.progress.setdefault(one.sample_id, {}).update(one.trajectories)
            self.prompts[one.sample_id] = one.prompt
        for done in batch.finished:
            self.finished[done.sample_id] = done
            self.progress.pop(done.sample_id, None)
        for sample_id, reason in batch.dropped:
            if reason != EQUAL_OUTCOMES or sample_id not in self.finished:
                self.forget(sample_id)  # A finished one meets the filter again.
                self.dropped[sample_id] = reason

    def drop_unusable(self, ledger: Ledger, *, same: bool) -> None:
        """Keep what a run that begins with `ledger` may use. `same` says: with equal settings."""
        waiting, admitted = {*ledger.ids(State.WAITING)}, ledger.admitted
        for i in [*self.finished, *self.progress, *self.dropped]:
            if i < admitted and i not in waiting:
                self.forget(i)
        self.same = same
        if not same:
            self.steps, self.sealed, self.dropped = {}, {}, {}
        ready = {*ledger.ids(State.READY)}
        while True:
            self.steps = self._followable(ledger.local_steps + 1, ready)
            last, version = ledger.local_steps + len(self.steps), ledger.version
            while (known := self.sealed.get(version + 1)) and known.steps <= last:
                version += 1
            self._cut(version)
            if self._followable(ledger.local_steps + 1, ready) == self.steps:
                return

    def _followable(self, number: int, ready: set[int]) -> dict[int, Step]:
        """Return the steps from `number` on whose samples are all known."""
        plan: dict[int, Step] = {}
        while step := self.steps.get(number):
            if not all(i in ready or i in self.finished for i in step.ids):
                break
            plan[number] = step
            number += 1
        return plan

    # -- use

    @property
    def plan(self) -> list[int]:
        """The samples to train first, in order."""
        return [i for step in self.steps.values() for i in step.ids]

    def recall(self, sample_id: int, slot: Slot, live: PolicyVersion) -> RecoveredSample | None:
        """Return what is known of the sample in `slot`. A use of it is followed by `forget`."""
        if (reason := self.dropped.get(sample_id)) is not None:
            return RecoveredSample(dropped=reason)
        if (done := self.finished.get(sample_id)) is not None:
            trajectories = _all(done)
            prompt = done.prompt
        elif (some := self.progress.get(sample_id)) is not None:
            known = dict(enumerate(slot.progress)) | some
            trajectories = tuple(known.get(k, _UNDRAWN) for k in range(max(known) + 1))
            prompt = self.prompts[sample_id]
        else:
            return None
        versions = [s.version for t in trajectories for s in t.segments if s.tokens]
        planned = any(sample_id in step.ids for step in self.steps.values())
        # With equal settings it is trained after as many samples as before the restart, so the
        # bound on its lag holds.
        too_old = not self.same and any(0 <= v < slot.version for v in versions)
        if prompt != checksum(slot.prompt.tokens) or too_old:
            self.lost += _tokens(trajectories)
            self.forget(sample_id)
            if prompt != checksum(slot.prompt.tokens):
                # Numbers of samples have moved, so a dropped one may be another response now.
                self.dropped.clear()
            if planned:
                self.void(live)
            return None
        newest = max(versions, default=-1)
        if done is None:
            return RecoveredSample(newest, progress=trajectories)
        oldest = min((slot.version, *(v for v in versions if v >= 0)))
        sample = Sample(slot.prompt, done.trajectories, oldest, done.greedy)
        return RecoveredSample(newest, sample)

    def until(self, known: RecoveredSample, live: PolicyVersion) -> RecoveredSample:
        """Return what is known, without tokens of versions that are not live yet."""
        if known.version <= live:
            return known
        kept = tuple(until(t, live) for t in known.progress)
        self.lost += _tokens(known.progress) - _tokens(kept)
        return RecoveredSample(live, progress=kept)

    def forget(self, sample_id: int) -> bool:
        """Forget a sample. Return whether its result was known."""
        self.progress.pop(sample_id, None)
        self.dropped.pop(sample_id, None)
        return self.finished.pop(sample_id, None) is not None

    def compare(self, version: PolicyVersion, ids: list[int]) -> bool:
        """Compare the samples of a sealed version. Return whether the rest stays valid."""
        known = self.sealed.pop(version, None)
        if known is None or known.ids == ids:
            return True
        self.void(version - 1)
        return False

    def void(self, version: PolicyVersion) -> None:
        """Use no token of versions after `version`, and no order of training."""
        self.steps.clear()
        self.sealed.clear()
        self._cut(version)

    def batches(self) -> Iterable[Batch]:
        """Yield all facts, for another file. Steps come last, after the samples that they train."""
        yield Batch(dropped=[*self.dropped.items()])
        for done in [*self.finished.values()]:
            yield Batch(finished=[done])
        for i, some in [*self.progress.items()]:
            yield Batch(progress=[Progress(i, self.prompts[i], dict(some))])
        yield Batch(steps=[*self.steps.values()], sealed=[*self.sealed.values()])

    def __bool__(self) -> bool:
        return bool(self.finished or self.progress or self.dropped or self.steps)

    # -- cuts

    def _forget_steps(self, number: int) -> None:
        self.steps = {n: step for n, step in self.steps.items() if n < number}

    def _cut(self, version: PolicyVersion) -> None:
        """Forget the tokens of versions after `version`."""
        before = self.tokens
        self.valid = version
        self.sealed = {v: p for v, p in self.sealed.items() if v <= version}
        for i, done in [*self.finished.items()]:
            if any(_newer(t, version) for t in _all(done)):
                del self.finished[i]
                # They are as before their scores. An agent's own score is lost.
                self.progress[i] = {
                    k: _UNDRAWN if t.counts else replace(t, score=None)
                    for k, t in enumerate(_all(done))
                }
                self.prompts[i] = done.prompt
        for i, some in [*self.progress.items()]:
            kept = {k: until(t, version) for k, t in some.items()}
            self.progress[i] = {k: t for k, t in kept.items() if t.threads}
            if not self.progress[i]:
                del self.progress[i]
        self.lost += before - self.tokens

    @property
    def tokens(self) -> int:
        """The policy's tokens that are known."""
        done = sum(_tokens(_all(one)) for one in self.finished.values())
        return done + self.running_tokens

    @property
    def running_tokens(self) -> int:
        """The policy's tokens of running samples."""
        return sum(_tokens(some.values()) for some in self.progress.values())


def _all(done: Finished | Sample) -> tuple[Trajectory, ...]:
    """Return all trajectories of a finished sample, the greedy one last."""
    return done.trajectories if done.greedy is None else (*done.trajectories, done.greedy)


def until(trajectory: Trajectory, version: PolicyVersion) -> Trajectory:
    """Return the trajectory up to its first token of a version after `version`."""
    if not _newer(trajectory, version):
        return trajectory
    threads = []
    for thread in trajectory.threads:
        kept = [*takewhile(lambda s: s.version <= version, thread.segments)]
        while kept and kept[-1].author is not Author.POLICY:
            kept.pop()
        if kept:
            threads.append(Thread(tuple(kept), thread.opening))
    return Trajectory(tuple(threads))


def _newer(trajectory: Trajectory, version: PolicyVersion) -> bool:
    return any(s.version > version for s in trajectory.segments)


def _tokens(trajectories: Iterable[Trajectory]) -> int:
    return sum(t.num_policy_tokens for t in trajectories)


def read(
    folder: Path,
    ledger: Ledger,
    header: Header,
    note: Callable[[str], None] = lambda text: None,
    *,
    this_attempt: bool = False,
) -> JournalState:
    """Return what a run that begins with `ledger` may use, of all attempts or `this_attempt`."""
    past, same = JournalState(), True
    for path in journal_file.files_from(folder, ledger.version):
        if this_attempt and journal_file.numbers_of(path)[0] != header.attempt:
            continue
        part = journal_file.read(path)
        if part.header is not None:
            if part.header.samples != header.samples:
                note(f"{path} is of a run with other settings, so its samples are not used")
                return JournalState(valid=ledger.version)
            same = same and part.header.training == header.training
        for batch in part.batches:
            past.add(batch)
        if part.damage:
            past.damage = part.damage
            break
    past.drop_unusable(ledger, same=same)
    return past


@dataclass(frozen=True, slots=True)
class Replay:
    """Brings new ranks of the trainer to the state of those that were lost."""

    checkpoints: Checkpoints
    ledger: Ledger
    """The run's ledger, which outlasts the ranks."""
    since: Callable[[Ledger], Awaitable[JournalState]] | None
    """Returns what the journal has since the ledger of a checkpoint. None is no journal."""
    prompts: Prompts
    horizon: int
    origin: Path | None
    """The checkpoint that the attempt begins with."""
    fresh: bool
    """Whether the state without a checkpoint is that of a new engine."""

    async def replay(
        self,
        engine: TrainEngine,
        kept: PolicyVersion | None,
        keep: Callable[[PolicyVersion], Awaitable[object]],
    ) -> tuple[PolicyVersion, int]:
        """Bring a new engine to the state of the lost one, as `StepReplayer` says."""
        async with self.checkpoints.using:
            folder, start = await asyncio.to_thread(self._start)
            await engine.begin("rl", self.horizon)
            if folder is not None:
                await engine.load(str(folder / "engine"))
            live, last = self.ledger.trainer_version, self.ledger.local_steps
            trained = self.ledger.retired + self.ledger.count(State.TRAINED, State.SEALED)
            past = await self.since(start) if self.since is not None else JournalState()
        steps = [step for step in past.steps.values() if step.number <= last]
        if missing := trained - start.retired - sum(len(step.ids) for step in steps):
            raise NotRestorable(
                f"{missing} samples that were trained since version {start.version} are not in the "
                "journal. Fix: trainer.journal=true with a trainer.save_freq over 0, and a disk "
                "that takes the journal"
            )
        ready = {i: slot.sample for i, slot in start.snapshot().slots if slot.sample is not None}
        for step in steps:
            sealed = (v for v, one in past.sealed.items() if one.steps < step.number)
            version = max([start.version, *(v for v in sealed if v <= live)])
            if kept is not None and kept <= version:
                await keep(kept)
                kept = None
            samples = []
            for i in step.ids:
                if (sample := ready.pop(i, None)) is None:
                    done = past.finished.pop(i)
                    prompt = step.prompts.get(i) or self.prompts[i]
                    if checksum(prompt.tokens) != done.prompt:
                        raise NotRestorable(
                            f"prompt {i} is not the one of the journal. "
                            "Fix: data that do not change during a run"
                        )
                    # No step reads the version of its admission.
                    sample = Sample(prompt, done.trajectories, version, done.greedy)
                samples.append(sample)
            await engine.step(TrainBatch(tuple(samples), version, step.lr_scale))
        if kept is not None:
            await keep(kept)
        return start.version, len(steps)

    def _start(self) -> tuple[Path | None, Ledger]:
        """Return the checkpoint to begin with, or None for a new engine, and its ledger."""
        schedule = self.ledger.schedule
        folder = self.checkpoints.newest()[0] or self.origin
        if folder is not None:
            return folder, Ledger.restore(schedule, read_ledger(folder))
        if not self.fresh:
            raise NotRestorable("there is no whole checkpoint of the start state")
        return None, Ledger(schedule)
