"""The state of a world that outlasts an attempt: the disk, the checks, the story."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from millrace.extras.faults.checks import Checks, Expected
from millrace.extras.faults.disk import Disk, SimPath, View
from millrace.extras.faults.scenario import Scenario
from millrace.types import SamplingParams

RUN = "/simulated/run"


@dataclass
class Line:
    """One line of a world's story."""

    time: float
    text: str


@dataclass
class Outcome:
    """The log and counters of a simulated world."""

    seed: int
    violation: str = ""
    story: list[Line] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    virtual_s: float = 0.0
    digest: int = 0
    """A checksum of all events. A replay of the seed has the same."""


class World:
    """The state of one world."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.dice = random.Random(f"world/{scenario.seed}")
        self.disk = Disk(self.dice)
        c = scenario.config
        params = SamplingParams(c.rollout.max_response_length)
        filters = c.algorithm.filter_groups.enable
        lag = c.schedule.capacity + c.schedule.lookahead - 2
        own = c.trainer.seed, c.rollout.n, scenario.samples, params, filters, lag
        expected = Expected(*own, c.algorithm.tppo.window)
        self.checks = Checks(c.schedule, expected, filters)
        self.outcome = Outcome(scenario.seed)
        self._failing = 0
        self.rots = False
        """Whether the newest checkpoint is damaged before the next attempt."""
        self.journal_rots = False
        """Whether the journal is damaged before the next attempt."""
        self.rough = False
        """Whether the disk has refused writes."""
        self.cut = False
        """Whether the power is cut before the next attempt."""

    def fails(self, calls: int) -> None:
        """Count calls of the reward that are about to fail."""
        self._failing += calls

    @property
    def drops(self) -> bool:
        """Whether so many rewards failed that one score may have run out of tries."""
        return self._failing > self.scenario.config.reward.retries

    def tell(self, text: str) -> None:
        self.outcome.story.append(Line(asyncio.get_running_loop().time(), text))

    def path(self, view: View) -> SimPath:
        """Return the run's folder as a process sees it."""
        return SimPath(view, RUN)
