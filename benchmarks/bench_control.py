"""The cost of the control plane.

The Rollouter, Trainer, SampleQueue and Ledger are real. The engines answer at once.

    python benchmarks/bench_control.py               all tables, about four minutes on one core
    python benchmarks/bench_control.py --profile     a profile of one run
    python benchmarks/bench_control.py --endless     10^6 samples, with the memory over time

`ledger lives` moves samples through a Ledger alone. `end to end` runs both loops. A straggler is
the first sample of each window: it finishes only when no other sample can move. Rates are samples
per second of processor time, because one thread does everything. A busy machine then changes them
less.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import platform
import pstats
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from millrace.pipeline.journal import Journal
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import DeviceSharing
from millrace.ports import RolloutStats, StepReport, TrainBatch, TransferReport
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import SingleTurn
from millrace.rollout.retry import RetryingReward
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger, LedgerSnapshot, Totals
from millrace.schedule.schedule import OnSync, Schedule
from millrace.types import (
    Author,
    Completion,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)
from millrace.waits.registry import Watcher, current

PROMPT = tokens_of(range(64))
RESPONSE = tokens_of(range(64))
LOG_PROBS = floats_of([-1.0] * 64)


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, PROMPT, "", "bench")


class InstantRollouts:
    """A rollout engine that answers in the next turn of the event loop, except for stragglers."""

    def __init__(self, straggler_every: int) -> None:
        self.version = 0
        self._every = straggler_every
        self._calls = 0

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self._calls += 1
        await asyncio.sleep(0)
        if self._every and int(session.partition("/")[0]) % self._every == 0:
            await self._until_nothing_moves()
        return (Segment(RESPONSE, Author.POLICY, self.version, LOG_PROBS, Stop.EOS),)

    async def _until_nothing_moves(self) -> None:
        seen, still = -1, 0
        while still < 20:  # turns of the event loop
            still = still + 1 if seen == self._calls else 0
            seen = self._calls
            await asyncio.sleep(0)

    async def interrupt(self) -> None: ...

    async def stats(self) -> RolloutStats:
        return RolloutStats()

    async def sleep(self, keep_weights: bool = True) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class InstantReward:
    async def score(self, prompt: Prompt, responses: Sequence[Completion]) -> list[Score]:
        return [Score(1.0)] * len(responses)


class InstantTrainer:
    async def step(self, batch: TrainBatch) -> StepReport:
        return StepReport(1, {})

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class InstantSync:
    def __init__(self, rollouts: InstantRollouts) -> None:
        self._rollouts = rollouts

    async def transfer(self, version: int) -> TransferReport:
        return TransferReport(0, 0.0)

    async def activate(self, version: int) -> float:
        self._rollouts.version = version
        return 0.0


class Nothing:
    """An Observer that ignores everything."""

    def published(self, trained: list[int], totals: Totals) -> None: ...

    def row(self, version: int, row: dict[str, float]) -> None: ...

    def checkpoint_due(self, version: int) -> bool:
        return False

    async def checkpoint(self, snapshot: LedgerSnapshot, *, last: bool = False) -> None: ...

    async def validated(self) -> None: ...

    def validate(self, version: int) -> None: ...


@dataclass(frozen=True)
class Case:
    capacity: int
    mini_batch: int
    trigger: int
    staleness: float
    lookahead: int
    straggler: bool

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            ppo_mini_batch_size=self.mini_batch,
            trigger_parameter_sync_step=self.trigger,
            staleness_threshold=self.staleness,
            on_sync=OnSync.INTERRUPT,
            lookahead=self.lookahead,
        )


def case(capacity: int, *, lookahead: bool, straggler: bool) -> Case:
    """Return a case in which half of `capacity` is one window of four mini-batches."""
    window = capacity // 2
    return Case(capacity, window // 4, 4, 1.0, window if lookahead else 1, straggler)


async def pipeline(
    case: Case,
    samples: int,
    n: int,
    watch: list[tuple[int, float]],
    watchers: Sequence[Watcher] = (),
    journal_of: Callable[[Ledger], Journal | None] = lambda ledger: None,
) -> float:
    """Run to the end and return samples per second.

    Appends (samples, MiB resident) to `watch`. `watchers` see the run. `journal_of` makes its
    journal.
    """
    ledger = Ledger(case.schedule, samples)
    journal = journal_of(ledger)
    queue = SampleQueue(ledger, deadline_s=600, journal=journal)
    rollouts = InstantRollouts(case.schedule.window if case.straggler else 0)
    reward: Any = InstantReward()
    if watchers:
        reward = RetryingReward(reward, 0)
    params = SamplingParams(max_tokens=64)
    roller = SampleRoller(SingleTurn(), reward, str, params, n, seed=0)
    rollouter = Rollouter(queue, Prompts(), RolloutPool([rollouts]), roller)
    observer = Nothing()
    if watch is not None:
        every = max(1, samples // 10)
        next_at = every
        process = psutil.Process()

        def published(trained: list[int], totals: Totals) -> None:
            nonlocal next_at
            if totals.retired >= next_at:
                next_at += every
                watch.append((totals.retired, process.memory_info().rss / 2**20))

        observer.published = published  # type: ignore[method-assign]
    trainer = Trainer(
        queue,
        rollouter,
        InstantTrainer(),  # type: ignore[arg-type]
        DeviceSharing(),
        InstantSync(rollouts),  # type: ignore[arg-type]
        observer,
    )
    with current().registry.watched_by(*watchers):
        await trainer.begin()
        start = time.process_time()
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(journal.run()) if journal is not None else None
            await run_pipeline(rollouter, trainer)
            if writer is not None:
                writer.cancel()
        seconds = time.process_time() - start
    assert ledger.done() and ledger.retired == samples
    return samples / seconds


def lives(case: Case, samples: int) -> float:
    """Return samples per second through a Ledger alone.

    The straggler is the first sample of a window.
    """
    ledger = Ledger(case.schedule, samples)
    sample = Sample(Prompt(0, PROMPT, "", "bench"), ())
    stragglers: list[int] = []
    start = time.process_time()
    while not ledger.done():
        moved = False
        while ledger.can_admit():
            i = ledger.admit(sample.prompt)
            ledger.start(i)
            moved = True
            if case.straggler and i % case.schedule.window == 0:
                stragglers.append(i)
            else:
                ledger.finish(i, sample)
        while ledger.can_take() and not ledger.sync_due():
            ledger.take()
            ledger.trained()
            moved = True
        if ledger.sync_due():
            ledger.seal()
            ledger.published()
        elif not moved:
            ledger.finish(stragglers.pop(0), sample)
        ledger.check()
    return samples / (time.process_time() - start)


def memory_of_slots(count: int) -> float:
    """Return bytes of each READY sample: slot, prompt object and trajectory, without its tokens."""
    gc.collect()
    tracemalloc.start()
    ledger = Ledger(Schedule(ppo_mini_batch_size=count))
    prompts = Prompts()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(count):
        prompt = prompts[ledger.admitted]
        i = ledger.admit(prompt)
        ledger.start(i)
        ledger.finish(i, Sample(prompt, ()))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / count


def cases() -> Iterator[Case]:
    for lookahead in (False, True):
        for straggler in (False, True):
            for capacity in (64, 1024, 65_536):
                yield case(capacity, lookahead=lookahead, straggler=straggler)


def tables(samples: int, repeats: int) -> dict[str, object]:
    rows = []
    print("| order | straggler | capacity | ledger lives/s | samples/s, n=1 |")
    print("|---|---|--:|--:|--:|")
    for c in cases():
        count = max(samples, 3 * c.capacity)
        alone = max(lives(c, count) for _ in range(repeats))
        whole = max(asyncio.run(pipeline(c, count, 1, [])) for _ in range(repeats))
        order = f"look ahead {c.lookahead}" if c.lookahead > 1 else "strict"
        print(
            f"| {order} | {c.straggler} | {c.capacity:,} | {alone:,.0f} | {whole:,.0f} |",
            flush=True,
        )
        rows.append({"case": c.__dict__, "lives_per_s": alone, "samples_per_s": whole})
    big = Case(3072, 512, 4, 0.5, 2048, True)
    version_s = {
        f"n={n}": 2048 / max(asyncio.run(pipeline(big, 4 * 2048, n, [])) for _ in range(repeats))
        for n in (1, 8)
    }
    ledger_s = 2048 / max(lives(big, 10 * 2048) for _ in range(repeats))
    print(f"\nwindow 2,048, capacity 3,072, straggler: ledger {ledger_s:.3f} s a version")
    print(", ".join(f"both loops with {n} {s:.2f} s" for n, s in version_s.items()))
    slot = memory_of_slots(65_536)
    print(f"memory of a READY sample without its tokens: {slot:.0f} bytes")
    return {
        "rows": rows,
        "version_2048": {"ledger_s": ledger_s, "loops_s": version_s},
        "bytes_per_sample": slot,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3, help="runs; the best one counts")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--endless", action="store_true", help="10^6 samples with capacity 1,024")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, object] = {"python": platform.python_version(), "cpu": platform.machine()}
    if options.profile:
        profile = cProfile.Profile()
        c = case(1024, lookahead=True, straggler=True)
        profile.runcall(lambda: asyncio.run(pipeline(c, options.samples, 1, [])))
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    if options.endless:
        watch: list[tuple[int, float]] = []
        c = case(1024, lookahead=True, straggler=True)
        rate = asyncio.run(pipeline(c, 1_000_000, 1, watch))
        print(f"1,000,000 samples at {rate:,.0f}/s; MiB resident on the way:")
        print(", ".join(f"{count:,}: {mib:.1f}" for count, mib in watch))
        figures |= {"endless": {"samples_per_s": rate, "resident_mib": watch}}
    else:
        figures |= tables(options.samples, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
