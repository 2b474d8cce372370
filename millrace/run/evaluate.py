"""`millrace eval`: validation alone. Also makes the validator of a session."""

from __future__ import annotations

from functools import partial
from typing import Any

from millrace.config import Config
from millrace.errors import bad_value
from millrace.observe.progress import Progress
from millrace.observe.watch import UNWATCHED, Watch
from millrace.observe.watched import WatchedReward
from millrace.pipeline.validation import Validator
from millrace.ports import RolloutEngine
from millrace.rollout.again import AskedAgain
from millrace.run.agents import limits_of
from millrace.run.folder import open_eval_dir
from millrace.run.session import Session, open_session
from millrace.run.start import start_state
from millrace.types import SamplingParams


def make_validator(s: Session, pool: RolloutEngine, watch: Watch = UNWATCHED) -> Validator | None:
    """Return the validator, or None if there is no validation data."""
    if not s.problems.val:
        return None
    rollout, kwargs = s.config.rollout, s.config.rollout.val_kwargs
    params = SamplingParams(
        rollout.max_response_length,
        kwargs.temperature,
        kwargs.top_p,
        top_k=kwargs.top_k,
        stop=rollout.stop,
    )
    return Validator(
        s.problems.val,
        pool,
        AskedAgain(WatchedReward(s.reward, watch, "val/"), s.config.reward.retries),
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
    )


async def evaluate(config: Config, progress: Progress) -> dict[str, Any]:
    """Validate a checkpoint (trainer.resume), a model (model.path) or the warmed-up model."""
    if not config.data.val_files:
        raise bad_value(
            "data.val_files",
            (),
            "there are no problems to validate on",
            "'data.val_files=[task:sort_digits?split=val&size=256]'",
        )
    run = open_eval_dir(config)
    async with open_session(config, progress, run=run) as s:
        ledger = await start_state(s)
        await s.engines.publish(ledger.version)
        validator = make_validator(s, s.engines.pool)
        assert validator is not None
        phase = f"validating version {ledger.version} on {len(s.problems.val)} problems"
        progress.phase(phase)
        result = await validator.run(ledger.version, partial(progress.phase, phase))
    return {
        "run_dir": str(run.path),
        "version": result.version,
        "val": result.values,
        "complete": True,
    }
