"""The supervised warm-up, and `millrace sft`, which is the warm-up alone."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any

from millrace.config import Config
from millrace.errors import bad_value
from millrace.observe.progress import Progress
from millrace.rollout.episode import SingleTurn
from millrace.run.session import Session, open_session
from millrace.types import Tokens, tokens_of


async def warm_up(s: Session) -> float:
    """Run the supervised steps on demonstrations. Returns the loss of the last step."""
    steps, size = s.config.sft.steps, s.config.sft.batch_size
    await s.engines.train.begin("sft", steps)
    loss, examples = float("nan"), await _examples(s, 0, size)
    for k in range(steps):
        step = asyncio.ensure_future(s.engines.train.sft_step(examples))
        # The next batch is made meanwhile. The event loop still has to send this one.
        try:
            examples = await _examples(s, (k + 1) * size, size if k + 1 < steps else 0)
            loss = (await step).metrics["sft/loss"]
        finally:
            step.cancel()
        s.progress.phase("supervised warm-up", k + 1, steps, f"loss {loss:.3f}")
    return loss


async def _examples(s: Session, start: int, count: int) -> list[tuple[Tokens, ...]]:
    """Return demonstrations as tokens. With an agent, it plays each one with a script."""
    if isinstance(s.agent, SingleTurn):
        return [*await asyncio.to_thread(s.problems.examples, start, count)]
    from millrace.agents.scripted import demonstration

    chat = s.problems.chat
    eos, encode, examples = tokens_of(chat.eos_ids[:1]), cache(chat.encode), []
    for prompt, turns in await asyncio.to_thread(s.problems.scripts, start, count):
        examples.append(await demonstration(s.agent, prompt, turns, encode, eos))
        await asyncio.sleep(0)  # An agent in process may not wait, and others need the loop.
    return examples


async def run_sft(config: Config, progress: Progress) -> dict[str, Any]:
    """Run the warm-up alone and write its weights as a Hugging Face folder."""
    if config.trainer.run_dir and (Path(config.trainer.run_dir) / "sft").exists():
        rule = "its folder sft already has a supervised model"
        raise bad_value("trainer.run_dir", config.trainer.run_dir, rule, "another folder")
    async with open_session(config, progress, rollout=False) as s:
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
