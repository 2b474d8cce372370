"""The scores of finished trajectories: an agent's own, or those of the reward function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from millrace.errors import EpisodeError
from millrace.ports import RewardFunction
from millrace.types import (
    DEAD_REWARDS,
    TURN_REWARDS,
    Completion,
    Message,
    Prompt,
    Score,
    Tokens,
    Trajectory,
    joined,
)


async def scored(
    prompt: Prompt,
    finished: Sequence[Trajectory],
    reward: RewardFunction | None,
    decode: Callable[[Tokens], str],
) -> list[Trajectory]:
    """Return the trajectories with their scores, from at most one call of the reward.

    The score of an agent wins. Without a `reward`, every agent must score its own. Raises
    EpisodeError if a trajectory has no score from anyone, and RewardError if the reward fails.
    """
    asked = [t for t in finished if t.score is None]
    given: Iterator[Score]
    if asked and reward is not None:
        given = iter(await reward.score(prompt, [completion_of(t, decode) for t in asked]))
    elif unscored := [t for t in asked if not _rewards(t)]:
        dead = sum(t.counts.get(DEAD_REWARDS, 0.0) for t in unscored)
        lost = f"all rewards were of {dead:g} dead turns, which are not trained"
        none = "neither the agent nor its environment gave a score"
        raise EpisodeError(
            "no_reward",
            f"{lost if dead else none}, and there is no reward function. "
            "Fix: return a score, or set reward.function",
        )
    else:
        given = repeat(Score(0.0))
    done = [t.with_score(next(given)) if t.score is None else t for t in finished]
    return [_with_turn_rewards(t) for t in done]


def completion_of(trajectory: Trajectory, decode: Callable[[Tokens], str]) -> Completion:
    """Return what the policy said last, and the conversation."""
    messages = trajectory.messages
    tokens = joined(s.tokens for thread in trajectory.threads[-1:] for s in thread.segments)
    if not messages:
        return Completion(decode(trajectory.last_turn), tokens=tokens)
    own = (m.get("content") for m in reversed(messages) if m.get("role") == "assistant")
    return Completion(text_of(next(own, None)), messages, tokens)


def conversation_of(trajectory: Trajectory, decode: Callable[[Tokens], str]) -> str:
    """Return the episode by author, for people. Empty if it is one prompt and one response."""
    if trajectory.messages:
        return "\n".join(map(_line, trajectory.messages))
    if len(trajectory.segments) == len(trajectory.threads) <= 1:
        return ""
    return "\n".join(decode(joined(s.tokens for s in t.segments)) for t in trajectory.threads)


def _line(message: Message) -> str:
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    called = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return " ".join([f"{message.get('role')}:", text_of(message.get("content")), *called])


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, parts with a text, or None."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _rewards(trajectory: Trajectory) -> list[float]:
    return [s.reward for s in trajectory.segments if s.reward is not None]


def _with_turn_rewards(trajectory: Trajectory) -> Trajectory:
    """Add the rewards of single turns to the score, so that every reader counts all rewards."""
    if not trajectory.counts:  # One prompt and one response have no reward of a turn.
        return trajectory
    score, rewards = trajectory.score, _rewards(trajectory)
    if score is not None and not math.isfinite(score.value):
        raise EpisodeError("reward_not_finite", f"the score of the episode is {score.value}")
    if score is None or not rewards or TURN_REWARDS in score.extra:
        return trajectory
    total = sum(rewards)
    whole = replace(
        score,
        value=score.value + total,
        raw=None if score.raw is None else score.raw + total,
        extra=score.extra | {TURN_REWARDS: total},
    )
    return trajectory.with_score(whole)
