"""The life of every sample, as a pure state machine: no await, no clock, no logging, no torch.

    WAITING -> RUNNING -> READY -> TAKEN -> TRAINED -> SEALED -> retired
        \\________\\_________\\______________________________ -> dropped(reason)

A sample holds one slot from `admit` until it is retired or dropped, and a TRAINED one keeps its slot until the weights
that it helped make are live. Slots are bounded by `Schedule.capacity`; that one rule bounds staleness (`lag_bound`), also
where the next window is trained while a SEALED one is on its way.

Everything that changes the state of a sample lives in this file. An illegal move raises LedgerError, naming the state
found and the state expected. `admitted == held + retired + dropped` after every move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from millrace.errors import LedgerError
from millrace.schedule.order import choose
from millrace.schedule.schedule import Schedule
from millrace.types import PolicyVersion, Prompt, Sample, Trajectory


class State(StrEnum):
    WAITING = "waiting"
    """Admitted: its rollouts have not begun, or go on after a restart."""
    RUNNING = "running"
    READY = "ready"
    """Every trajectory is finished and scored."""
    TAKEN = "taken"
    """In the hands of the train engine."""
    TRAINED = "trained"
    """Part of the weights that the next sync brings."""
    SEALED = "sealed"
    """Part of the weights that are on their way to the rollouts."""


_WITH_TRAINER = (State.TAKEN, State.TRAINED, State.SEALED)


@dataclass(slots=True)
class Held:
    """One occupied slot."""

    prompt: Prompt
    version: PolicyVersion
    """Policy version at admission."""
    state: State = State.WAITING
    progress: tuple[Trajectory, ...] = ()
    """What an interrupted sample has so far; kept over a restart."""
    sample: Sample | None = None
    """The finished sample, from READY on."""


@dataclass(frozen=True, slots=True)
class Totals:
    """How many and who, at any moment: what the history keeps."""

    version: PolicyVersion
    admitted: int
    retired: int
    dropped: dict[str, int]
    held: list[int]
    """Sample ids."""


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger at a cut, as plain data: nothing is TAKEN, TRAINED or SEALED, and RUNNING became WAITING."""

    version: PolicyVersion
    local_steps: int
    admitted: int
    retired: int
    dropped: dict[str, int]
    held: list[tuple[int, Held]] = field(default_factory=list)


class Ledger:
    """Who holds a slot, who may start, what may be trained, when to sync.

    `limit` is the number of samples that the run trains; dropped samples are replaced and do not count.
    """

    def __init__(self, schedule: Schedule, limit: int | None = None) -> None:
        self.schedule = schedule
        self.limit = limit
        self.version: PolicyVersion = 0
        self.local_steps = 0
        self.admitted = 0
        self.retired = 0
        self.dropped: dict[str, int] = {}
        self._held: dict[int, Held] = {}  # insertion order is order of admission
        self._counts = dict.fromkeys(State, 0)
        self._most = (
            schedule.capacity
        )  # a restored ledger may hold more than a smaller capacity allows

    # -- admission

    def can_admit(self) -> bool:
        """Whether a slot is free and the run still needs a sample."""
        if len(self._held) >= self.schedule.capacity:
            return False
        return self.limit is None or self.retired + len(self._held) < self.limit

    def admit(self, prompt: Prompt) -> int:
        """Give `prompt` a slot; its sample id is its place in the order of admission."""
        if not self.can_admit():
            raise LedgerError(f"admit without a free slot: {self.describe()}")
        sample_id, self.admitted = self.admitted, self.admitted + 1
        self._held[sample_id] = Held(prompt, self.version)
        self._counts[State.WAITING] += 1
        return sample_id

    # -- rollout

    def start(self, sample_id: int) -> Held:
        return self._move(sample_id, State.WAITING, State.RUNNING)

    def record(self, sample_id: int, progress: tuple[Trajectory, ...]) -> None:
        """Keep the finished segments of a running sample, for a restart."""
        self._expect(sample_id, State.RUNNING).progress = progress

    def finish(self, sample_id: int, sample: Sample) -> None:
        held = self._move(sample_id, State.RUNNING, State.READY)
        held.sample, held.progress = sample, ()

    def drop(self, sample_id: int, reason: str) -> None:
        """Free the slot at once and count the reason."""
        held = self._entry(sample_id)
        if held.state in _WITH_TRAINER:
            raise LedgerError(
                f"sample {sample_id} is {held.state}, expected waiting, running or ready to drop it"
            )
        del self._held[sample_id]
        self._counts[held.state] -= 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    # -- training

    def remaining(self) -> int | None:
        """Samples that are still to be taken in this run; None if it has no end."""
        return (
            None if self.limit is None else self.limit - self.retired - self.count(*_WITH_TRAINER)
        )

    def takeable(self) -> list[int]:
        """The samples of the next local step, in order, or [] if it cannot start yet."""
        remaining = self.remaining()
        step = (
            self.schedule.step_size
            if remaining is None
            else min(self.schedule.step_size, remaining)
        )
        needed = step
        if self.schedule.colocated and not self._counts[State.TRAINED]:
            # Shared devices change hands once for each window: all of it must be ready first.
            needed = (
                self.schedule.window if remaining is None else min(self.schedule.window, remaining)
            )
        if self._counts[State.READY] < needed or not needed:
            return []
        pending = [
            (i, h.state is State.READY)
            for i, h in self._held.items()
            if h.state not in _WITH_TRAINER
        ]
        return choose(pending, needed, self.schedule.lookahead)[:step]

    def take(self) -> list[Sample]:
        """Take the samples of the next local step."""
        taken = [self._move(i, State.READY, State.TAKEN).sample for i in self.takeable()]
        if not taken:
            raise LedgerError(f"take, but the next local step is not ready: {self.describe()}")
        return [sample for sample in taken if sample is not None]

    def trained(self) -> list[int]:
        """Everything TAKEN is part of the weights now. Returns the sample ids."""
        sample_ids = self.ids(State.TAKEN)
        if not sample_ids:
            raise LedgerError(f"trained, but nothing is taken: {self.describe()}")
        for sample_id in sample_ids:
            self._move(sample_id, State.TAKEN, State.TRAINED)
        self.local_steps += 1
        return sample_ids

    def sync_due(self) -> bool:
        """Whether the window is trained, or all that the run has left of it."""
        trained = self._counts[State.TRAINED]
        return (
            bool(trained)
            and not self._counts[State.TAKEN]
            and (trained >= self.schedule.window or self.remaining() == 0)
        )

    def done(self) -> bool:
        """Whether every sample of the run is trained and its weights are live."""
        return self.remaining() == 0 and not self.count(*_WITH_TRAINER)

    # -- sync

    @property
    def trainer_version(self) -> PolicyVersion:
        """The version that the train engine's current window began with: the live one, or one that is on its way."""
        return self.version + bool(self._counts[State.SEALED])

    def seal(self) -> PolicyVersion:
        """What is TRAINED makes the next version, and nothing that is trained from now on. Returns the version.

        Legal before the window is full (a run that is told to stop cuts it short), never with something TAKEN or SEALED.
        """
        if self.count(State.TAKEN, State.SEALED) or not self._counts[State.TRAINED]:
            raise LedgerError(
                f"seal, expected something trained and nothing taken or sealed: {self.describe()}"
            )
        for sample_id in self.ids(State.TRAINED):
            self._move(sample_id, State.TRAINED, State.SEALED)
        return self.version + 1

    def published(self) -> list[int]:
        """The sealed version is live: free the slots that made it. Returns the retired sample ids."""
        sample_ids = self.ids(State.SEALED)
        if not sample_ids:
            raise LedgerError(f"published, expected something sealed: {self.describe()}")
        for sample_id in sample_ids:
            del self._held[sample_id]
        self._counts[State.SEALED] = 0
        self.retired += len(sample_ids)
        self.version += 1
        return sample_ids

    # -- inspection

    def ids(self, *states: State) -> list[int]:
        return [i for i, h in self._held.items() if h.state in states]

    def count(self, *states: State) -> int:
        return sum(self._counts[state] for state in states)

    @property
    def held(self) -> int:
        return len(self._held)

    def totals(self) -> Totals:
        return Totals(
            self.version, self.admitted, self.retired, dict(self.dropped), list(self._held)
        )

    def describe(self) -> str:
        """One line on who holds what, for errors and watchdogs."""
        states = ", ".join(f"{self._counts[s]} {s}" for s in State if self._counts[s]) or "none"
        return (
            f"version {self.version}, {self.admitted} admitted, {self.retired} retired, {sum(self.dropped.values())} dropped, "
            f"held {self.held} of {self.schedule.capacity} ({states})"
        )

    def check(self) -> None:
        """The invariants: conservation, capacity, counts."""
        if self.admitted != self.held + self.retired + sum(self.dropped.values()):
            raise LedgerError(f"samples were lost: {self.describe()}")
        if self.held > self._most:
            raise LedgerError(f"more samples than slots: {self.describe()}")
        if sum(self._counts.values()) != self.held:
            raise LedgerError(f"state counts do not add up: {self.describe()}")

    # -- checkpoint

    def snapshot(self) -> LedgerSnapshot:
        """Plain data at a cut. Shares the frozen samples, copies the rest."""
        if self.count(*_WITH_TRAINER):
            raise LedgerError(f"snapshot in the middle of a window: {self.describe()}")
        held = [
            (
                i,
                Held(
                    h.prompt,
                    h.version,
                    State.WAITING if h.state is State.RUNNING else h.state,
                    h.progress,
                    h.sample,
                ),
            )
            for i, h in self._held.items()
        ]
        return LedgerSnapshot(
            self.version, self.local_steps, self.admitted, self.retired, dict(self.dropped), held
        )

    @classmethod
    def restore(
        cls, schedule: Schedule, snapshot: LedgerSnapshot, limit: int | None = None
    ) -> Ledger:
        """A ledger that goes on from `snapshot`. A smaller capacity is reached by admitting nothing for a while."""
        ledger = cls(schedule, limit)
        ledger.version, ledger.local_steps = snapshot.version, snapshot.local_steps
        ledger.admitted, ledger.retired = snapshot.admitted, snapshot.retired
        ledger.dropped = dict(snapshot.dropped)
        for i, h in snapshot.held:
            ledger._held[i] = Held(h.prompt, h.version, h.state, h.progress, h.sample)
            ledger._counts[h.state] += 1
        ledger._most = max(ledger._most, ledger.held)
        return ledger

    # -- moves

    def _entry(self, sample_id: int) -> Held:
        held = self._held.get(sample_id)
        if held is None:
            raise LedgerError(f"sample {sample_id} holds no slot: {self.describe()}")
        return held

    def _expect(self, sample_id: int, *expected: State) -> Held:
        held = self._entry(sample_id)
        if held.state not in expected:
            raise LedgerError(
                f"sample {sample_id} is {held.state}, expected {' or '.join(expected)}"
            )
        return held

    def _move(self, sample_id: int, source: State, target: State) -> Held:
        held = self._expect(sample_id, source)
        held.state = target
        self._counts[source] -= 1
        self._counts[target] += 1
        return held
