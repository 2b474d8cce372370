"""The seconds of one version: the parts of the trainer's time, and their totals by verl's names.

Exactly one part runs at a time, so the parts add up to the total `step`. The trainer's stopwatch
times the parts of the loop. The train engine reports the parts of its own steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GEN = ("wait_samples", "wait_prev_gen")
"""The trainer waits until samples are drawn and scored."""

SYNC = ("sync_keep", "sync_transfer", "wait_rollouts", "sync_activate", "wait_publish")
"""The trainer works for a weight sync, or waits for one."""

IDLE = (*GEN, "wait_rollouts", "wait_validation", "wait_publish")
"""The trainer's devices are idle."""

_QUIET_S = 60.0

TOTALS = ("step", "gen", "train", "sync")
"""Sums of parts. `step` is the sum of all parts."""


@dataclass(frozen=True, slots=True)
class LiveTime:
    """The rollout side's time from the moment at which a version went live until the next one."""

    seconds: float
    active: float
    """Seconds until no sample ran any more and none could start.

    On shared devices this is at the latest the moment at which the trainer takes them.
    """

    def row(self) -> dict[str, float]:
        """Return the figures by verl's names and definitions.

        Source: verl, experimental/fully_async_policy. A slot or a replica without work is not idle
        there while another one has work.
        """
        return {
            "fully_async/rollouter/version_time": self.seconds,
            "fully_async/rollouter/active_time": self.active,
            "fully_async/rollouter/idle_ratio": share(self.seconds - self.active, self.seconds),
        }


def seconds_of(watch: dict[str, float], engine: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of a version by name: every part, and the TOTALS.

    `watch` has the trainer's seconds by part. Its part `train` is the calls of the train engine.
    `engine` has the seconds of each call by part, as the engine measured them. The rest of the
    calls is the part `train_other`.
    """
    parts = dict.fromkeys(GEN, 0.0) | watch
    train = parts.pop("train", 0.0)
    inside: dict[str, float] = {}
    for call in engine:
        for name, seconds in call.items():
            inside[name] = inside.get(name, 0.0) + seconds
    measured = sum(inside.values())
    # Another machine's clock may run a little faster. The parts then still add up.
    scale = min(1.0, share(train, measured))
    parts |= {name: seconds * scale for name, seconds in inside.items()}
    parts["train_other"] = max(0.0, train - measured)
    return parts | {
        "step": sum(parts.values()),
        "gen": sum(parts[name] for name in GEN),
        "train": train,
        "sync": sum(parts.get(name, 0.0) for name in SYNC),
    }


def timing_row(seconds: dict[str, float]) -> dict[str, float]:
    """Return the metrics of the trainer's time, from the result of `seconds_of`.

    timing_s/NAME                   seconds of a part or of a total
    timing_share/NAME               its share of timing_s/step
    perf/time_per_version           timing_s/step: seconds between two rows
    trainer/idle_ratio              share of the parts IDLE
    fully_async/trainer/idle_ratio  share of gen, which is verl's definition
    """
    step = seconds["step"]
    return (
        {f"timing_s/{name}": value for name, value in seconds.items()}
        | {f"timing_share/{name}": share(seconds[name], step) for name in seconds if name != "step"}
        | {
            "perf/time_per_version": step,
            "trainer/idle_ratio": share(sum(seconds.get(name, 0.0) for name in IDLE), step),
            "fully_async/trainer/idle_ratio": share(seconds["gen"], step),
        }
    )


def share(part: float, whole: float) -> float:
    """Return part / whole, or 0 if there is nothing."""
    return part / whole if whole else 0.0


def is_quiet(age_s: float | None, row: Mapping[str, float]) -> bool:
    """Whether a run with this newest row has shown nothing for long: for three versions."""
    return age_s is None or age_s > max(_QUIET_S, 3 * row.get("timing_s/step", 0.0))
