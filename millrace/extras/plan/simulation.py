"""Runs the real loops and the real Ledger on the virtual clock, over the costs of a case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.schedule.steady import counted
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Prompt, SamplingParams, tokens_of

REQUESTS = 320
"""Requests of a simulated window, or a little more. A larger window is divided."""


@dataclass(frozen=True, slots=True)
class MeasuredLengths(DrawnLengths):
    """Lengths of real responses, from the quantiles of runs."""

    points: tuple[tuple[float, float], ...] = ()
    """Shares of the responses, and their longest length, in order."""

    def of(self, seed: int) -> int:
        shares, lengths = zip(*self.points, strict=True)
        place = seed % 9973 / 9972  # a seed is a hash of its prompt and of its number
        length = math.exp(np.interp(place, shares, np.log(lengths)))
        return max(1, min(self.limit, round(length)))


def measured_lengths(points: Sequence[tuple[float, float]], limit: int) -> MeasuredLengths:
    median = min(length for share, length in points if share >= 0.5)
    return MeasuredLengths(median, 0.0, limit, tuple((share, max(1.0, n)) for share, n in points))


@dataclass(frozen=True, kw_only=True)
class Case:
    """The numbers of one run that is simulated."""

    schedule: Schedule
    n: int
    replicas: int
    slots: int
    """Decode slots of each replica."""
    cost: CostModel
    lengths: DrawnLengths
    prompt: int = 1
    """Tokens that an engine reads of each prompt."""
    versions: int = 8
    """Versions that count, or more."""
    divide: bool = True
    """Whether a large window is divided, with its replicas or with the requests of each."""

    @property
    def whole_versions(self) -> int:
        """The versions with those in which the pipeline fills or drains."""
        return self.versions + 2 * math.ceil(self.schedule.capacity / self.schedule.window) + 1

    def smaller(self) -> Case:
        """Return a case with the same load on each replica, and fewer requests.

        First, replicas and samples are divided. Then one request stands for several.
        """
        if not self.divide:
            return self
        mini, requests = self.schedule.ppo_mini_batch_size, self.schedule.window * self.n
        by = _divisor(math.gcd(self.replicas, mini), requests / REQUESTS)
        one = _divisor(math.gcd(self.slots, mini // by), requests / by / REQUESTS)
        ahead = max(1, math.ceil(self.schedule.lookahead / by / one))
        schedule = replace(self.schedule, ppo_mini_batch_size=mini // by // one, lookahead=ahead)
        cost = replace(
            self.cost,
            train_token_s=self.cost.train_token_s * by * one,
            request_s=self.cost.request_s * one,
            prefill_token_s=self.cost.prefill_token_s * one,
            start_s=self.cost.start_s * one,
        )
        slots, replicas = self.slots // one, self.replicas // by
        return replace(self, schedule=schedule, replicas=replicas, slots=slots, cost=cost)


def _divisor(of: int, most: float) -> int:
    """Return the largest divisor of a number that is not over `most`, or 1."""
    return max((k for k in range(1, of + 1) if of % k == 0 and k <= most), default=1)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The mean figures of a version."""

    seconds: float
    wait_s: float
    """Seconds for which the trainer waits for samples."""
    trainer_idle: float
    rollouts_idle: float
    staleness: float


@dataclass
class Rows:
    """An Observer that keeps the metrics of versions."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def published(self, *_: Any) -> None: ...

    def row(self, version: int, row: dict[str, float]) -> None:
        self.rows.append(row)

    def checkpoint_due(self, version: int) -> bool:
        return False

    async def checkpoint(self, *_: Any, **__: Any) -> None: ...

    async def validated(self) -> None: ...

    def validate(self, version: int) -> None: ...


class _Prompts:
    def __init__(self, length: int) -> None:
        self._tokens = tokens_of([1] * length)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, self._tokens, "", "simulated")


def simulate(case: Case) -> Outcome:
    """Return the figures of a version. Those in which the pipeline fills or drains do not count."""
    case = case.smaller()
    schedule, cost = case.schedule, case.cost
    versions = case.whole_versions

    async def run() -> list[dict[str, float]]:
        ledger = Ledger(schedule, versions * schedule.window)
        queue, kept = SampleQueue(ledger, deadline_s=1e8), Rows()
        engines = [SimRolloutEngine(cost, slots=case.slots) for _ in range(case.replicas)]
        roller = SampleRoller(
            SingleTurn(),
            SimReward(cost),
            lambda _: "",
            SamplingParams(max_tokens=case.lengths.limit),
            case.n,
            seed=0,
            lengths=case.lengths,
        )
        rollouter = Rollouter(queue, _Prompts(case.prompt), RolloutPool(engines), roller)
        train, sync = SimTrainEngine(cost), SimWeightSync(cost, engines)
        turns = turns_of(schedule.colocated, rollouter.pool, train)
        trainer = Trainer(queue, rollouter, train, turns, sync, kept)
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
        return [row for row in kept.rows if "perf/time_per_version" in row]

    rows = clock.run(run())
    rows = [rows[k] for k in counted(versions * schedule.window, 1, schedule)]
    wall = sum(row["perf/time_per_version"] for row in rows)

    def share(name: str) -> float:
        return sum(row.get(name, 0.0) * row["perf/time_per_version"] for row in rows) / wall

    def seconds(name: str) -> float:
        return sum(row.get(f"timing_s/{name}", 0.0) for row in rows) / len(rows)

    return Outcome(
        seconds=wall / len(rows),
        wait_s=seconds("wait_samples") + seconds("wait_prev_gen"),
        trainer_idle=share("trainer/idle_ratio"),
        rollouts_idle=share("rollouter/idle_ratio"),
        staleness=share("staleness/mean"),
    )
