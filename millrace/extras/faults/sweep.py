"""Many seeds, on several processes, and the fewest faults that still break a seed."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from millrace.extras.faults.scenario import KINDS, Scenario, draw
from millrace.extras.faults.state import Outcome
from millrace.extras.faults.world import run_world

_CHUNK = 20
"""Seeds that a process takes at once."""


@dataclass
class Found:
    """The result of a range of seeds."""

    seeds: int = 0
    last: int = 0
    """The seed that ended last."""
    attempts: int = 0
    virtual_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault fired."""
    violations: dict[int, str] = field(default_factory=dict)
    """The violation of each seed that has one."""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.last = outcome.seed
        self.attempts += outcome.attempts
        self.virtual_s += outcome.virtual_s
        self.fired += outcome.fired
        if outcome.violation:
            self.violations[outcome.seed] = outcome.violation

    @property
    def silent(self) -> list[str]:
        """Return the kinds of faults that never fired."""
        return [kind for kind in KINDS if not self.fired[kind]]


def run_seed(seed: int) -> Outcome:
    return run_world(draw(seed))


def _leave_ctrl_c() -> None:
    """Leave Ctrl-C to the process that collects the outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def sweep(seeds: Sequence[int], jobs: int = 1) -> Iterator[Outcome]:
    """Yield the outcome of each seed, in any order, from `jobs` processes."""
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _leave_ctrl_c) as pool:
        yield from pool.imap_unordered(run_seed, seeds, _CHUNK)


def shrink(scenario: Scenario) -> tuple[Scenario, Outcome]:
    """Return the scenario with the fewest faults that still has a violation, and its outcome.

    A fault is left out if the rest still breaks the same invariant.
    """
    outcome = run_world(scenario)
    name = outcome.violation.partition(":")[0]
    for fault in scenario.faults if name else ():
        fewer = replace(scenario, faults=tuple(f for f in scenario.faults if f is not fault))
        without = run_world(fewer)
        if without.violation.partition(":")[0] == name:
            scenario, outcome = fewer, without
    return scenario, outcome


def story(scenario: Scenario, outcome: Outcome) -> list[str]:
    """Return the timeline of a world, for people."""
    schedule, config = scenario.config.schedule, scenario.config
    lines = [
        f"seed {scenario.seed}: {scenario.mode}, {scenario.samples} samples of "
        f"{config.rollout.n} responses, window {schedule.window}, capacity {schedule.capacity}, "
        f"lookahead {schedule.lookahead}, {scenario.ranks} ranks, {scenario.replicas} replicas"
    ]
    lines += [f"  {line.time:9.3f} s  {line.text}" for line in outcome.story]
    end = outcome.violation or "no violation"
    return [*lines, f"  {outcome.virtual_s:9.3f} s  {end}"]
