"""Episodes and samples.

An interruption keeps tokens, limits count, and responses get scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import RewardError
from millrace.ports import Agent, Reply
from millrace.rollout.episode import EnvironmentAgent, SingleTurn, request_seed, run_episode
from millrace.rollout.requests import Start, cut_by_version
from millrace.rollout.sample import SampleRoller
from millrace.rollout.shaping import OverlongBuffer
from millrace.types import (
    Author,
    Completion,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.rollout.helpers import said

PROMPT = Prompt(3, tokens_of([7, 8]), "p", "d")


@dataclass
class Script:
    """A source of tokens that returns fixed answers and records the requests."""

    answers: list[tuple[Segment, ...]]
    asked: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)

    async def __call__(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.asked.append((tokens.tolist(), params, session))
        return self.answers[len(self.asked) - 1]


@dataclass
class Tool:
    """An environment that answers the first `turns` messages with two tokens."""

    turns: int
    heard: list[list[int]] = field(default_factory=list)
    closed: int = 0

    async def open(self, prompt: Prompt) -> Tokens:
        return prompt.tokens

    async def reply(self, segments: tuple[Segment, ...]) -> Reply | None:
        self.heard.append([t for s in segments for t in s.tokens])
        return Reply(tokens_of([90, 91])) if len(self.heard) <= self.turns else None

    async def score(self) -> Score | None:
        return None

    async def close(self) -> None:
        self.closed += 1


def agent_of(environment: Tool | None) -> Agent:
    return SingleTurn() if environment is None else EnvironmentAgent(lambda prompt: environment)


def episode(
    script: Script, environment: Tool | None, max_tokens: int = 10, **more: Any
) -> Trajectory:
    params = SamplingParams(max_tokens, seed=5)
    return asyncio.run(run_episode(script, agent_of(environment), PROMPT, params, "3/0", **more))


def test_an_interrupted_response_goes_on_from_its_tokens_within_its_limit_in_its_random_stream() -> (
    None
):
    script = Script(
        [
            (said([1, 2], Stop.INTERRUPTED),),
            (),
            (said([3], None, 1), said([4], Stop.INTERRUPTED, 2)),
            (said([5], version=3),),
        ]
    )
    seen: list[Trajectory] = []
    done = episode(script, None, on_progress=seen.append)
    assert (
        done.tokens.tolist() == [1, 2, 3, 4, 5]
        and done.stop is Stop.EOS
        and done.versions == (0, 1, 2, 3)
    )
    assert [(tokens, p.max_tokens, p.offset, p.seed) for tokens, p, _ in script.asked] == [
        ([7, 8], 10, 0, 5), ([7, 8, 1, 2], 8, 2, 5), ([7, 8, 1, 2], 8, 2, 5), ([7, 8, 1, 2, 3, 4], 6, 4, 5),
    ]  # fmt: skip
    assert [t.num_tokens for t in seen] == [2, 2, 4] and not any(t.finished for t in seen)


def test_a_kept_response_goes_on_where_it_stopped_after_a_restart() -> None:
    kept = Trajectory.of((said([1, 2, 3], Stop.INTERRUPTED),))
    script = Script([(said([4], version=6),)])
    done = episode(script, None, so_far=kept)
    assert done.segments[0] is kept.segments[0] and done.tokens.tolist() == [1, 2, 3, 4]
    assert script.asked[0][1].offset == 3 and script.asked[0][1].max_tokens == 7


def test_turns_of_the_environment_are_its_own_and_count_against_the_limit() -> None:
    tool = Tool(2)
    script = Script([(said([1, 2]),), (said([3]),), (said([4]),)])
    done = episode(script, tool)
    assert [(s.author, s.tokens.tolist(), s.stop) for s in done.segments] == [
        (Author.POLICY, [1, 2], Stop.EOS), (Author.ENVIRONMENT, [90, 91], None), (Author.POLICY, [3], Stop.EOS),
        (Author.ENVIRONMENT, [90, 91], None), (Author.POLICY, [4], Stop.EOS),
    ]  # fmt: skip
    assert (
        script.asked[-1][0] == [7, 8, 1, 2, 90, 91, 3, 90, 91]
        and script.asked[-1][1].max_tokens == 3
    )
    assert tool.heard == [[1, 2], [3], [4]] and tool.closed == 1


def test_a_turn_that_does_not_fit_ends_the_response_as_truncated() -> None:
    """Two tokens are left, and the tool's turn has two: no room is left for the policy."""
    done = episode(Script([(said([1, 2]),)]), Tool(1), max_tokens=4)
    assert done.tokens.tolist() == [1, 2] and done.stop is Stop.LENGTH


def test_a_truncated_response_gets_no_reply() -> None:
    tool = Tool(5)
    done = episode(Script([(said([1, 2, 3], Stop.LENGTH),)]), tool, max_tokens=3)
    assert done.stop is Stop.LENGTH and tool.heard == [] and tool.closed == 1


def test_an_environment_is_closed_when_drawing_fails() -> None:
    tool = Tool(1)
    with pytest.raises(IndexError):
        episode(Script([]), tool)
    assert tool.closed == 1


@given(st.tuples(*[st.integers(0, 2**40)] * 3), st.tuples(*[st.integers(0, 2**40)] * 3))
def test_every_trajectory_has_a_random_stream_of_its_own(
    a: tuple[int, int, int], b: tuple[int, int, int]
) -> None:
    assert (request_seed(*a) == request_seed(*b)) == (a == b)
    assert 0 <= request_seed(*a) < 2**63 and request_seed(*a) == request_seed(*a)


class Reward:
    """A reward equal to the length of the text. A group whose first text is "2" has no score."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        self.seen += [c.text for c in completions]
        await asyncio.sleep(0)
        if completions[0].text == "2":
            raise RewardError("timeout", "slow")
        return [Score(float(len(c.text))) for c in completions]

    async def close(self) -> None: ...


def roller(
    reward: Reward, n: int = 3, environment: Callable[[Prompt], Tool] | None = None, **more: object
) -> SampleRoller:
    decode = lambda tokens: ",".join(map(str, tokens))  # noqa: E731
    agent = EnvironmentAgent(environment) if environment else SingleTurn()
    return SampleRoller(agent, reward, decode, SamplingParams(10), n, seed=1, **more)  # type: ignore[arg-type]


def roll(
    draw: Callable[..., object], reward: Reward, by: SampleRoller | None = None, **more: object
) -> Sample:
    return asyncio.run((by or roller(reward)).roll(draw, PROMPT, 4, **more))  # type: ignore[arg-type]


def test_a_sample_has_n_scored_trajectories_with_streams_and_sessions_of_their_own() -> None:
    script = Script([(said([i + 5]),) for i in range(3)])
    drawn: list[int] = []
    sample = roll(script, Reward(), on_drawn=lambda: drawn.append(1))
    assert sample.admitted_version == 4 and sample.prompt is PROMPT and len(drawn) == 3
    assert [t.score for t in sample.trajectories] == [Score(1.0)] * 3
    assert [session for _, _, session in script.asked] == ["3/0", "3/1", "3/2"]
    assert [p.seed for _, p, _ in script.asked] == [request_seed(1, 3, i) for i in range(3)]


def test_finished_siblings_are_not_drawn_again_after_a_restart_but_scored() -> None:
    reward, script = Reward(), Script([(said([9]),)])
    progress = (
        Trajectory.of((said([1, 1]),)),
        Trajectory.of((said([6], Stop.INTERRUPTED),)),
        Trajectory.of((said([4]),)),
    )
    sample = roll(script, reward, progress=progress)
    assert len(script.asked) == 1 and script.asked[0][0] == [7, 8, 6]
    assert [t.tokens.tolist() for t in sample.trajectories] == [[1, 1], [6, 9], [4]]
    assert sorted(reward.seen) == ["1,1", "4", "6,9"] and all(t.score for t in sample.trajectories)


def test_progress_always_shows_all_trajectories() -> None:
    script = Script([(said([1], Stop.INTERRUPTED),), (said([5]),), (said([6]),), (said([3]),)])
    seen: list[tuple[Trajectory, ...]] = []
    roll(script, Reward(), on_progress=seen.append)
    assert all(len(trajectories) == 3 for trajectories in seen)
    assert [t.tokens.tolist() for t in seen[-1]] == [[1, 5], [6], [3]]


def test_a_sample_with_one_unscored_trajectory_fails_after_its_siblings_are_done() -> None:
    reward = Reward()
    with pytest.raises(RewardError, match="timeout: slow"):
        roll(Script([(said([2]),), (said([5]),), (said([6]),)]), reward)
    assert sorted(reward.seen) == ["2", "5", "6"]


def test_a_greedy_baseline_is_one_more_response_at_temperature_0_and_none_of_the_n() -> None:
    reward, script, drawn = (
        Reward(),
        Script([(said([i + 5], version=3 - i),) for i in range(4)]),
        list[int](),
    )
    by = roller(reward, greedy_baseline=True)
    sample = roll(script, reward, by, on_drawn=lambda: drawn.append(1))
    assert by.num_responses == 4 == len(drawn)
    assert [p.temperature for _, p, _ in script.asked] == [1.0, 1.0, 1.0, 0.0]
    assert [session for _, _, session in script.asked] == ["3/0", "3/1", "3/2", "3/3"]
    assert [t.tokens.tolist() for t in sample.trajectories] == [[5], [6], [7]]
    assert (
        sample.greedy is not None
        and sample.greedy.tokens.tolist() == [8]
        and sample.greedy.score == Score(1.0)
    )


def test_a_whole_group_is_scored_in_one_call_after_its_last_trajectory() -> None:
    calls: list[list[str]] = []

    class Group(Reward):
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            calls.append([c.text for c in completions])
            return [Score(float(i)) for i in range(len(completions))]

    reward, script = Group(), Script([(said([i + 5]),) for i in range(4)])
    sample = roll(script, reward, roller(reward, greedy_baseline=True, whole_group=True))
    assert calls == [["5", "6", "7", "8"]]
    assert [t.score for t in sample.trajectories] == [Score(0.0), Score(1.0), Score(2.0)]
    assert sample.greedy is not None and sample.greedy.score == Score(3.0)


def test_without_a_greedy_baseline_there_is_none() -> None:
    assert roll(Script([(said([i + 5]),) for i in range(3)]), Reward()).greedy is None


def test_a_greedy_response_goes_on_after_a_restart_like_its_siblings() -> None:
    """Progress has n + 1 entries with the greedy one last. The other entries are complete."""
    reward, script, seen = (
        Reward(),
        Script([(said([9], Stop.INTERRUPTED),), (said([8]),)]),
        list[tuple[Trajectory, ...]](),
    )
    done = Trajectory.of((said([1]),))
    progress = (done, done, done, Trajectory.of((said([6], Stop.INTERRUPTED),)))
    sample = roll(
        script,
        reward,
        roller(reward, greedy_baseline=True),
        progress=progress,
        on_progress=seen.append,
    )
    assert [(tokens, p.temperature, p.offset) for tokens, p, _ in script.asked] == [
        ([7, 8, 6], 0.0, 1),
        ([7, 8, 6, 9], 0.0, 2),
    ]
    assert (
        sample.greedy is not None
        and sample.greedy.tokens.tolist() == [6, 9, 8]
        and len(sample.trajectories) == 3
    )
    assert all(len(trajectories) == 4 for trajectories in seen)


def test_a_greedy_response_that_was_begun_is_left_out_where_no_baseline_is_wanted_any_more() -> (
    None
):
    done, seen = Trajectory.of((said([1]),)), list[tuple[Trajectory, ...]]()
    progress = (done, done, done, Trajectory.of((said([6], Stop.INTERRUPTED),)))
    sample = roll(Script([]), Reward(), progress=progress, on_progress=seen.append)
    assert sample.greedy is None and len(sample.trajectories) == 3
    assert all(len(trajectories) == 3 for trajectories in seen)


def test_a_greedy_response_without_a_score_fails_its_sample() -> None:
    reward = Reward()
    with pytest.raises(RewardError, match="timeout: slow"):
        roll(
            Script([(said([i]),) for i in (5, 6, 7, 2)]),
            reward,
            roller(reward, greedy_baseline=True),
        )


def test_overlong_responses_are_punished_the_moment_they_are_scored_and_so_is_the_greedy_one() -> (
    None
):
    """The limit is 10 tokens, its last 4 tokens are the buffer, and the factor is 2.

    | tokens | penalty |
    |---|---|
    | 6 | 0 |
    | 7 | 0.5 |
    | 8 | 1 |
    | 10 | 2 |
    """
    reward, lengths = Reward(), (6, 7, 8, 10)
    script = Script([(said([1] * length),) for length in lengths])
    by = roller(reward, overlong=OverlongBuffer(10, 4, 2.0), greedy_baseline=True)
    sample = roll(script, reward, by)
    assert sample.greedy is not None
    for trajectory, length, penalty in zip(
        (*sample.trajectories, sample.greedy), lengths, (0.0, -0.5, -1.0, -2.0), strict=True
    ):
        said_by_function = 2.0 * length - 1  # the length of its text
        assert trajectory.score == Score(
            said_by_function + penalty, {"overlong_reward": penalty}, said_by_function
        )
        assert trajectory.score.unshaped == said_by_function


def test_turns_of_the_environment_are_no_length_of_the_policys() -> None:
    """The policy has five tokens and a tool has four, in a limit of ten. Only the five count."""
    reward = Reward()
    by = roller(reward, 1, lambda prompt: Tool(2), overlong=OverlongBuffer(10, 6, 6.0))
    sample = roll(Script([(said([1, 2]),), (said([3, 4]),), (said([5]),)]), reward, by)
    (trajectory,) = sample.trajectories
    assert (trajectory.num_tokens, trajectory.num_policy_tokens) == (9, 5)
    assert trajectory.score is not None and trajectory.score.extra == {"overlong_reward": -1.0}


def test_shaping_keeps_the_components_of_a_reward() -> None:
    shaped = OverlongBuffer(4, 2, 1.0).shape(
        Score(0.5, {"format": 1.0}), Trajectory.of((said([1, 2, 3]),))
    )
    assert shaped == Score(0.0, {"format": 1.0, "overlong_reward": -0.5}, 0.5)


def test_settings_with_another_seed_keep_every_other_field() -> None:
    params = SamplingParams(9, 0.5, 0.9, 40, ("a", "b"), 1, 3, True, False, 7)
    assert all(getattr(params, f.name) != f.default for f in fields(SamplingParams))
    assert params.with_seed(5) == replace(params, seed=5)


@pytest.mark.parametrize("kv_version", [2, 3])
def test_a_response_of_one_version_is_one_segment(kv_version: int) -> None:
    tokens, log_probs = tokens_of([5, 6]), floats_of([-1.0, -2.0])
    (one,) = cut_by_version(tokens, log_probs, [Start(0, 3, kv_version)], Stop.EOS)
    oldest = None if kv_version == 3 else 2
    assert one == Segment(tokens, version=3, log_probs=log_probs, stop=Stop.EOS, kv_version=oldest)
    assert cut_by_version(tokens_of(), floats_of(), [Start(0, 3, 3)], Stop.INTERRUPTED) == ()
