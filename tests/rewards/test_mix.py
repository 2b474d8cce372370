"""A mix of rewards: the weighted sum, its components, and failures with the part's name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.config import AgentConfig, RewardConfig
from millrace.errors import ConfigError, RewardError
from millrace.rewards.mix import RunReward
from millrace.run.rewards import scorer_line
from millrace.types import Prompt, Score, tokens_of
from tests.rewards.completions import completed
from tests.waiting import at_some_pace

PROMPT = Prompt(0, tokens_of([1]), "p", "d", "42")
CODE = """
def length(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "boom": raise KeyError("boom")
    return {"score": len(solution_str), "words": len(solution_str.split())}
"""


GROUPS = """
import asyncio, time

def rank(completions): return [len(completions)] * len(completions)

def plain(completions):
    if float(completions[0]) < 100: time.sleep(float(completions[0]))
    return [len(completions)]

async def slow(completions):
    await asyncio.sleep(float(completions[0]))
    return [len(completions)]

plain.whole_group = slow.whole_group = False
"""


def reward_of(keys: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate(keys)


def run_with(keys: dict[str, Any], work: Any) -> Any:
    async def run() -> Any:
        reward = RunReward(reward_of(keys))
        try:
            return await work(reward)
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.fixture
def mix(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(CODE)
    return {
        "mix": {
            "right": {"function": "exact", "weight": 2.0},
            "length": {"function": f"{tmp_path}/mine.py:length", "weight": -0.5},
        }
    }


def test_the_score_is_the_weighted_sum_and_each_part_is_a_component(mix: dict[str, Any]) -> None:
    async def work(reward: RunReward) -> list[Score]:
        await reward.start()
        return await reward.score(PROMPT, completed(["42", "a b c"]))

    assert run_with(mix, work) == [
        Score(2.0 * 1 - 0.5 * 2, {"right": 1.0, "length": 2.0, "length/words": 1.0}),
        Score(2.0 * 0 - 0.5 * 5, {"right": 0.0, "length": 5.0, "length/words": 3.0}),
    ]


def test_a_part_that_fails_fails_the_score_under_its_name(mix: dict[str, Any]) -> None:
    notes: list[str] = []

    async def work(reward: RunReward) -> dict[str, float]:
        reward.note = notes.append
        reward.first = partial(scorer_line, AgentConfig(program="a.py:f"), reward_of(mix))
        with pytest.raises(RewardError, match=r"^length/exception: KeyError: 'boom'"):
            await reward.score(PROMPT, completed(["boom"]))
        with pytest.raises(RewardError):  # counted, without a second note
            await reward.score(PROMPT, completed(["boom"]))
        no_truth = Prompt(0, tokens_of([1]), "p", "d", None)
        with pytest.raises(RewardError, match=r"^right/no_ground_truth"):
            await reward.score(no_truth, completed(["42"]))
        assert (await reward.score(PROMPT, completed(["42"])))[0].value == 1
        return reward.take_figures()

    assert run_with(mix, work) == {
        "reward/length/failures": 2,
        "reward/length/failures/exception": 2,
        "reward/right/failures": 1,
        "reward/right/failures/no_ground_truth": 1,
    }
    assert notes[0] == (
        "rewards: agents.program returned none for an episode, so it is scored by "
        f"reward.mix.right.function=exact, reward.mix.length.function={mix['mix']['length']['function']}"
    )
    said = "reward length failed, as counted in reward/length/failures: exception: KeyError"
    assert notes[1].startswith(said) and len(notes) == 3


def test_a_part_that_returns_none_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "tasks.py"
    (tmp_path / "mine.py").write_text(CODE)
    file.write_text(
        "def code(completions, ground_truth):\n"
        "    return [None if t == '42' else 2.0 for t in ground_truth]\n"
        "def never(completions): return [None] * len(completions)\n"
    )
    length = {"function": f"{tmp_path}/mine.py:length"}
    mix = {"mix": {"length": length, "code": {"function": f"{file}:code"}}}
    (score,) = run_with(mix, lambda r: r.score(PROMPT, completed(["abc"])))
    assert (score.value, "code" in score.extra) == (3.0, False)
    other = replace(PROMPT, ground_truth="7")
    (score,) = run_with(mix, lambda r: r.score(other, completed(["abc"])))
    assert (score.value, score.extra["code"]) == (5.0, 2.0)
    none = {"mix": {"a": {"function": f"{file}:never"}, "b": {"function": f"{file}:never"}}}
    with pytest.raises(RewardError, match="not_for_the_task"):
        run_with(none, lambda r: r.score(PROMPT, completed(["abc"])))


def test_the_scorer_of_an_agents_episode_has_a_name() -> None:
    chase, d = Prompt(0, tokens_of([1]), "p", "chase"), PROMPT
    for keys, prompt, who in (
        ({}, chase, "the scorer of data source 'chase': exact"),
        ({}, d, "the scorer of data source 'd': none"),
        ({"function": "math"}, d, "reward.function=math"),
        ({"model": {"path": "m"}}, d, "reward.model"),
    ):
        line = scorer_line(AgentConfig(tools="t.py"), reward_of(keys), prompt)
        assert line.endswith(f"scored by {who}")


def test_one_plain_reward_stays_as_it_is(mix: dict[str, Any]) -> None:
    async def work(reward: RunReward) -> Any:
        return await reward.score(PROMPT, completed(["ab"])), reward.take_figures()

    plain = {"function": mix["mix"]["length"]["function"]}
    assert run_with(plain, work) == ([Score(2.0, {"words": 1.0})], {})


def test_a_wrong_function_is_named_with_its_part() -> None:
    async def work(reward: RunReward) -> None:
        await reward.start()

    with pytest.raises(ConfigError, match=r"^reward\.mix\.right\.function = 'exakt'.*exact"):
        run_with({"mix": {"right": {"function": "exakt"}, "also": {}}}, work)


def test_beside_a_whole_group_each_completion_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    """Two coroutines run at once, in less than the deadline of both together. The third fails."""
    (tmp_path / "mine.py").write_text(GROUPS)
    at_some_pace(lambda seconds: _deadlines_beside_a_group(tmp_path, seconds), 1.2)


def _deadlines_beside_a_group(tmp_path: Path, seconds: float) -> None:
    part, quick = {"timeout_s": seconds}, str(0.6 * seconds)
    mix = {
        "group": {"function": f"{tmp_path}/mine.py:rank"},
        "plain": {"function": f"{tmp_path}/mine.py:plain", **part},
        "slow": {"function": f"{tmp_path}/mine.py:slow", **part},
    }

    async def work(reward: RunReward) -> list[Score]:
        await reward.start()
        assert reward.whole_group
        try:
            scores = await reward.score(PROMPT, completed([quick, quick]))
        except RewardError as error:
            raise AssertionError("too slow") from error
        with pytest.raises(RewardError, match=r"^slow/timeout: .*reward\.mix\.slow\.timeout_s"):
            await reward.score(PROMPT, completed(["0.1", "10000"]))
        return scores

    parts = {"group": 2.0, "plain": 1.0, "slow": 1.0}
    assert run_with({"mix": mix}, work) == [Score(4.0, parts, answer=None)] * 2
