"""Which scorer a row gets, and what the refusal of an unknown row says."""

from __future__ import annotations

import pytest

from millrace.data.tasks import TASKS
from millrace.rewards.builtin import BUILTIN
from millrace.rewards.sources import SCORERS, advice_for_chat, refusal, scorer_of


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math_reward"),
        ("DigitalLearningGmbH/MATH-lighteval", "math_reward"),
        ("HuggingFaceH4/MATH-500", "math_reward"),
        ("math_dapo", "math_dapo"),
        ("math", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("aime_2024", "math_dapo"),
        ("aime25", "math_dapo"),
        ("numina_olympiads", "math"),
        ("gsm8k", None),
    ],
)
def test_verls_sources_have_the_scorers_that_verl_gives_them(
    source: str, scorer: str | None
) -> None:
    assert scorer_of(source, {}) == scorer
    assert (refusal(source, {}) is None) == (scorer is not None)


def test_generated_rows_keep_their_scorers() -> None:
    in_sentences = {"products", "sums"}
    assert {scorer_of(name, {}) for name in TASKS.keys() - in_sentences} == {"exact"}
    assert {scorer_of(name, {}) for name in in_sentences} == {"last_number"}
    assert scorer_of("chain_sum", {"reasoning_gym": "chain_sum"}) == "reasoning_gym"
    assert scorer_of("file", {"metadata": {"source_dataset": "chain_sum"}}) == "reasoning_gym"
    assert scorer_of("file", {"metadata": {"source_dataset": "no such"}}) is None
    assert scorer_of("file", {"metadata": [1]}) is None


def test_a_scorer_that_pays_an_echo_of_the_question_is_warned_about() -> None:
    warning = advice_for_chat("reward", "math", "products", {}, "84")
    assert "products" in warning and "Fix: reward.function=last_number" in warning
    assert not advice_for_chat("reward", "last_number", "products", {}, "84")
    assert not advice_for_chat("reward", "", "products", {}, "84")
    assert not advice_for_chat("reward", "math", "numina_olympiads", {}, "84")


def test_every_scorer_of_the_table_is_built_in() -> None:
    assert set(SCORERS.values()) <= BUILTIN.keys()


@pytest.mark.parametrize(
    ("source", "rule", "fix"),
    [
        ("gsm8k", "known are openai/gsm8k, lighteval/MATH, ", "data_source: openai/gsm8k, "),
        ("mine", "no built-in scorer belongs to this data source", "reward.function=exact"),
        ("codecontests", "runs the code of its problems", "reward.function=path.py:name"),
        ("searchR1_nq", "need a search tool", "reward.function=path.py:name"),
        ("hiyouga/geometry3k", "its problems have images", "reward.function=path.py:name"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(source: str, rule: str, fix: str) -> None:
    found = refusal(source, {})
    assert found is not None and rule in found[0] and fix in found[1]
