"""Validation: its requests, and its figures, which are computed by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from millrace.errors import ReplicaLost, RewardError
from millrace.pipeline.validation import Played, Response, Tally, Validator, summarise
from millrace.ports import RolloutStats
from millrace.types import (
    Completion,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)


def drawn(*problems: Sequence[tuple[str, float | None]]) -> list[list[Response]]:
    """Return responses with these texts and scores."""
    return [[Response(t, None if v is None else Score(v)) for t, v in p] for p in problems]


PROBLEMS = drawn(
    [
        ("4", 1.0),
        ("5", 0.0),
        ("5 ", 0.0),
        ("4", 1.0),
    ],  # two answers tie: the one that was drawn first counts
    [("7", 0.0), ("8", 0.0), ("9", 0.0), ("9", 0.0)],
    [("2", 0.0), ("1", 1.0), (" 1", 1.0), ("1", 1.0)],
)


def test_mean_best_and_majority_are_those_of_a_hand_count() -> None:
    assert summarise(PROBLEMS) == pytest.approx(
        {"mean@4": (0.5 + 0 + 0.75) / 3, "best@4": 2 / 3, "maj@4": 2 / 3}
    )


def test_the_majority_is_wrong_where_most_responses_are() -> None:
    assert summarise(drawn([("1", 1.0), ("2", 0.0), ("2", 0.0)])) == pytest.approx(
        {"mean@3": 1 / 3, "best@3": 1.0, "maj@3": 0.0}
    )


def test_one_response_has_a_mean_alone() -> None:
    assert summarise(drawn([("1", 1.0)], [("2", 0.25)])) == {"mean@1": 0.625}


def test_responses_without_a_score_are_counted_and_part_of_no_mean() -> None:
    rows = drawn([("4", 1.0), ("4", None)], [("5", None), ("5", None)], [("6", 0.0), ("7", 1.0)])
    assert summarise(rows) == pytest.approx(
        {"mean@2": 0.75, "best@2": 1.0, "maj@2": 0.5, "reward_errors": 3.0}
    )


def test_a_source_whose_every_reward_failed_has_no_mean_and_not_zero() -> None:
    found = summarise(drawn([("4", None)]))
    assert math.isnan(found["mean@1"]) and found["reward_errors"] == 1.0


def test_the_majority_votes_with_the_answers_that_the_reward_found() -> None:
    """Four texts differ, and two give the answer 4. A response without an answer has no vote."""
    found = [
        ("x: 4", 1.0, "4"),
        ("so 5", 0.0, "5"),
        ("4!", 1.0, " 4"),
        ("?", 0.0, ""),
        ("!", 0.0, ""),
    ]
    group = [Response(text, Score(value, answer=answer)) for text, value, answer in found]
    assert summarise([group])["maj@5"] == 1.0
    assert summarise([[Response("?", Score(0.5, answer=""))] * 2])["maj@2"] == 0.5


def test_each_component_has_the_figures_of_the_score() -> None:
    """A component's mean is over the responses that have it."""
    group = [
        Response("1", Score(-1.0, {"acc": 0.0, "short": 2.0})),
        Response("2", Score(1.0, {"acc": 1.0})),
        Response("2", Score(1.0, {"acc": 1.0, "short": 4.0})),
        Response("2", None),
    ]
    assert summarise([group]) == pytest.approx(
        {
            "mean@4": 1 / 3,
            "best@4": 1.0,
            "maj@4": 1.0,
            "reward_errors": 1.0,
            "acc/mean@4": 2 / 3,
            "acc/best@4": 1.0,
            "acc/maj@4": 1.0,
            "short/mean@4": 3.0,
            "short/best@4": 4.0,
            "short/maj@4": 2.0,
        }
    )


@dataclass
class Engine:
    """A rollout engine that answers with the prompt's first token, then 0 in a newer version.

    A greedy request gets 9 instead of the first token.
    """

    asked: list[tuple[SamplingParams, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.asked.append((params, session))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        said = 9 if params.temperature == 0 else tokens[0]
        first = Segment(tokens_of([said]), version=1, log_probs=floats_of([-1.0]))
        return first, Segment(tokens_of([0]), version=2, log_probs=floats_of([-1.0]), stop=Stop.EOS)

    async def interrupt(self) -> None: ...
    async def sleep(self, keep_weights: bool = True) -> None: ...
    async def wake_weights(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...
    async def stats(self) -> RolloutStats:
        return RolloutStats()


class Reward:
    """A reward of 1 if the text is the ground truth. Problem 3 cannot be scored."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        self.sizes.append(len(completions))
        if prompt.index == 3:
            raise RewardError("timeout", "too slow")
        return [Score(float(one.text == prompt.ground_truth)) for one in completions]

    async def close(self) -> None: ...


def validator(engine: Engine, *, n: int = 2, greedy: bool = True) -> Validator:
    truths = ["1,0", "9,0", "3,0", "4,0"]
    prompts = [
        Prompt(i, tokens_of([i + 1]), f"problem {i}", "b" if i % 2 else "a", truths[i])
        for i in range(4)
    ]
    params = SamplingParams(8, 0.7, 0.9, stop=("x",))
    return Validator(
        prompts,
        engine,
        Reward(),
        lambda tokens: ",".join(map(str, tokens)),
        params,
        n,
        greedy,
        seed=5,
    )


def test_each_data_source_is_counted_apart_and_greedy_beside_it() -> None:
    """The expected figures of the four problems.

    | source | problem | sampled | greedy |
    |---|---|---|---|
    | a | 0 and 2 | right | wrong |
    | b | 1 | wrong | right |
    | b | 3 | no score | no score |
    """
    result = asyncio.run(validator(Engine()).run(6))
    assert result.version == 6
    assert result.values == {
        "val/a/mean@2": 1.0, "val/a/best@2": 1.0, "val/a/maj@2": 1.0, "val/a/greedy": 0.0,
        "val/b/mean@2": 0.0, "val/b/best@2": 0.0, "val/b/maj@2": 0.0, "val/b/reward_errors": 2.0, "val/b/greedy": 1.0,
    }  # fmt: skip


def test_whole_groups_are_one_call_and_the_figures_are_the_same() -> None:
    apart, together = Reward(), Reward()
    figures = [
        asyncio.run(replace(validator(Engine()), reward=reward, whole_group=whole).run(0)).values
        for reward, whole in ((apart, False), (together, True))
    ]
    assert figures[0] == figures[1]
    assert sorted(apart.sizes) == [1] * 12 and sorted(together.sizes) == [1] * 4 + [2] * 4


def test_components_of_the_greedy_response_are_reported_too() -> None:
    class Timer(Reward):
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            return [Score(1.0, {"acc": float(one.text[0] == "9")}) for one in completions]

    values = asyncio.run(replace(validator(Engine()), reward=Timer()).run(0)).values
    assert values["val/a/acc/mean@2"] == 0.0 and values["val/a/acc/greedy"] == 1.0


def test_transcripts_are_the_first_problems_with_what_was_said() -> None:
    transcripts = asyncio.run(validator(Engine()).run(0)).transcripts
    assert [t.answer for t in transcripts] == ["1,0", "2,0", "3,0"]
    assert [(t.prompt, t.response, t.score, t.data_source, t.ground_truth) for t in transcripts] == [
        ("problem 0", "1,0", 1.0, "a", "1,0"), ("problem 1", "2,0", 0.0, "b", "9,0"), ("problem 2", "3,0", 1.0, "a", "3,0"),
    ]  # fmt: skip


def test_no_request_is_interruptible_and_all_run_together() -> None:
    engine = Engine()
    asyncio.run(validator(engine).run(0))
    assert len(engine.asked) == 12 == engine.most
    assert not any(params.interruptible for params, _ in engine.asked)
    greedy = [p for p, _ in engine.asked if p.temperature == 0]
    sampled = [p for p, _ in engine.asked if p.temperature]
    assert len(greedy) == 4 and all(p.top_p == 1.0 for p in greedy)
    assert all(
        (p.temperature, p.top_p, p.max_tokens, p.stop) == (0.7, 0.9, 8, ("x",)) for p in sampled
    )


def test_random_streams_are_the_same_at_every_version_and_all_different() -> None:
    first, second = Engine(), Engine()
    asyncio.run(validator(first, greedy=False).run(0))
    asyncio.run(validator(second, greedy=False).run(9))
    assert [p.seed for p, _ in first.asked] == [p.seed for p, _ in second.asked]
    assert len({p.seed for p, _ in first.asked}) == 8
    assert len({session for _, session in first.asked}) == 8


def test_without_greedy_there_is_no_such_value() -> None:
    assert not any(
        "greedy" in name for name in asyncio.run(validator(Engine(), greedy=False).run(0)).values
    )


def test_a_validation_without_scores_ends_and_says_why() -> None:
    """Three of twelve responses have no score. Twelve may fail like fifty."""
    told: list[tuple[int, int]] = []
    strict, lenient = (
        replace(validator(Engine()), max_error_share=0.05),
        replace(validator(Engine()), max_error_share=0.06),
    )
    with pytest.raises(
        RewardError,
        match=r"3 of the 12 responses .* At most 2 may fail: reward.max_error_share = 0.05 of 50, "
        r"and never all. The last error: timeout",
    ):
        asyncio.run(strict.run(0))
    asyncio.run(lenient.run(0, lambda done, total: told.append((done, total))))
    assert told == [(k, 12) for k in range(1, 13)]


@pytest.mark.parametrize(
    ("total", "share", "most"),
    [(4, 0.2, 3), (1, 0.2, 0), (49, 0.2, 10), (1000, 0.2, 200), (12, 0.0, 0), (4, 1.0, 4)],
)
def test_a_small_validation_may_have_as_many_failures_as_one_of_fifty(
    total: int, share: float, most: int
) -> None:
    tally = Tally(total, share, None)
    for _ in range(most):
        tally.failed(RewardError("timeout", "late"))
    if most < total:
        with pytest.raises(RewardError, match=f"At most {most} may fail"):
            tally.failed(RewardError("timeout", "late"))


def test_a_validation_that_fails_leaves_what_it_has_scored() -> None:
    """The greedy requests hang until the sampled ones are scored, and then the engine is lost."""

    class Lost(Engine):
        async def generate(
            self, tokens: Tokens, params: SamplingParams, session: str
        ) -> tuple[Segment, ...]:
            if params.temperature == 0:
                while len(played) < 8:  # noqa: ASYNC110 - a dict has no event
                    await asyncio.sleep(0)
                raise ReplicaLost("no replica is left")
            return await super().generate(tokens, params, session)

    played: dict[int, Played] = {}
    checked = validator(Lost())
    with pytest.raises(ReplicaLost):
        asyncio.run(checked.run(0, None, played))
    assert sorted(played) == [*range(8)]
    values, whole = checked.result(0, played).values, asyncio.run(validator(Engine()).run(0)).values
    assert values == {name: value for name, value in whole.items() if "greedy" not in name}
    one = {0: played[0]}
    assert list(checked.result(0, one).values) == ["val/a/mean@1"]
