"""The quickstart task with adapters.

The policy learns. A checkpoint has the adapters alone; a run resumes from it, and `export` makes a
whole model of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace.persist.history import audit
from millrace.run.export import export
from tests.e2e import runs

TASK = "task:sort_digits?min_digits=2&max_digits=4"
LORA = [
    "model.lora_rank=16",
    "model.lora_alpha=32",
    "actor.optim.lr=1e-3",
    "actor.use_kl_loss=true",
    "sft.steps=150",
    "sft.lr=1e-2",
    "sft.messiness=0.4",
    f"data.train_files=['{TASK}']",
    f"data.val_files=['{TASK}&split=val&size=16']",
]


@pytest.mark.slow
async def test_adapters_learn_and_alone_are_sent_and_saved(tmp_path: Path) -> None:
    async with runs.session(tmp_path, *LORA) as s:
        start = await runs.weights(s, tmp_path / "before")
        said = [*LORA, "sft.steps=0", "rollout.n=8", "actor.ppo_mini_batch_size=16"]
        await runs.run(s, tmp_path / "run", *said, "rollout.total_rollout_steps=960")
        found = audit(tmp_path / "run")
        assert (found.trained, found.lost, found.trained_twice) == (960, 0, 0)
        rows = runs.rows(tmp_path / "run")
        rewards = [row["reward/mean"] for row in rows]
        early, late = sum(rewards[:4]) / 4, sum(rewards[-8:]) / 8
        assert late > early + 0.03, rewards
        assert 0 < rows[0]["actor/kl_loss"] < rows[-1]["actor/kl_loss"]
        assert rows[0]["actor/log_prob_gap_same_version"] < 1e-5
        whole = sum(t.numel() * t.element_size() for t in start.values())
        assert {row["sync/bytes"] for row in rows} == {rows[0]["sync/bytes"]} and rows[0][
            "sync/bytes"
        ] < whole / 2
        trained = await runs.weights(s, tmp_path / "after")
        same = {name for name, t in trained.items() if torch.equal(t, start[name])}
        assert {name for name in trained if not name.endswith("proj.weight")} == same

        longer = [*said, "rollout.total_rollout_steps=1024"]
        outcome = await runs.run(s, tmp_path / "run", *longer, resume=True)
        assert outcome.complete and outcome.samples_trained == 1024
        final = await runs.weights(s, tmp_path / "final")
    done = await asyncio.to_thread(export, tmp_path / "run", tmp_path / "exported")
    assert done["parameters"] == sum(t.numel() for t in start.values())
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == final.keys()
    for name, tensor in final.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-6, atol=1e-7)
