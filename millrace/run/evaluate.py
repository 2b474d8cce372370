"""`millrace eval`: validation alone. Also makes the validator of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from millrace.config import Config
from millrace.errors import bad_value
from millrace.observe.panel import shown
from millrace.observe.progress import Progress
from millrace.observe.sinks import JsonLines
from millrace.pipeline.validation import Played, Result, Validator
from millrace.ports import RolloutEngine
from millrace.rollout.retry import RetryingReward
from millrace.run.agents import limits_of
from millrace.run.engines import Engines
from millrace.run.session import Session, open_session
from millrace.run.start import start_state
from millrace.types import PolicyVersion, Prompt, Sample, SamplingParams, Tokens, Trajectory


def make_validator(s: Session, pool: RolloutEngine, *, waits: bool = False) -> Validator | None:
    """Return the validator, or None if there is no validation data.

    With `waits`, its requests wait for replicas that start anew.
    """
    return validator_of(s, pool, s.problems.val, waits=waits) if s.problems.val else None


def validator_of(
    s: Session, pool: RolloutEngine, prompts: Sequence[Prompt], *, waits: bool
) -> Validator:
    """Return what plays and scores `prompts` with the settings of the validation."""
    rollout, kwargs = s.config.rollout, s.config.rollout.val_kwargs
    params = SamplingParams(
        rollout.max_response_length,
        kwargs.temperature,
        kwargs.top_p,
        top_k=kwargs.top_k,
        stop=rollout.stop,
    )
    return Validator(
        prompts,
        pool,
        RetryingReward(s.reward, s.config.reward.retries, "val/"),
        s.problems.chat.decode,
        params,
        kwargs.n,
        kwargs.greedy,
        s.config.trainer.seed,
        s.config.reward.max_error_share,
        s.reward.whole_group,
        s.agent,
        limits_of(s.config.agents, rollout),
        s.config.agents.tries,
        waits,
    )


async def evaluate(config: Config, progress: Progress) -> dict[str, Any]:
    """Validate a checkpoint (trainer.resume), a model (model.path) or the warmed-up model.

    A lost replica is started anew. The run's folder gets the responses and the values, also of an
    evaluation that fails.
    """
    if not config.data.val_files:
        raise bad_value(
            "data.val_files",
            (),
            "there are no problems to validate on",
            "'data.val_files=[task:sort_digits?split=val&size=256]'",
        )
    async with open_session(config, progress, work="eval") as s:
        ledger = await start_state(s)
        await s.engines.publish(ledger.version)
        validator = make_validator(s, s.engines.pool, waits=True)
        assert validator is not None
        phase = f"validating version {ledger.version} on {len(s.problems.val)} problems"
        progress.phase(phase)
        played: dict[int, Played] = {}
        total = len(s.problems.val) * (validator.n + validator.greedy)
        try:
            async with revived(s.engines, ledger.version):
                scored = partial(progress.phase, phase)
                result = await validator.run(ledger.version, scored, played)
        except BaseException:
            if played:
                result = validator.result(ledger.version, played)
                samples = keep(s.run.path, result, played, s.problems.chat.decode)
                ended = f"the evaluation ended early, with {len(played)} of {total} responses"
                progress.note(f"{ended}: {shown(result.values)}")
                progress.note(f"their samples: {samples}")
            raise
        samples = keep(s.run.path, result, played, s.problems.chat.decode)
    return {
        "run_dir": str(s.run.path),
        "version": result.version,
        "val": result.values,
        "samples": str(samples),
        "complete": True,
    }


@asynccontextmanager
async def revived(engines: Engines, version: PolicyVersion) -> AsyncIterator[None]:
    """Send the weights again, while the body runs, once all replicas are ones that started anew."""
    roster = engines.pool.roster

    async def send() -> None:
        deadline_s = engines.pool.deadline_s
        while True:
            await roster.until(lambda: roster.starved)
            async with asyncio.timeout(deadline_s):
                await engines.publish(version)

    async with asyncio.TaskGroup() as tasks:
        sender = tasks.create_task(send(), name="weights of restarted replicas")
        yield
        sender.cancel()


def keep(
    run_dir: Path, result: Result, played: Mapping[int, Played], decode: Callable[[Tokens], str]
) -> Path:
    """Write the values to metrics.jsonl and the responses to a file of samples. Return the file."""
    from millrace.observe.files import make_folder
    from millrace.report.samples import store

    sink = JsonLines(run_dir / "metrics.jsonl", None)
    sink.write(result.version, result.values)
    sink.close()
    by_prompt: dict[tuple[bool, int], tuple[Prompt, list[Trajectory]]] = {}
    for n in sorted(played):
        one = played[n]
        if one.trajectory is not None:
            _, drawn = by_prompt.setdefault((one.greedy, one.prompt.index), (one.prompt, []))
            drawn.append(one.trajectory)
    kept = [
        (
            Sample(prompt, tuple(drawn), result.version),
            result.version,
            "validated/greedy" if greedy else "validated",
        )
        for (greedy, _), (prompt, drawn) in by_prompt.items()
    ]
    path = store.path_of(run_dir, result.version, attempt=1)
    make_folder(path.parent)
    store.write(path, kept, decode)
    return path
