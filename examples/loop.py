"""The whole loop of asynchronous RL in one process: admit, draw, score, train, sync.

    python examples/loop.py [key=value ...]     keys of quickstart, as in `millrace train`

This file is for reading. It has the two loops of `millrace/pipeline/` without what a long run
needs besides: workers in processes, checkpoints, deadlines, metrics, validation, agents. The
Ledger, the Schedule and both engines are the real ones.

    roll()     admits a prompt when the Ledger has a free slot, draws its n responses, scores them
    train()    takes finished samples, makes an optimizer step, and syncs when the window is full

Both run in one event loop. The Ledger alone decides who may do what, and it knows no clock.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from millrace.config import Config, recipe
from millrace.data.prompts import PromptStream
from millrace.decode.engine import TorchRolloutEngine
from millrace.decode.engine import build as build_rollout_engine
from millrace.ports import TrainBatch
from millrace.rewards.builtin import default as score_by_data_source
from millrace.run import problems
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import OnSync
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.train.fsdp.engine import build as build_train_engine
from millrace.types import (
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    joined,
)


@dataclass
class Loop:
    """What both loops share."""

    config: Config
    ledger: Ledger
    prompts: PromptStream
    policy: FsdpTrainEngine
    """Holds the weights under training, in this process."""
    replica: TorchRolloutEngine
    """Draws tokens with its own copy of the weights."""
    text: Callable[[Tokens], str]
    """Turns tokens into text."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified after each move of the Ledger that the other loop may wait for."""

    async def moved(self) -> None:
        """Tell the other loop that the Ledger has changed."""
        async with self.changed:
            self.changed.notify_all()

    # -- rollouts

    async def roll(self) -> None:
        """Admit prompts as long as the run needs samples. Each sample is a task of its own."""
        async with asyncio.TaskGroup() as samples:
            while True:
                async with self.changed:
                    await self.changed.wait_for(self.ledger.can_admit)
                prompt = self.prompts[self.ledger.admitted]
                sample_id = self.ledger.admit(prompt)
                samples.create_task(self.sample(sample_id, prompt))

    async def sample(self, sample_id: int, prompt: Prompt) -> None:
        """Draw and score the n responses to one prompt."""
        self.ledger.start(sample_id)
        numbers = range(self.config.rollout.n)
        responses = [self.response(sample_id, number, prompt) for number in numbers]
        trajectories = await asyncio.gather(*responses)
        self.ledger.finish(sample_id, Sample(prompt, tuple(trajectories)))
        await self.moved()

    async def response(self, sample_id: int, number: int, prompt: Prompt) -> Trajectory:
        """Draw one response, and continue it after each interruption with the newest weights."""
        limit = self.config.rollout.max_response_length
        segments: tuple[Segment, ...] = ()
        while not segments or segments[-1].stop is Stop.INTERRUPTED:
            drawn = joined(s.tokens for s in segments)
            settings = SamplingParams(
                limit - len(drawn),
                temperature=self.config.rollout.temperature,
                seed=hash((sample_id, number)) % 2**31,
                offset=len(drawn),
            )
            context = joined([prompt.tokens, drawn])
            segments += await self.replica.generate(context, settings, f"{sample_id}/{number}")
        text = self.text(joined(s.tokens for s in segments))
        return Trajectory.of(segments, self.score(prompt, text))

    def score(self, prompt: Prompt, text: str) -> Score:
        """Score a response by the reward function of its data source."""
        found = score_by_data_source(
            prompt.data_source, text, prompt.ground_truth, prompt.extra_info
        )
        return Score(float(found["score"] if isinstance(found, dict) else found))

    # -- training

    async def train(self) -> None:
        """Take the samples of a local step, train on them, and sync when the Ledger says so."""
        ledger = self.ledger
        while not ledger.done():
            async with self.changed:
                await self.changed.wait_for(ledger.can_take)
            samples = ledger.take()
            report = await self.policy.step(TrainBatch(tuple(samples), ledger.trainer_version))
            ledger.trained()
            if ledger.sync_due():
                await self.sync()
            self.show(samples, report.metrics)

    async def sync(self) -> None:
        """Send the weights to the replica, and free the slots of the samples that made them."""
        version = self.ledger.seal()
        if self.ledger.schedule.on_sync is OnSync.INTERRUPT:
            await self.replica.interrupt()  # every response returns what it has, and goes on later
        await self.replica.swap(version, dict(self.policy.full_weights()))
        self.ledger.published()
        self.ledger.check()
        await self.moved()

    def show(self, samples: list[Sample], metrics: dict[str, float]) -> None:
        scores = [t.score.value for s in samples for t in s.trajectories if t.score]
        versions = [
            s.version for sample in samples for t in sample.trajectories for s in t.segments
        ]
        print(
            f"version {self.ledger.version:3d}  step {self.ledger.local_steps:3d}"
            f"  reward {sum(scores) / len(scores):.3f}"
            f"  loss {metrics.get('actor/pg_loss', math.nan):+.4f}"
            f"  drawn by versions {min(versions)} to {max(versions)}"
            f"  {self.ledger.describe().partition('(')[2].rstrip(')')}",
            flush=True,
        )


async def main(*overrides: str) -> None:
    config = recipe.load("quickstart", overrides)
    if config.schedule.on_sync is OnSync.DRAIN:
        raise SystemExit("no pause for running responses here: mode=async_partial or async_swap")
    if (samples := config.rollout.total_rollout_steps) is None:
        raise SystemExit("rollout.total_rollout_steps is missing")
    torch.set_num_threads(1)  # the model is tiny
    with tempfile.TemporaryDirectory() as folder:
        tasks = problems.prepare(config, problems.load(config), Path(folder))
        policy = build_train_engine(config, folder, rank=0, world_size=1)
        await warm_up(config, policy, tasks)
        ledger = Ledger(config.schedule, limit=samples)
        await policy.begin("rl", config.schedule.optimizer_steps(samples))
        replica = build_rollout_engine(config.sides, config.model, folder)
        await replica.swap(0, dict(policy.full_weights()))
        loop = Loop(config, ledger, tasks.train, policy, replica, tasks.chat.decode)
        async with asyncio.TaskGroup() as loops:  # an error of one loop ends the other
            rolling = loops.create_task(loop.roll())
            await loop.train()
            rolling.cancel()
        print(ledger.describe())
        await replica.close()
        await policy.close()


async def warm_up(config: Config, policy: FsdpTrainEngine, tasks: problems.Problems) -> None:
    """Teach a new model the form of an answer, from demonstrations that are often wrong."""
    sft = config.sft
    await policy.begin("sft", sft.steps)
    for step in range(sft.steps):
        report = await policy.sft_step(tasks.examples(step * sft.batch_size, sft.batch_size))
    print(f"warm-up: {sft.steps} steps, loss {report.metrics['sft/loss']:.3f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
