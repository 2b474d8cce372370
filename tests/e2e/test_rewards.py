"""Built-in rewards and functions of whole groups train a small model in real runs.

One session serves all runs. Its rows are digits to sort, in four data sources with verl's forms of
an answer. A letter at the start of the prompt says which form is meant.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.rewards.mix import RunReward
from millrace.run.session import Session
from tests.e2e import runs

FORMS = {
    "openai/gsm8k": ("g", "#### {}{}{}"),
    "HuggingFaceH4/MATH-500": ("m", "\\boxed{{{}{}{}}}"),
    "math_dapo": ("d", "Answer: {} {} {}"),
    "numina_cn_k12": ("n", "${}{}{}$"),
}
"""The letter of each data source, and the form of its answers. math_dapo ignores spaces."""

GROUP = """
def ranked(completions, **columns):
    assert len(completions) == 4, f"{len(completions)} of a group of 4"
    ranks = sorted(completions)
    return [float(ranks.index(text)) for text in completions]

ranked.whole_group = True
"""

OTHERS = {
    "whole_group": ["reward.function={folder}/group.py:ranked"],
    "format": ["reward.function=format", "reward.format.pattern='#### [0-9]+'"],
    "repetition": [
        "reward.function=repetition_penalty",
        "reward.repetition_penalty={ngram_size: 1, max_penalty: -2}",
    ],
}


def write_rows(folder: Path, name: str, count: int, seed: int) -> str:
    dice, lines = random.Random(seed), []
    for i in range(count):
        source = list(FORMS)[i % len(FORMS)]
        letter, form = FORMS[source]
        digits = "".join(dice.choices("0123", k=3))
        truth = "".join(sorted(digits))
        row = {
            "data_source": source,
            "prompt": f"{letter}{digits}>",
            "answer": form.format(*truth),
            "reward_model": {"ground_truth": truth},
        }
        lines.append(json.dumps(row) + "\n")
    (folder / name).write_text("".join(lines))
    return f"{folder}/{name}"


async def train(s: Session, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train 16 samples, and return the rows of the versions."""
    outcome = await runs.run(s, folder, "rollout.total_rollout_steps=16", *overrides)
    assert outcome.complete and outcome.samples_trained == 16
    return runs.rows(folder)


async def train_all(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    (tmp_path / "group.py").write_text(GROUP)
    data = [
        f"data.train_files=['{write_rows(tmp_path, 'train.jsonl', 400, seed=0)}']",
        f"data.val_files=['{write_rows(tmp_path, 'val.jsonl', 16, seed=1)}']",
        *("rollout.max_prompt_length=8", "rollout.max_response_length=16"),
        *("sft.messiness=0.4", "sft.steps=60", "rollout.val_kwargs.n=4"),
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    async with runs.session(tmp_path, *data) as s:
        found["sources"] = await train(s, tmp_path / "sources", *data)
        unvalidated = replace(s, problems=replace(s.problems, val=()))
        for name, keys in OTHERS.items():
            said = [key.format(folder=tmp_path) if "{folder}" in key else key for key in keys]
            config = runs.recipe.load(runs.RECIPE, [*data, *said])
            mine = replace(unvalidated, reward=RunReward(config.reward))
            try:
                await mine.reward.start()
                found[name] = await train(mine, tmp_path / name, *data, *said)
            finally:
                await mine.reward.close()
    return found


@pytest.mark.slow
def test_rewards_by_function_train_a_model(tmp_path: Path) -> None:
    found = asyncio.run(train_all(tmp_path))
    for name, rows in found.items():
        assert all(row["actor/grad_norm"] > 0 for row in rows), name
        assert all(row["train/zero_advantage_share"] < 1 for row in rows), name
    for row in found["sources"]:
        assert 0 < row["reward/acc/mean"] < 1
        assert row["reward/mean"] < row["reward/acc/mean"], "math_dapo has scores of -1"
    assert all(0 < row["reward/mean"] < 1 for row in found["format"])
    assert all(-2 < row["reward/mean"] <= 0 for row in found["repetition"])

    lines = [json.loads(x) for x in (tmp_path / "sources" / "metrics.jsonl").open()]
    values = next(line for line in lines if any(key.startswith("val/") for key in line))
    for source in FORMS:
        low = -1 if source == "math_dapo" else 0
        accuracy = values[f"val/{source}/acc/mean@4"]
        assert values[f"val/{source}/mean@4"] == pytest.approx(low + (1 - low) * accuracy)
        assert values[f"val/{source}/acc/maj@4"] <= values[f"val/{source}/acc/best@4"]
