"""Requests to a rollout engine: their checks, stop strings, and segments by version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from millrace.errors import SyncError, WorkerError, bad_row, bad_value
from millrace.types import (
    Author,
    Experts,
    Floats,
    PolicyVersion,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
)


def check_request(
    tokens: Tokens,
    params: SamplingParams,
    *,
    max_len: int,
    closed: bool,
    asleep: bool,
    has_tokenizer: bool,
) -> None:
    """Raise WorkerError if the engine cannot serve.

    Raise DataError or ConfigError if the request is invalid.
    """
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


def check_kv(oldest: int | None, since: int, unit: str) -> None:
    """Raise SyncError if an engine keeps K and V that are older than `since`.

    A mode without reuse drops all K and V at a swap. `unit` says what the numbers count.
    """
    if oldest is not None and oldest < since:
        raise SyncError(
            f"KV of {unit} {oldest} is kept, but this mode allows none before {unit} {since}. "
            "Turns that used it say that their context is of newer weights. The replica must "
            "not serve"
        )


def stop_window(stop: Sequence[str]) -> int:
    """Return how many of the last tokens a stop string can touch.

    A string has at most as many tokens as bytes.
    """
    return max(len(s.encode()) for s in stop) + 4


def completes_stop(tail: Tokens, stop: Sequence[str], decode: Callable[[Tokens], str]) -> bool:
    """Whether the last token of `tail` completes a stop string.

    `tail` has the last `stop_window` tokens of the response.
    """
    text = decode(tail)
    present = [s for s in stop if s in text]
    if not present:
        return False
    before = decode(tail[:-1])
    return any(text.count(s) > before.count(s) for s in present)


class Start(NamedTuple):
    """The first token of a version in a response."""

    drawn: int
    """Tokens drawn before the version."""
    version: PolicyVersion
    kv_version: PolicyVersion
    """The oldest version that may have computed K and V of the context."""


def cut_by_version(
    tokens: Tokens,
    log_probs: Floats,
    starts: Sequence[Start],
    stop: Stop,
    experts: Experts | None = None,
    context: int = 0,
) -> tuple[Segment, ...]:
    """Return the drawn tokens as one segment for each version that drew some of them.

    `starts` has the versions in order. `stop` is the reason why the last segment ended. `experts`
    has those of `context` tokens before the one that predicts the first token, and of all that
    predict the tokens.
    """
    if len(starts) == 1 and tokens and experts is None:
        first = starts[0]
        kv_version = None if first.kv_version == first.version else first.kv_version
        drawn = Segment(tokens, Author.POLICY, first.version, log_probs, stop, None, kv_version)
        return (drawn,)
    width = len(experts) // (context + len(tokens)) if experts and tokens else 0

    def own(start: int, end: int) -> Experts | None:
        first = start + context if start else 0
        return None if experts is None else experts[first * width : (end + context) * width]

    ends = [min(end, len(tokens)) for end in (*(s.drawn for s in starts[1:]), len(tokens))]
    pieces = [(s, end) for s, end in zip(starts, ends, strict=True) if end > s.drawn]
    return tuple(
        Segment(
            tokens[s.drawn : end],
            version=s.version,
            log_probs=log_probs[s.drawn : end],
            stop=stop if s is pieces[-1][0] else None,
            kv_version=None if s.kv_version == s.version else s.kv_version,
            experts=own(s.drawn, end),
        )
        for s, end in pieces
    )
