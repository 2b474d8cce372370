"""A drawn response in plain values, for callbacks and for who draws from Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.rollout.scoring import completion_of, conversation_of
from millrace.types import Author, PolicyVersion, Prompt, Stop, Tokens, Trajectory


@dataclass(frozen=True, slots=True)
class DrawnResponse:
    """One response to a prompt, with its score."""

    prompt: str
    """The text of the prompt, as the policy reads it."""
    text: str
    """The policy's last message."""
    score: float | None
    """None if the response was not scored, or if the reward or the episode failed."""
    components: dict[str, float] = field(default_factory=dict)
    """The named parts of the score."""
    tokens: tuple[int, ...] = ()
    """All tokens after the prompt, also those of tools and users."""
    log_probs: tuple[float, ...] = ()
    """The log-prob of each token. NaN for tokens that the policy did not draw."""
    data_source: str = ""
    ground_truth: Any = None
    conversation: str = ""
    """All messages by author, if there are any besides the prompt and the text."""
    truncated: bool = False
    """Whether a limit cut it."""
    versions: tuple[PolicyVersion, ...] = ()
    """The policy versions that drew it."""
    error: str = ""
    """Why there is no score."""


def drawn(
    prompt: Prompt, trajectory: Trajectory | None, decode: Callable[[Tokens], str], error: str = ""
) -> DrawnResponse:
    """Return a trajectory in plain values. None is an episode that failed."""
    about = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    if trajectory is None:
        return DrawnResponse(prompt.text, "", None, **about, error=error)
    log_probs = [
        value
        for s in trajectory.segments
        for value in (s.log_probs if s.author is Author.POLICY else [math.nan] * len(s.tokens))
    ]
    score = trajectory.score
    return DrawnResponse(
        prompt.text,
        completion_of(trajectory, decode).text,
        None if score is None or error else score.value,
        {} if score is None else dict(score.extra),
        tuple(trajectory.tokens),
        tuple(log_probs),
        **about,
        conversation=conversation_of(trajectory, decode),
        truncated=trajectory.stop is Stop.LENGTH,
        versions=tuple(sorted(set(trajectory.versions))),
        error=error,
    )
