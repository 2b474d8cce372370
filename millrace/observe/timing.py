"""The seconds of one version: the parts of the trainer's time, and their totals by verl's names.

Exactly one part runs at a time, so the parts add up to the total `step`. The parts of the loop are
the states of the track `trainer`. The train engine reports the parts of its own steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from millrace.waits.registry import OTHER, Event, acting, current

Seconds = Counter[str]
"""Seconds by state."""

GEN = ("wait_samples", "wait_prev_gen")
"""The trainer waits until samples are drawn and scored."""

SYNC = ("sync_keep", "sync_transfer", "wait_rollouts", "sync_activate", "wait_publish")
"""The trainer works for a weight sync, or waits for one."""

IDLE = (*GEN, "wait_rollouts", "wait_validation", "wait_publish")
"""The trainer's devices are idle."""

_QUIET_S = 60.0

TOTALS = ("step", "gen", "train", "sync")
"""Sums of parts. `step` is the sum of all parts."""


class Integral:
    """The integral of a number over time."""

    def __init__(self, now: float) -> None:
        self.level = 0
        self._since, self._sum = now, 0.0

    def change(self, now: float, by: int) -> None:
        self._sum += self.level * (now - self._since)
        self.level += by
        self._since = now

    def until(self, now: float) -> float:
        return self._sum + self.level * (now - self._since)

    def flush(self, now: float) -> float:
        """Return the integral since the last flush, and start a new period."""
        total = self.until(now)
        self._sum, self._since = 0.0, now
        return total


class StateClock:
    """The seconds by state of one thing, which is in one state at a time."""

    def __init__(self, now: float, state: str = OTHER) -> None:
        self.state = state
        self._seconds, self._since = Seconds(), now

    def switch(self, now: float, state: str) -> None:
        if state != self.state:
            self._seconds.update(Seconds({self.state: now - self._since}))
            self.state, self._since = state, now

    def until(self, now: float) -> Seconds:
        return self._seconds + Seconds({self.state: now - self._since})


class ActorClock(StateClock):
    """A watcher of the states of an actor."""

    def __init__(self, now: float, actor: str) -> None:
        super().__init__(now)
        self.names = frozenset({actor, "relabelled"})

    def __call__(self, event: Event) -> None:
        """Switch the state, or move seconds of a state whose name is known only at its end."""
        if event.phase == "state":
            self.switch(event.time, event.name)
        else:
            source, target = event.facts["source"], event.facts["target"]
            seconds = min(event.facts["seconds"], max(0.0, self._seconds[source]))
            self._seconds.update({source: -seconds, target: seconds})

    def flush(self, now: float) -> dict[str, float]:
        """Return the seconds by state since the last flush, and start a new period."""
        self._seconds.update(Seconds({self.state: now - self._since}))
        seconds, self._seconds, self._since = self._seconds, Seconds(), now
        return {**seconds}


@contextmanager
def timed(actor: str) -> Iterator[dict[str, float]]:
    """Time the parts of the body as the states of `actor`. They are known at its end."""
    registry, seconds = current().registry, dict[str, float]()
    clock = ActorClock(registry.clock(), actor)
    with acting(actor), registry.watched_by(clock):
        yield seconds
    seconds |= clock.flush(registry.clock())


def live_row(seconds: float, active: float) -> dict[str, float]:
    """Return the rollout side's time with a live version, by verl's names and definitions.

    `active` are the seconds until no sample ran any more and none could start. On shared devices this
    is at the latest the moment at which the trainer takes them. Source: verl,
    experimental/fully_async_policy. A slot or a replica without work is not idle there while another
    one has work.
    """
    return {
        "fully_async/rollouter/version_time": seconds,
        "fully_async/rollouter/active_time": active,
        "fully_async/rollouter/idle_ratio": share(seconds - active, seconds),
    }


def seconds_of(watch: dict[str, float], engine: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of a version by name: every part, and the TOTALS.

    `watch` has the trainer's seconds by part. Its part `train` is the calls of the train engine.
    `engine` has the seconds of each call by part, as the engine measured them. The rest of the
    calls is the part `train_other`.
    """
    parts, inside = dict.fromkeys(GEN, 0.0) | watch, Seconds()
    for call in engine:
        inside.update(call)
    train = parts.pop("train", 0.0)
    parts |= split(train, inside)
    return parts | {
        "step": sum(parts.values()),
        "gen": sum(parts[name] for name in GEN),
        "train": train,
        "sync": sum(parts.get(name, 0.0) for name in SYNC),
    }


def split(train: float, inside: Seconds) -> dict[str, float]:
    """Divide the seconds of the calls of the train engine by what it measured of them."""
    measured = inside.total()
    # Another machine's clock may run a little faster. The parts then still add up.
    scale = min(1.0, share(train, measured))
    parts = {name: seconds * scale for name, seconds in inside.items()}
    return parts | {"train_other": max(0.0, train - measured)}


def timing_row(seconds: dict[str, float]) -> dict[str, float]:
    """Return the metrics of the trainer's time, from the result of `seconds_of`.

    timing_s/NAME                   seconds of a part or of a total
    timing_share/NAME               its share of timing_s/step
    perf/time_per_version           timing_s/step: seconds between two rows
    trainer/idle_ratio              share of the parts IDLE
    fully_async/trainer/idle_ratio  share of gen, which is verl's definition
    """
    step = seconds["step"]
    return {
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        **{f"timing_share/{name}": share(v, step) for name, v in seconds.items() if name != "step"},
        "perf/time_per_version": step,
        "trainer/idle_ratio": share(sum(seconds.get(name, 0.0) for name in IDLE), step),
        "fully_async/trainer/idle_ratio": share(seconds["gen"], step),
    }


def share(part: float, whole: float) -> float:
    """Return part / whole, or 0 if there is nothing."""
    return part / whole if whole else 0.0


def is_quiet(age_s: float | None, row: Mapping[str, float]) -> bool:
    """Whether a run with this newest row has shown nothing for long: for three versions."""
    return age_s is None or age_s > max(_QUIET_S, 3 * row.get("timing_s/step", 0.0))
