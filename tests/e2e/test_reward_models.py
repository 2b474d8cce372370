"""A reward model, and a judge in a mix, train the quickstart's policy, on one start of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.config import recipe
from millrace.errors import RewardError
from millrace.persist.history import audit
from millrace.run.rewards import make_reward, open_caches
from tests.e2e import runs
from tests.rewards.classifiers import last_character
from tests.rewards.endpoint import Endpoint, endpoint

SECRET = "sk-canary-in-a-run"
RAISES = "def score(prompts, completions, **columns):\n    raise KeyError('no column answers')\n"
FAST = "actor.optim.lr=3e-3"


def rewards_of(server: Endpoint, model: Path) -> dict[str, list[str]]:
    """Return overrides: one point for a last 9, one for each 9, and this with exact match."""
    classifier = f"{{path: {model}, device: cpu}}"
    judge = f"{{model: m, base_url: '{server.url}', template: '{{prompt}} {{response}}'}}"
    mix = f"{{right: {{}}, nines: {{judge: {judge}, weight: 0.5}}}}"
    return {
        "model": [f"reward.model={classifier}"],
        "judge": [f"reward.judge={judge}"],
        "mix": [f"reward.mix={mix}"],
    }


async def trained(
    s: runs.Session, folder: Path, samples: int, overrides: Sequence[str]
) -> list[dict[str, float]]:
    """Return the rows of a run with this reward."""
    overrides = [FAST, f"rollout.total_rollout_steps={samples}", *overrides]
    config = recipe.load(runs.RECIPE, [*runs.SMALL, *overrides])
    reward = make_reward(config.reward, config.agents, config.sides)
    try:
        await reward.start()
        folder.mkdir()
        open_caches(reward, folder)
        (folder / ".millrace-run").touch()
        outcome = await runs.run(replace(s, reward=reward), folder, *overrides)
        assert outcome.complete and outcome.samples_trained == samples
        return runs.rows(folder)
    finally:
        await reward.close()


def rise(rows: list[dict[str, float]], name: str) -> float:
    """Return the mean of the last three versions minus that of the first three."""
    values = [row[name] for row in rows]
    return sum(values[-3:]) / 3 - sum(values[:3]) / 3


@pytest.mark.slow
def test_each_kind_of_reward_trains_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    async def run(server: Endpoint) -> None:
        said = rewards_of(server, last_character(tmp_path / "classifier", "9"))
        async with runs.session(tmp_path, "sft.steps=100") as s:
            rows = await trained(s, tmp_path / "model", 240, said["model"])
            assert rise(rows, "reward/mean") > 0.15
            rows = await trained(s, tmp_path / "mix", 128, said["mix"])
            asked = sum(row["reward/nines/requests"] for row in rows)
            hits = sum(row["reward/nines/cache_hits"] for row in rows)
            assert asked <= len(server.requests) and hits > 0
            assert asked + hits >= 128 * 4
            assert rise(rows, "reward/nines/mean") > 0.3
            for row in rows:
                total = row["reward/right/mean"] + 0.5 * row["reward/nines/mean"]
                assert row["reward/mean"] == pytest.approx(total, abs=1e-6)
            busy = [*said["judge"], "reward.judge.template='{response} limited'"]
            busy += ["reward.judge.max_retries=1", "reward.judge.retry_wait_s=0.01"]
            with pytest.raises(ExceptionGroup) as caught:
                await trained(s, tmp_path / "busy", 128, busy)
            assert caught.group_contains(
                RewardError, match=r"rate_limited: 11 of the last 11 samples had no score"
            )
            (tmp_path / "raises.py").write_text(RAISES)
            with pytest.raises(ExceptionGroup) as caught:
                raises = [f"reward.function={tmp_path}/raises.py:score"]
                await trained(s, tmp_path / "raises", 128, raises)
            assert caught.group_contains(
                RewardError,
                match=r"^exception: 11 of the last 11 samples had no score, more than "
                r"reward\.max_error_share = 0\.2[\s\S]*KeyError: 'no column answers' "
                r"\(raises\.py:2 in score: raise KeyError\('no column answers'\)\)",
            )
            found = audit(tmp_path / "raises")
            assert found.trained == 0 and found.lost == 0 and not found.complete

    with endpoint() as server:
        asyncio.run(run(server))
        assert server.keys == {f"Bearer {SECRET}"}
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(p.name == "config.yaml" for p in files)
    assert not [p for p in files if SECRET.encode() in p.read_bytes()]
