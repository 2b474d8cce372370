"""The weights that a run starts from: of a checkpoint, or of the supervised warm-up. `millrace sft` too."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any

from millrace.config import Config
from millrace.errors import bad_value
from millrace.observe.progress import Progress
from millrace.pipeline.checkpoint import read_ledger
from millrace.rollout.demonstration import demonstration
from millrace.rollout.episode import SingleTurn
from millrace.run.session import Session, open_session
from millrace.run.starts import WARM_UP
from millrace.schedule.ledger import Ledger
from millrace.types import Tokens, tokens_of
from millrace.waits.registry import starting


async def warm_up(s: Session) -> float:
    """Run the supervised steps on demonstrations. Returns the loss of the last step."""
    steps, size = s.config.sft.steps, s.config.sft.batch_size
    await s.engines.train.begin("sft", steps)
    made = _Batches(s)
    loss, examples = float("nan"), await made.batch(0, size)
    for k in range(steps):
        step = asyncio.ensure_future(s.engines.train.sft_step(examples))
        # The next batch is made meanwhile. The event loop still has to send this one.
        try:
            examples = await made.batch((k + 1) * size, size if k + 1 < steps else 0)
            loss = (await step).metrics["sft/loss"]
        finally:
            step.cancel()
        s.progress.phase("supervised warm-up", k + 1, steps, f"loss {loss:.3f}")
    return loss


class _Batches:
    """The demonstrations of each step, as tokens."""

    def __init__(self, s: Session) -> None:
        self._s = s
        self._kept: list[tuple[Tokens, ...]] = []

    async def batch(self, start: int, count: int) -> list[tuple[Tokens, ...]]:
        """Return demonstrations start .. start + count. After `sft.demonstrations` they repeat."""
        most = self._s.config.sft.demonstrations
        if not most:
            return await _examples(self._s, start, count)
        while len(self._kept) < min(start + count, most):
            have = len(self._kept)
            self._kept += await _examples(self._s, have, min(count, most - have))
        return [self._kept[i % most] for i in range(start, start + count)]


async def _examples(s: Session, start: int, count: int) -> list[tuple[Tokens, ...]]:
    """Return demonstrations as tokens. With an agent, it plays all of them with scripts, at once."""
    if isinstance(s.agent, SingleTurn):
        return [*await asyncio.to_thread(s.problems.examples, start, count)]
    chat = s.problems.chat
    eos, encode = tokens_of(chat.eos_ids[:1]), cache(chat.encode)
    scripts = await asyncio.to_thread(s.problems.scripts, start, count)
    playing = [
        asyncio.ensure_future(demonstration(s.agent, prompt, turns, encode, eos))
        for prompt, turns in scripts
    ]
    try:
        return list(await asyncio.gather(*playing))
    finally:
        for one in playing:
            one.cancel()


async def run_sft(config: Config, progress: Progress) -> dict[str, Any]:
    """Run the warm-up alone and write its weights as a Hugging Face folder."""
    if config.trainer.run_dir and (Path(config.trainer.run_dir) / "sft").exists():
        rule = "its folder sft already has a supervised model"
        raise bad_value("trainer.run_dir", config.trainer.run_dir, rule, "another folder")
    async with open_session(config, progress, work="sft") as s:
        start = time.perf_counter()
        loss = await warm_up(s)
        seconds = time.perf_counter() - start
        folder = s.run.path / "sft"
        await s.engines.train.export(str(folder))
        s.problems.chat.tokenizer.save_pretrained(folder)
    return {
        "run_dir": str(s.run.path),
        "model": str(folder),
        "steps": config.sft.steps,
        "loss": loss,
        "seconds": seconds,
        "complete": True,
    }


async def start_state(s: Session) -> Ledger:
    """Load or make the weights that training starts from, and return their ledger.

    The weights are those of a checkpoint, or the warmed-up ones.
    """
    derived = s.derived
    if s.run.resume_from is not None:
        s.progress.note(f"resuming from {s.run.resume_from}")
        await s.engines.train.begin("rl", derived.lr_horizon)
        await s.engines.train.load(str(s.run.resume_from / "engine"))
        snapshot = read_ledger(s.run.resume_from)
        ledger = Ledger.restore(s.config.schedule, snapshot, derived.samples)
        if ledger.retired >= derived.samples:
            s.progress.note(
                f"nothing is left to train: the checkpoint has all {derived.samples} samples of "
                "the run"
            )
        return ledger
    ledger = Ledger(s.config.schedule, derived.samples)
    if s.config.sft.steps:
        with starting(WARM_UP):
            await warm_up(s)
    await s.engines.train.begin("rl", derived.lr_horizon)
    if s.config.sft.steps:  # a run that is killed after this does not repeat the warm-up
        s.checkpoints.supersede(-1)
        await s.checkpoints.save(ledger.snapshot(), s.engines.train)
    return ledger
