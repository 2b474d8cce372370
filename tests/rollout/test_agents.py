"""Agents in samples and validations: who scores, what fails, and what a failure does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from millrace.errors import EpisodeError, LimitReached, RewardError
from millrace.pipeline.validation import Validator
from millrace.ports import PolicySession, Reply
from millrace.rollout.episode import EnvironmentAgent
from millrace.rollout.sample import SampleRoller
from millrace.rollout.session import Limits
from millrace.types import (
    Completion,
    Ending,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Thread,
    Tokens,
    Trajectory,
    floats_of,
    joined,
    tokens_of,
)
from tests.rollout.helpers import said
from tests.rollout.streams import Stream

PROMPT = Prompt(3, tokens_of([7, 8]), "p", "d")
SAID = (
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "first"},
    {"role": "tool", "content": "the answer is 42", "tool_call_id": "1"},
    {"role": "assistant", "content": [{"type": "text", "text": "my "}, {"text": "answer"}]},
)


@dataclass
class Playing:
    """An agent of one function."""

    play_: Callable[[PolicySession], Any]

    async def play(self, session: PolicySession) -> Ending:
        return await self.play_(session)  # type: ignore[no-any-return]

    async def close(self) -> None: ...


@dataclass
class Seen:
    """A reward of 0.5 that keeps what it was asked."""

    asked: list[Completion] = field(default_factory=list)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        self.asked += completions
        return [Score(0.5)] * len(completions)

    async def close(self) -> None: ...


def decode(tokens: Tokens) -> str:
    return ",".join(map(str, tokens))


def roll(agent: Any, reward: Any, **more: Any) -> Sample:
    by = SampleRoller(agent, reward, decode, SamplingParams(200), 2, 1, **more)
    return asyncio.run(by.roll(Stream(), PROMPT, 0))


def talk(ending: Ending) -> Playing:
    async def play(session: PolicySession) -> Ending:
        turn = await session.draw(session.prompt.tokens)
        await session.draw(tokens_of([90]), after=turn.number)
        return ending

    return Playing(play)


def test_a_reward_sees_the_policys_last_message_and_the_conversation_and_no_tools_words() -> None:
    reward = Seen()
    sample = roll(talk(Ending(messages=SAID)), reward)
    assert [c.text for c in reward.asked] == ["my answer"] * 2
    assert all(c.messages == SAID for c in reward.asked)
    assert all(t.messages == SAID and t.score == Score(0.5) for t in sample.trajectories)


def test_without_messages_the_last_turn_is_the_last_message() -> None:
    reward = Seen()
    sample = roll(talk(Ending()), reward)
    for completion, trajectory in zip(reward.asked, sample.trajectories, strict=True):
        own = trajectory.segments[-1].tokens
        every = joined(s.tokens for s in trajectory.threads[-1].segments)
        assert completion == Completion(decode(own), tokens=every)
        assert len(trajectory.segments) == 3


def test_the_score_of_an_agent_wins() -> None:
    reward = Seen()
    sample = roll(talk(Ending(score=Score(2.0))), reward)
    assert reward.asked == [] and [t.score for t in sample.trajectories] == [Score(2.0)] * 2
    assert roll(talk(Ending(score=Score(2.0))), None).trajectories == sample.trajectories


def test_no_score_from_anyone_is_an_error_and_never_0() -> None:
    with pytest.raises(EpisodeError, match="no_reward: neither the agent") as error:
        roll(talk(Ending()), None)
    assert error.value.reason == "no_reward"

    async def play(session: PolicySession) -> Ending:
        for _ in range(2):  # the second draw of the context replaces the first
            turn = await session.draw(session.prompt.tokens)
        session.reward(1.0, turn.number - 1)
        return Ending()

    with pytest.raises(EpisodeError, match="no_reward: all rewards were of 1 dead turns"):
        roll(Playing(play), None)


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(EpisodeError, match="reward_not_finite"):
        roll(talk(Ending(score=Score(float("nan")))), Seen())


def test_rewards_of_turns_are_part_of_the_score() -> None:
    async def play(session: PolicySession) -> Ending:
        turn = await session.draw(session.prompt.tokens)
        session.reward(0.25)
        await session.draw(tokens_of([90]), after=turn.number)
        session.reward(1.0)
        session.reward(-0.5)
        return Ending()

    scored = roll(Playing(play), Seen()).trajectories[0]
    assert scored.score == Score(1.25, {"turn_rewards": 0.75})
    assert [s.reward for s in scored.segments] == [0.25, None, 0.5]
    alone = roll(Playing(play), None).trajectories[0]
    assert alone.score == Score(0.75, {"turn_rewards": 0.75})


def test_a_limit_ends_an_episode_that_is_scored() -> None:
    async def play(session: PolicySession) -> Ending:
        turn = await session.draw(session.prompt.tokens)
        while True:
            turn = await session.draw(tokens_of([90]), after=turn.number)

    reward = Seen()
    sample = roll(Playing(play), reward, limits=Limits(max_turns=3))
    for trajectory in sample.trajectories:
        assert trajectory.ended == "turns" and trajectory.stop is Stop.LENGTH
        assert trajectory.counts["turns"] == 3 and trajectory.counts["ended/turns"] == 1
    assert len(reward.asked) == 2


def test_a_dead_worker_comes_before_a_failed_episode() -> None:
    calls = iter(range(2))

    async def play(session: PolicySession) -> Ending:
        if next(calls):
            raise LookupError("a bug of ours")
        raise EpisodeError("agent_exit", "exit code 3")

    drawn: list[int] = []
    by = SampleRoller(Playing(play), Seen(), decode, SamplingParams(9), 2, 1)
    with pytest.raises(LookupError):
        asyncio.run(by.roll(Stream(), PROMPT, 0, on_drawn=lambda: drawn.append(1)))
    assert len(drawn) == 2, "a failed episode is not under way any more"


class Environment:
    """An environment that fails at the call `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    async def open(self, prompt: Prompt) -> Tokens:
        return self._fail("open", prompt.tokens)

    async def reply(self, segments: tuple[Segment, ...]) -> Reply | None:
        return self._fail("reply", None)

    async def score(self) -> Score | None:
        return self._fail("score", Score(3.0))

    async def close(self) -> None: ...

    def _fail(self, call: str, result: Any) -> Any:
        if call == self.fails:
            raise KeyError(call)
        return result


@pytest.mark.parametrize("call", ["open", "reply", "score"])
def test_an_error_of_an_environment_fails_its_episode(call: str) -> None:
    with pytest.raises(EpisodeError, match=f"environment: {call} raised KeyError"):
        roll(EnvironmentAgent(lambda prompt: Environment(call)), Seen())


def test_an_environment_may_score_its_episode() -> None:
    sample = roll(EnvironmentAgent(lambda prompt: Environment()), None)
    assert [t.score for t in sample.trajectories] == [Score(3.0)] * 2


class Pool:
    """A pool of one stream of tokens."""

    def __init__(self) -> None:
        self.stream = Stream()

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        return await self.stream(tokens, params, session)


def validator(agent: Any, reward: Any, n: int = 2, **more: Any) -> Validator:
    prompts = [Prompt(i, tokens_of([7, i]), f"p{i}", "d") for i in range(10)]
    params, pool = SamplingParams(200), Pool()
    return Validator(
        prompts,
        pool,  # type: ignore[arg-type]  # it only draws
        reward,
        decode,
        params,
        n,
        False,
        seed=0,
        agent=agent,
        **more,  # type: ignore[arg-type]
    )


def test_agents_take_part_in_validations_and_their_failures_are_counted() -> None:
    async def play(session: PolicySession) -> Ending:
        turn = await session.draw(session.prompt.tokens)
        if session.prompt.index == 4:
            raise EpisodeError("tool", "died")
        await session.draw(tokens_of([90]), after=turn.number)
        return Ending(score=Score(float(session.prompt.index < 5)), messages=SAID)

    done = asyncio.run(validator(Playing(play), None).run(3))
    assert done.values["val/d/mean@2"] == pytest.approx(4 / 9)
    assert done.values["val/d/reward_errors"] == 2
    assert done.transcripts[0].response.splitlines()[-2:] == [
        "tool: the answer is 42",
        "assistant: my answer",
    ]
    with pytest.raises(EpisodeError, match="of the 20 responses of a validation had no score"):
        asyncio.run(validator(Playing(play), None, max_error_share=0.0).run(3))


def test_a_failed_reward_of_a_validation_stays_a_reward_error() -> None:
    class Failing(Seen):
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            raise RewardError("timeout", "slow")

    with pytest.raises(RewardError, match="never all"):
        asyncio.run(validator(talk(Ending()), Failing(), max_error_share=0.5).run(0))


def test_a_limit_without_any_token_is_scored_too() -> None:
    async def play(session: PolicySession) -> Ending:
        raise LimitReached("context", "too long")

    sample = roll(Playing(play), Seen())
    assert sample.trajectories[0] == Trajectory(
        score=Score(0.5), ended="context", counts=sample.trajectories[0].counts
    )


def test_a_score_changes_nothing_else_of_a_trajectory() -> None:
    threads = (Thread((said([1]),), tokens_of([2])),)
    whole = Trajectory(
        threads, Score(1.0), "turns", ({"role": "user"},), 3, {"turns": 1.0}, {"a": floats_of([-1])}
    )
    assert all(getattr(whole, f.name) for f in fields(whole)), "no field has its default"
    assert whole.with_score(Score(2.0)) == replace(whole, score=Score(2.0))
