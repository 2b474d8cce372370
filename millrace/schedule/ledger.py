"""The life of every sample, as a pure state machine: no await, no clock, no logging, no torch.

    WAITING -> RUNNING -> READY -> TAKEN -> TRAINED -> SEALED -> retired
        \\________\\_________\\______________________________ -> dropped(reason)

A sample occupies one slot from `admit` until it is retired or dropped. A TRAINED sample keeps its
slot until the weights that it helped to make are live. `Schedule.capacity` bounds the number of
slots. This one rule bounds staleness (`lag_bound`), also while a SEALED window is on its way and
the next one is trained.

Everything that changes the state of a sample is in this file. An illegal move raises LedgerError,
which names the state found and the state expected. `admitted == occupied + retired + dropped` after
every move. Every move costs O(log n) in the number of slots, amortised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from millrace.errors import LedgerError
from millrace.schedule.order import TrainingOrder
from millrace.schedule.schedule import Schedule
from millrace.types import PolicyVersion, Prompt, Sample, Trajectory


class State(StrEnum):
    WAITING = "waiting"
    """Admitted. Its rollouts have not started, or a restart continues them."""
    RUNNING = "running"
    READY = "ready"
    """Every trajectory is finished and scored."""
    TAKEN = "taken"
    """The train engine works on it."""
    TRAINED = "trained"
    """Part of the weights that the next sync sends."""
    SEALED = "sealed"
    """Part of the weights that are on their way to the rollouts."""


_WITH_TRAINER = (State.TAKEN, State.TRAINED, State.SEALED)


class Topic(StrEnum):
    """A kind of change. Tasks wait for one of these."""

    SLOTS = "slots"
    """A slot is free."""
    SAMPLES = "samples"
    """More samples are finished, or the oldest one changed."""
    ROLLOUTS = "rollouts"
    """A sample left WAITING, or a rollout ended."""


class Move(NamedTuple):
    """A move of one sample: a state's name, `retired` or `dropped`."""

    sample_id: int
    to: str
    reason: str = ""
    """Of a drop."""


@dataclass(slots=True)
class Slot:
    """One occupied slot."""

    prompt: Prompt
    version: PolicyVersion
    """Policy version at admission."""
    state: State = State.WAITING
    progress: tuple[Trajectory, ...] = ()
    """The trajectories of an interrupted sample so far. They survive a restart."""
    sample: Sample | None = None
    """The finished sample, from READY on."""
    rest: Prompt | None = None
    """The prompt that continues its response, from TRAINED on."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and ids at one moment, for the history."""

    version: PolicyVersion
    admitted: int
    retired: int
    dropped: dict[str, int]
    slots: list[int]
    """Ids of the samples that occupy a slot."""


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger at a cut, as plain data.

    A cut is a moment at which nothing is TAKEN, TRAINED or SEALED. RUNNING became WAITING.
    """

    version: PolicyVersion
    local_steps: int
    admitted: int
    retired: int
    dropped: dict[str, int]
    slots: list[tuple[int, Slot]]
    """Sample ids and their slots, in order of admission."""
    continued: int = 0
    """Samples that continue the response of another one, among the admitted."""
    rests: list[Prompt] = field(default_factory=list)
    """The prompts that continue responses and have no slot yet, in order."""


class Ledger:
    """Decide who gets a slot, who may start, what may be trained, and when to sync.

    `limit` is the number of samples that the run trains. Dropped samples are replaced and do not
    count.
    """

    def __init__(self, schedule: Schedule, limit: int | None = None) -> None:
        self.schedule = schedule
        self.limit = limit
        self.version: PolicyVersion = 0
        self.local_steps = 0
        self.admitted = 0
        self.retired = 0
        self.dropped: dict[str, int] = {}
        self.changed: set[Topic] = set()
        """The changes since a reader last cleared this set."""
        self.moves: list[Move] = []
        """The moves since a reader last took this list."""
        self.continued = 0
        """Admitted samples that continue the response of a retired one."""
        self._going_on = 0
        """Retired samples whose response goes on."""
        self._rests: deque[Prompt] = deque()
        """The prompts that continue responses and have no slot yet, in order."""
        self._slots: dict[int, Slot] = {}  # in order of admission
        self._order = TrainingOrder(schedule.lookahead)
        self._with_trainer: dict[State, list[int]] = {state: [] for state in _WITH_TRAINER}
        self._counts = dict.fromkeys(State, 0)
        self._most = schedule.capacity  # a restored ledger may exceed a smaller capacity

    # -- admission

    def can_admit(self) -> bool:
        """Whether a slot is free and the run still needs a sample."""
        occupied = len(self._slots)
        if occupied >= self.schedule.capacity:
            return False
        return self.limit is None or self.retired + occupied < self.limit

    @property
    def begun(self) -> int:
        """Return the number of prompts of the stream that were admitted."""
        return self.admitted - self.continued

    @property
    def rest(self) -> Prompt | None:
        """Return the prompt that must be admitted next, because it continues a response."""
        return self._rests[0] if self._rests else None

    @property
    def resting(self) -> int:
        """Return the number of responses that go on and have no slot."""
        return len(self._rests)

    def admit(self, prompt: Prompt) -> int:
        """Give `prompt` a slot. The sample id that this returns counts admissions.

        Responses that go on come before new prompts.
        """
        if not self.can_admit():
            raise LedgerError(f"admit without a free slot: {self.describe()}")
        if self._rests and prompt is not self._rests[0]:
            raise LedgerError(f"admit a new prompt before a response goes on: {self.describe()}")
        if self._rests:
            self._rests.popleft()
            self.continued += 1
        sample_id, self.admitted = self.admitted, self.admitted + 1
        if prompt.index != sample_id:
            prompt = replace(prompt, index=sample_id, position=prompt.in_stream)
        self._slots[sample_id] = Slot(prompt, self.version)
        self._counts[State.WAITING] += 1
        self._order.admit(sample_id)
        self.moves.append(Move(sample_id, State.WAITING))
        return sample_id

    # -- rollout

    def start(self, sample_id: int) -> Slot:
        slot = self._move(sample_id, State.WAITING, State.RUNNING)
        self.changed.add(Topic.ROLLOUTS)
        return slot

    def record(self, sample_id: int, progress: tuple[Trajectory, ...]) -> None:
        """Keep the finished segments of a running sample, for a restart."""
        self._expect(sample_id, State.RUNNING).progress = progress

    def finish(self, sample_id: int, sample: Sample) -> None:
        slot = self._move(sample_id, State.RUNNING, State.READY)
        slot.sample, slot.progress = sample, ()
        self._order.finish(sample_id)
        self.changed.add(Topic.SAMPLES)

    def drop(self, sample_id: int, reason: str) -> None:
        """Free the slot at once and count the reason."""
        slot = self._entry(sample_id)
        if slot.state in _WITH_TRAINER:
            expected = "expected waiting, running or ready to drop it"
            raise LedgerError(f"sample {sample_id} is {slot.state}, {expected}")
        del self._slots[sample_id]
        self._counts[slot.state] -= 1
        self._order.drop(sample_id)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.moves.append(Move(sample_id, "dropped", reason))
        self.changed.update(Topic)

    # -- training

    def remaining(self) -> int | None:
        """Return the number of samples that this run must still take. None means no end."""
        return None if self.limit is None else self.limit - self.retired - self._num_with_trainer()

    def _next_step(self) -> tuple[int, int]:
        """Return the size of the next local step, and how many samples must be ready first."""
        remaining = self.remaining()
        size = self.schedule.step_size if remaining is None else remaining
        step = min(self.schedule.step_size, size)
        if self.schedule.colocated and not self._counts[State.TRAINED]:
            # Shared devices change hands once for each window, so all of it must be ready first.
            window = self.schedule.window
            return step, window if remaining is None else min(window, remaining)
        return step, step

    def can_take(self) -> bool:
        """Whether the next local step can start."""
        needed = self._next_step()[1]
        return 0 < needed <= len(self._order)

    def takeable(self) -> list[int]:
        """Return the sample ids of the next local step, in order, or [] if it cannot start yet."""
        return self._order.first(self._next_step()[0]) if self.can_take() else []

    def take(self) -> list[Sample]:
        """Take the samples of the next local step."""
        if not self.can_take():
            raise LedgerError(f"take, but the next local step is not ready: {self.describe()}")
        sample_ids = self._order.take(self._next_step()[0])
        self._with_trainer[State.TAKEN] += sample_ids
        taken = [self._move(i, State.READY, State.TAKEN).sample for i in sample_ids]
        return [sample for sample in taken if sample is not None]

    def trained(self, rests: Iterable[Prompt] = ()) -> list[int]:
        """Mark the TAKEN samples as part of the weights. Return their ids.

        `rests` has a prompt for each of them whose response goes on. Its index is the sample's.
        """
        for rest in rests:
            self._expect(rest.index, State.TAKEN).rest = rest
        for i in self._with_trainer[State.TAKEN]:
            slot = self._slots[i]
            if slot.sample is not None and slot.sample.goes_on != (slot.rest is not None):
                raise LedgerError(f"trained, but nothing continues the response of sample {i}")
        sample_ids = self._pass_on(State.TAKEN, State.TRAINED)
        if not sample_ids:
            raise LedgerError(f"trained, but nothing is taken: {self.describe()}")
        self.local_steps += 1
        return sample_ids

    def sync_due(self) -> bool:
        """Whether the window is trained. The last window of a run may be short."""
        trained = self._counts[State.TRAINED]
        if not trained or self._counts[State.TAKEN]:
            return False
        return trained >= self.schedule.window or self.remaining() == 0

    def done(self) -> bool:
        """Whether every sample of the run is trained and its weights are live."""
        return self.remaining() == 0 and not self._num_with_trainer()

    # -- sync

    @property
    def trainer_version(self) -> PolicyVersion:
        """Return the version at the start of the trainer's window. It is live or on its way."""
        return self.version + bool(self._counts[State.SEALED])

    def seal(self) -> PolicyVersion:
        """Seal the next version: it contains every sample that is TRAINED now. Return it.

        It is legal before the window is full, because a stop cuts a window short. It is illegal
        while something is TAKEN or SEALED.
        """
        if self.count(State.TAKEN, State.SEALED) or not self._counts[State.TRAINED]:
            expected = "expected something trained and nothing taken or sealed"
            raise LedgerError(f"seal, {expected}: {self.describe()}")
        self._pass_on(State.TRAINED, State.SEALED)
        return self.version + 1

    def published(self) -> list[int]:
        """Free the slots of the sealed version, which is live now. Return the retired ids.

        The responses that go on are the next to be admitted.
        """
        sample_ids = sorted(self._with_trainer[State.SEALED])
        if not sample_ids:
            raise LedgerError(f"published, expected something sealed: {self.describe()}")
        for sample_id in sample_ids:
            rest = self._slots.pop(sample_id).rest
            if rest is not None:
                self._going_on += 1
                self._rests.append(rest)
        self._with_trainer[State.SEALED] = []
        self._counts[State.SEALED] = 0
        self.retired += len(sample_ids)
        self.version += 1
        self.moves += [Move(sample_id, "retired") for sample_id in sample_ids]
        self.changed.add(Topic.SLOTS)
        return sample_ids

    # -- inspection

    def ids(self, *states: State) -> list[int]:
        """Return the ids of the samples in one of `states`, in order of admission. Costs O(n)."""
        return [i for i, slot in self._slots.items() if slot.state in states]

    def count(self, *states: State) -> int:
        return sum(self._counts[state] for state in states)

    @property
    def occupied(self) -> int:
        """Return the number of slots in use."""
        return len(self._slots)

    def totals(self) -> Totals:
        return Totals(
            self.version, self.admitted, self.retired, dict(self.dropped), list(self._slots)
        )

    def describe(self) -> str:
        """Return one line on where the samples are, for errors and watchdogs."""
        states = ", ".join(f"{self._counts[s]} {s}" for s in State if self._counts[s]) or "none"
        return (
            f"version {self.version}, {self.admitted} admitted, {self.retired} retired, "
            f"{sum(self.dropped.values())} dropped, "
            f"{self.occupied} of {self.schedule.capacity} slots in use ({states})"
        )

    def check(self) -> None:
        """Check the invariants: conservation, capacity, counts."""
        occupied = len(self._slots)
        if self.admitted != occupied + self.retired + sum(self.dropped.values()):
            raise LedgerError(f"samples were lost: {self.describe()}")
        if occupied > self._most:
            raise LedgerError(f"more samples than slots: {self.describe()}")
        if sum(self._counts.values()) != occupied:
            raise LedgerError(f"state counts do not add up: {self.describe()}")
        if self._going_on != self.continued + len(self._rests):
            raise LedgerError(f"responses that go on were lost: {self.describe()}")

    # -- checkpoint

    def snapshot(self) -> LedgerSnapshot:
        """Return plain data at a cut. It shares the frozen samples and copies the rest."""
        if self._num_with_trainer():
            raise LedgerError(f"snapshot in the middle of a window: {self.describe()}")
        slots = [
            (i, replace(s, state=State.WAITING if s.state is State.RUNNING else s.state))
            for i, s in self._slots.items()
        ]
        return LedgerSnapshot(
            self.version,
            self.local_steps,
            self.admitted,
            self.retired,
            dict(self.dropped),
            slots,
            self.continued,
            [*self._rests],
        )

    @classmethod
    def restore(
        cls, schedule: Schedule, snapshot: LedgerSnapshot, limit: int | None = None
    ) -> Ledger:
        """Return a ledger that continues from `snapshot`.

        A smaller capacity takes effect with time: nothing is admitted until enough slots are free.
        """
        ledger = cls(schedule, limit)
        ledger.version, ledger.local_steps = snapshot.version, snapshot.local_steps
        ledger.admitted, ledger.retired = snapshot.admitted, snapshot.retired
        ledger.dropped = dict(snapshot.dropped)
        ledger.continued, ledger._rests = snapshot.continued, deque(snapshot.rests)
        ledger._going_on = ledger.continued + ledger.resting
        for i, slot in snapshot.slots:
            ledger._slots[i] = replace(slot)
            ledger._counts[slot.state] += 1
            ledger._order.admit(i)
            ledger.moves.append(Move(i, slot.state))
        for i in ledger.ids(State.READY):
            ledger._order.finish(i)
        ledger._most = max(ledger._most, ledger.occupied)
        return ledger

    def follow(self, plan: Iterable[int]) -> None:
        """Train these samples first, in this order, as an earlier attempt did. Empty ends it."""
        self._order.follow(plan)
        self.changed.add(Topic.SAMPLES)

    # -- moves

    def _num_with_trainer(self) -> int:
        return self.count(*_WITH_TRAINER)

    def _entry(self, sample_id: int) -> Slot:
        slot = self._slots.get(sample_id)
        if slot is None:
            raise LedgerError(f"sample {sample_id} has no slot: {self.describe()}")
        return slot

    def _expect(self, sample_id: int, expected: State) -> Slot:
        slot = self._entry(sample_id)
        if slot.state is not expected:
            raise LedgerError(f"sample {sample_id} is {slot.state}, expected {expected}")
        return slot

    def _move(self, sample_id: int, source: State, target: State) -> Slot:
        slot = self._expect(sample_id, source)
        slot.state = target
        self._counts[source] -= 1
        self._counts[target] += 1
        self.moves.append(Move(sample_id, target))
        return slot

    def _pass_on(self, source: State, target: State) -> list[int]:
        """Move all samples from one state with the trainer to the next. Return their ids."""
        sample_ids, self._with_trainer[source] = self._with_trainer[source], []
        for sample_id in sample_ids:
            self._move(sample_id, source, target)
        self._with_trainer[target] += sample_ids
        return sample_ids
