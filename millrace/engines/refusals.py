"""What every rollout engine refuses, in the same words."""

from __future__ import annotations

from millrace.errors import WorkerError, bad_row, bad_value
from millrace.types import SamplingParams, Tokens


def check_request(
    tokens: Tokens,
    params: SamplingParams,
    *,
    max_len: int,
    closed: bool,
    asleep: bool,
    has_tokenizer: bool,
) -> None:
    """Raises WorkerError if the engine cannot serve, DataError or ConfigError if the request cannot be."""
    if closed:
        raise WorkerError("the rollout engine is closed")
    if asleep:
        raise WorkerError(
            "the rollout engine is asleep: its KV cache is freed. Fix: wake() before generate()."
        )
    if not 1 <= len(tokens) < max_len:
        rule = f"a prompt has at least 1 token and leaves room for one more of {max_len}"
        raise bad_row(
            "generate",
            f"{len(tokens)} tokens",
            rule,
            "a shorter prompt, or a larger rollout.max_prompt_length",
        )
    if params.max_tokens < 1:
        raise bad_value(
            "SamplingParams.max_tokens",
            params.max_tokens,
            "at least one token is drawn",
            "1 or more",
        )
    if params.stop and not has_tokenizer:
        raise bad_value(
            "rollout.stop",
            params.stop,
            "stop strings need a tokenizer",
            "a model folder that has one",
        )
