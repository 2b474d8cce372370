"""How many samples per second a run would train with other numbers: the arithmetic of advice.

Three rates bound a pipeline, and the smallest one is the rate of the run.

**The trainer.** A version takes B seconds of the trainer's own work: steps, syncs, saves. It trains
the W samples of a window. So the trainer's ceiling is W / B. With k times the devices, the seconds
of the steps are divided by k. The other seconds stay.

**The engines.** S decode slots draw at most S tokens in one decode step of h seconds. A trained
sample costs t drawn tokens: its own, and its part of the dropped ones. So the ceiling of the
engines is S / (h t). If a share a of the step grows with the b requests in it, a step with b' of
them takes h (1 - a + a b'/b). Without a figure of a, a step takes h for any number of requests:
the rate is then the most that more requests can give.

**The ledger.** By Little's law, the mean number of samples in a state is the rate times the mean
seconds in it. A slot of the ledger is taken from the admission of a sample to the sync of its
weights:

    capacity = running + ready + with the trainer          all slots are taken
    running  = rate x (seconds until the longest of n responses is drawn and scored)
    with the trainer = rate x (seconds of the step and of the sync)

A running sample has g unfinished requests on average. All n run at first, and only the longest one
at last, so g is n x (mean length) / (mean of the longest of n). R running samples fill g R slots.
If capacity leaves fewer than S / g samples to run, engines idle although the ledger is full.

A sync frees the slots of a window at once. W new samples then bring W n requests at once. So the
number of unfinished requests swings by W n: half of that above its mean, and half below. The
engines are full at every moment if

    g x running >= S + W n / 2

The rate stands on both sides of these equations. Bisection solves them.

**Turns.** On shared devices, and with a staleness of 0, the sides take turns. The seconds of a
version are then a sum: drawing, training, the sync, the hand-over. A part that takes the share s of
them gives at most s / (1 - s) if it disappears.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.report.measured import Measured

STEPS = (
    "update_actor",
    "update_critic",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "reward_kl",
    "train_other",
)
"""Parts that more devices of the trainer make shorter."""


@dataclass(frozen=True, slots=True)
class Change:
    """The numbers of a run that differ from the measured ones."""

    capacity: int | None = None
    slots: int | None = None
    trainers: int | None = None
    replicas: int | None = None
    saved_s: float = 0.0
    """Seconds of each version that the trainer no longer spends."""
    ready: float | None = None
    """Mean number of READY samples."""
    kept: float = 0.0
    """Share of the dropped tokens that are trained instead."""


class Throughput:
    """The rates that follow from the figures of a run."""

    def __init__(self, measured: Measured) -> None:
        self.m = m = measured
        self.schedule = m.setup.schedule
        self.running = max(1e-9, m.mean("running"))
        self.demand = m.request_s / m.seconds / self.running
        """g: requests inside engines for each running sample."""
        self.growth = m.step_growth or 0.0
        self.step_s = m.busy_slot_s / max(1.0, m.drawn_tokens)
        """h: seconds of a decode step at the measured load."""
        self.trainer_s = (m.seconds - sum(self._waits())) / m.versions
        """B: seconds of the trainer's own work in each version."""
        self.tokens = m.drawn_tokens / max(1, m.samples)
        """t: drawn tokens for each trained sample, of the counted versions."""
        self.ready = m.mean("ready") if m.trainer_idle > 0.05 else self.least_ready

    def _waits(self) -> list[float]:
        from millrace.report.measured import WAITS

        return [self.m.trainer.get(part, 0.0) for part in WAITS]

    @property
    def least_ready(self) -> float:
        """Half of a step's samples: they become ready one after the other and leave together."""
        return self.schedule.step_size / 2

    def trainer_ceiling(self, change: Change = Change()) -> float:
        """Return the samples per second of a trainer that never waits."""
        setup = self.m.setup
        steps = sum(self.m.trainer.get(part, 0.0) for part in STEPS) / self.m.versions
        scale = setup.trainers / (change.trainers or setup.trainers)
        seconds = self.trainer_s - steps * (1 - scale) - change.saved_s
        return self.m.samples / self.m.versions / max(1e-9, seconds)

    def engine_rate(self, busy: float, change: Change = Change()) -> float:
        """Return the samples per second that `busy` drawing slots give."""
        setup = self.m.setup
        replicas = change.replicas or setup.replicas
        load = busy / replicas / max(1e-9, self.m.busy_slots / setup.replicas)
        step_s = self.step_s * (1 - self.growth + self.growth * load)
        tokens = self.tokens * (1 - change.kept * self.m.drop_share)
        return busy / step_s / tokens

    def slots_of(self, change: Change) -> int:
        setup = self.m.setup
        slots = change.slots or setup.slots
        return slots * (change.replicas or setup.replicas) // setup.replicas

    def engine_ceiling(self, change: Change = Change()) -> float:
        """Return the samples per second of engines whose slots are all busy."""
        return self.engine_rate(self.slots_of(change), change)

    def busy(self, running: float, slots: int) -> float:
        """Return the mean number of busy slots with `running` samples on average.

        The unfinished requests are spread evenly over W n around their mean.
        """
        mean = self.demand * running
        half = min(self.schedule.window * self.m.setup.n / 2, mean)
        low, high = mean - half, mean + half
        if slots >= high:
            return mean
        if slots <= low:
            return float(slots)
        below = (slots - low) / (high - low)
        return below * (low + slots) / 2 + (1 - below) * slots

    def ledger_ceiling(self, change: Change = Change()) -> float:
        """Return the samples per second that the slots of the ledger allow."""
        capacity = change.capacity or self.schedule.capacity
        ready = self.ready if change.ready is None else change.ready
        slots = self.slots_of(change)
        with_trainer_s = self.m.with_trainer / self.m.rate
        low, high = 0.0, self.engine_ceiling(change)
        for _ in range(60):
            middle = (low + high) / 2
            running = capacity - ready - middle * with_trainer_s
            enough = running > 0 and self.engine_rate(self.busy(running, slots), change) > middle
            low, high = (middle, high) if enough else (low, middle)
        return low

    def rate(self, change: Change = Change()) -> float:
        """Return the rate of a pipeline whose sides work at the same time."""
        return min(self.trainer_ceiling(change), self.ledger_ceiling(change))

    def gain(self, change: Change) -> float:
        """Return the change of the rate as a share of the measured one.

        The arithmetic has an error, which is the same with and without the change.
        """
        return self.rate(change) / self.rate() - 1

    def capacity_that_fills(self, rate: float) -> float:
        """Return the capacity with which the engines are full at every moment."""
        swing = self.schedule.window * self.m.setup.n / 2
        running = (self.m.setup.slots + swing) / max(1e-9, self.demand)
        return running + self.ready + rate * self.m.with_trainer / self.m.rate
