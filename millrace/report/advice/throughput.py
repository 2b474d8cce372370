"""Predicts samples per second with other numbers: the arithmetic of advice.

Three rates bound a pipeline, and the smallest one is the rate of the run.

**The trainer.** A version takes B seconds of the trainer without its waits for samples: steps,
syncs, saves, and the waits for validations and for running responses. It trains the W samples of a
window. So the trainer's ceiling is W / B. With k times the devices, the seconds of the steps are
divided by k. The other seconds stay: more samples do not make a validation shorter.

**The engines.** A decode step with b requests draws b tokens in f + e b seconds, and the share q of the
time is lost while requests wait for a slot (report/accounts/pace.py finds f, e and q). A trained
sample costs t drawn tokens: its own, and its part of the dropped ones. So S slots give at most
(1 - q) S / (f + e S) / t samples a second. With a large q, that is less than engines give that idle
a little. If no figure shows e, it is 0: the result is then the most that more requests can give.
f and e hold the time in which engines read interrupted responses again. Fuller engines read more for
each drawn token, and no figure shows how long that takes. So a gain is only a bound where engines
read many tokens again.

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
them gives at most s / (1 - s) if it disappears. Each engine draws fewer requests then than it was
measured with, so its step depends on f. Advice to take turns uses the largest likely f.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.observe.timing import GEN, IDLE
from millrace.report.accounts.pace import StepCost
from millrace.report.advice.measure import Measured
from millrace.schedule.schedule import OnSync

WITH_TRAINER = ("taken", "trained", "sealed")
"""The states of samples that the trainer has."""

PLACES = 16
"""Numbers of unfinished requests that stand for all of them."""

MOST_READ = 0.3
"""Tokens that engines read again for each drawn one. Fewer than these are no limit."""

OF_LOOP = (
    *IDLE,
    *("sync_keep", "sync_transfer", "sync_activate", "switch", "save_checkpoint", "other"),
)
"""Parts of the trainer's time that more devices do not make shorter."""


@dataclass(frozen=True, slots=True)
class Change:
    """The numbers of a run that differ from the measured ones."""

    capacity: int | None = None
    slots: int | None = None
    """Decode slots of all replicas, before a change of `replicas`."""
    trainers: int | None = None
    replicas: int | None = None
    saved_s: float = 0.0
    """Seconds of each version that the trainer no longer spends."""
    held_s: float = 0.0
    """Seconds that the trainer has a sample no longer."""
    ready: float | None = None
    """Mean number of READY samples."""
    demand: float | None = None
    """g: unfinished requests of each running sample."""
    tokens: float = 1.0
    """Drawn tokens for each trained sample, of the measured ones."""


NOTHING = Change()


class Throughput:
    """The rates that follow from the figures of a run."""

    def __init__(self, measured: Measured) -> None:
        self.m = m = measured
        self.schedule, self.setup = m.setup.schedule, m.setup
        self.requests = m.request_s / m.seconds
        self.demand = max(1e-9, self.requests / max(1e-9, m.mean("running")))
        """g: requests inside engines for each running sample."""
        step_s = m.busy_slot_s / max(1.0, m.drawn_tokens)
        self.step = m.step_cost or StepCost(step_s, 0.0)
        self.flat_step = m.flat_cost or self.step
        """The cost with the largest likely f: the longest steps of few requests."""
        self.trainer_s = m.version_s * (1 - m.starved)
        """B: seconds of each version in which the trainer does not wait for samples."""
        self.tokens = m.drawn_tokens / max(1, m.samples)
        """t: drawn tokens for each trained sample."""
        self.ready = m.mean("ready") if m.starved > 0.05 else self.least_ready

    @property
    def asynchronous(self) -> bool:
        """Whether the sides work at the same time on devices of their own."""
        return not self.schedule.colocated and self.schedule.staleness_threshold > 0

    @property
    def rereads(self) -> bool:
        """Whether engines read many tokens again, because syncs interrupt responses."""
        interrupts = self.schedule.on_sync is OnSync.INTERRUPT and not self.schedule.colocated
        return interrupts and self.m.read_again >= MOST_READ

    @property
    def natural_demand(self) -> float:
        """Return g if no request waits for a decode slot and no score is late."""
        return self.setup.n * self.m.mean_length / max(self.m.mean_length, self.m.longest_of_n)

    def scored_demand(self, score_s: float) -> float:
        """Return g if no request waits for a decode slot and every score takes `score_s`."""
        step_s = self.step.step_s(self.m.busy_slots / self.setup.replicas)
        longest_s = max(self.m.mean_length, self.m.longest_of_n) * step_s
        return self.setup.n * self.m.mean_length * step_s / max(1e-9, longest_s + score_s)

    @property
    def least_capacity(self) -> int:
        """Return the capacity that lets both sides work: a window that trains, and the next step."""
        return self.schedule.window + self.schedule.step_size

    @property
    def least_ready(self) -> float:
        """Half of a step's samples: they become ready one after the other and leave together."""
        return self.schedule.step_size / 2

    @property
    def steps_s(self) -> float:
        """Return the seconds of each version that more devices of the trainer make shorter."""
        return self.m.each(*(part for part in self.m.trainer if part not in OF_LOOP))

    def trainer_ceiling(self, change: Change = NOTHING) -> float:
        """Return the samples per second of a trainer that never waits."""
        seconds = self.trainer_s - self.steps_s * (1 - self.scale(change)) - change.saved_s
        return self.m.samples / self.m.versions / max(1e-9, seconds)

    def scale(self, change: Change = NOTHING) -> float:
        """Return how much longer the trainer's steps take."""
        return self.setup.trainers / (change.trainers or self.setup.trainers)

    def with_trainer_s(self, change: Change = NOTHING) -> float:
        """Return the mean seconds for which the trainer has a sample."""
        longer = self.steps_s * (self.scale(change) - 1)
        return max(0.0, self.m.mean(*WITH_TRAINER) / self.m.rate + longer - change.held_s)

    def drawn(self, busy: float, change: Change = NOTHING) -> float:
        """Return the samples per second that `busy` drawing slots give, if no request waits."""
        step_s = self.step.step_s(busy / (change.replicas or self.setup.replicas))
        return busy / max(1e-12, step_s) / max(1e-9, self.tokens * change.tokens)

    def slots(self, change: Change = NOTHING) -> float:
        replicas = self.setup.replicas
        return (change.slots or self.setup.slots) * (change.replicas or replicas) / replicas

    def engine_ceiling(self, change: Change = NOTHING) -> float:
        """Return the samples per second that engines can give.

        If waiting requests cost so much that full engines are slower than those of the run, these count.
        """
        replicas = (change.replicas or self.setup.replicas) / self.setup.replicas
        return max(self.full(change), self.drawn(self.m.busy_slots * replicas, change))

    def full(self, change: Change = NOTHING) -> float:
        """Return the samples per second of engines whose slots are all busy while requests wait."""
        return self.drawn(self.slots(change), change) * (1 - self.step.queue)

    def drawn_by(self, running: float, change: Change = NOTHING) -> float:
        """Return the samples per second with `running` samples on average.

        The unfinished requests are spread evenly over W n around their mean.
        """
        mean, slots = (change.demand or self.demand) * running, self.slots(change)
        half = min(self.schedule.window * self.setup.n / 2, mean)
        places = [mean + half * (2 * k + 1 - PLACES) / PLACES for k in range(PLACES)]
        full = self.full(change)
        return sum(full if q > slots else self.drawn(q, change) for q in places) / PLACES

    def ledger_ceiling(self, change: Change = NOTHING) -> float:
        """Return the samples per second that the slots of the ledger allow."""
        capacity = change.capacity or self.schedule.capacity
        ready = self.ready if change.ready is None else change.ready
        with_trainer_s = self.with_trainer_s(change)
        low, high = 0.0, self.drawn(self.slots(change), change)
        for _ in range(40):
            middle = (low + high) / 2
            running = capacity - ready - middle * with_trainer_s
            enough = running > 0 and self.drawn_by(running, change) > middle
            low, high = (middle, high) if enough else (low, middle)
        return low

    def rate(self, change: Change = NOTHING) -> float:
        """Return the rate of a pipeline whose sides work at the same time."""
        return min(self.trainer_ceiling(change), self.ledger_ceiling(change))

    def sides(self, change: Change = NOTHING) -> float:
        """Return the rate of a pipeline whose ledger is large enough."""
        return min(self.trainer_ceiling(change), self.engine_ceiling(change))

    def without(self, seconds: float) -> float:
        """Return the rate if each version took `seconds` less and nothing else became the bound."""
        rate = self.m.samples / self.m.versions / max(1e-9, self.m.version_s - seconds)
        others = self.drawn(self.slots())
        if self.asynchronous:
            change = Change(held_s=seconds, ready=min(self.ready, self.least_ready))
            others = self.ledger_ceiling(change)
        return min(rate, max(self.m.rate, others))

    def as_measured(self, rate: float) -> float:
        """Return `rate`, lowered as much as the run is slower than the arithmetic says.

        A side that waits for another reason keeps waiting.
        """
        return rate * self.m.rate / max(self.m.rate, self.rate())

    def gain(self, rate: float) -> float:
        """Return what `rate` is over the measured rate, as a share of it."""
        return rate / self.m.rate - 1

    def drawing(self, requests: float, replicas: float, step: StepCost) -> float:
        """Return the seconds in which `requests` that start at once are drawn.

        The longest one ends last. If not all have a slot, it begins on average half of its own time
        later.
        """
        fixed, each, queue = step
        slots = self.setup.slots / self.setup.replicas * replicas
        mean = self.tokens / self.setup.n
        longest = max(mean, self.m.longest)
        draw = longest * (fixed + each * min(slots, requests * mean / longest) / replicas)
        if requests > slots:
            full = (fixed + each * slots / replicas) / (1 - queue)
            draw = max(draw, requests * mean * full / slots + draw / 2)
        return draw

    def in_turns(self) -> float:
        """Return the rate of mode colocate_sync on all devices of both sides.

        The seconds of a hand-over are not known, so they are left out.
        """
        setup, window = self.setup, self.schedule.window
        replicas = setup.replicas * setup.devices / setup.rollouts
        costs = self.step, self.flat_step
        draw = max(self.drawing(window * setup.n, replicas, cost) for cost in costs)
        steps = self.steps_s * setup.trainers / setup.devices
        others = ("sync_transfer", "sync_activate", "save_checkpoint", "wait_validation", "other")
        rest = self.m.each(*others)
        return self.m.samples / self.m.versions / (draw + steps + rest)

    def larger_window(self, factor: int, once_s: float) -> float:
        """Return the rate of turns with a window that is `factor` times as large.

        A version pays `once_s` once. All that happens once in a version is in it. Its steps take
        `factor` times as long. Its longest response still ends the drawing.
        """
        setup = self.setup
        requests = self.schedule.window * setup.n
        drawn = self.m.each(*GEN)
        before, after = (
            self.drawing(count, setup.replicas, self.step)
            for count in (requests, factor * requests)
        )
        steps = self.m.version_s - drawn - once_s
        seconds = drawn * min(factor, max(1.0, after / before)) + factor * steps + once_s
        return factor * self.m.samples / self.m.versions / seconds

    def capacity_that_fills(self, rate: float, change: Change = NOTHING) -> float:
        """Return the capacity with which the engines are full at every moment."""
        swing = self.schedule.window * self.setup.n / 2
        ready = self.ready if change.ready is None else change.ready
        running = (self.slots(change) + swing) / (change.demand or self.demand)
        return running + ready + rate * self.with_trainer_s(change)
