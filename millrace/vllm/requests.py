"""A request to vLLM while it is under way, and what vLLM made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.types import Floats, PolicyVersion, SamplingParams, Tokens


@dataclass(slots=True, eq=False)
class Live:
    """One call of `generate`."""

    tokens: Tokens
    params: SamplingParams
    id: str = ""
    starts: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """(tokens drawn before it, version): where each version's tokens begin."""
    interrupted: bool = False
    kept: bytes = b""
    """Of one that is interrupted: float32s, the log-probs that vLLM's core had when it was asked."""
    again: bool = False
    """Aborted with nothing drawn, to be asked for again under the new version."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What vLLM made of one request."""

    tokens: Tokens
    log_probs: Floats
    reason: str
    """vLLM's finish_reason, or "string" for a stop string."""
