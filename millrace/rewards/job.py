"""From the configuration of a reward to the job of its workers."""

from __future__ import annotations

from millrace.config import OneReward
from millrace.rewards.wire import Job

_LOAD_FUNCTION_S = 120.0
_LOAD_MODEL_S = 900.0
_ROUND = 32
"""Batches that one worker may have waiting. Of more texts, more have similar lengths."""


def job_of(config: OneReward, section: str = "reward") -> Job:
    """Return the job of one reward. `section` is the name of its section."""
    if config.kind == "model":
        model = config.model
        return Job(
            "model",
            f"{section}.model",
            model.num_workers,
            _ROUND * model.batch_size,
            model.timeout_s,
            _LOAD_MODEL_S,
            model.model_dump(mode="json"),
        )
    if config.kind == "judge":
        judge = config.judge
        return Job(
            "judge",
            f"{section}.judge",
            1,
            judge.max_concurrency,
            judge.timeout_s,
            _LOAD_FUNCTION_S,
            judge.model_dump(mode="json"),
        )
    return Job(
        "function",
        section,
        config.num_workers,
        config.max_concurrency,
        config.timeout_s,
        _LOAD_FUNCTION_S,
        config.model_dump(mode="json", include={"function", "format", "repetition_penalty"}),
        config.memory_mb,
        config.sandbox,
    )
