"""The recipe megatron_grpo on two ranks, with the shim, the torch rollout engine and no Ray.

The ranks start once: they train, and then learn eight rows by heart.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.config import Config, recipe
from millrace.run import machine, problems
from millrace.run.export import export
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state, warm_up
from millrace.run.train import run_training
from tests.e2e import runs

pytest.importorskip("megatron.core")
SITE = runs.ROOT / "tests/train/megatron/site"
"""Puts Megatron on the CPU, in every process whose PYTHONPATH has it."""
BY_HEART = ("sft.batch_size=8", "sft.demonstrations=8", "sft.messiness=0")


def config(folder: Path, *overrides: str) -> Config:
    two = ["trainer.n_gpus_per_node=2", "trainer.megatron.tensor_model_parallel_size=2"]
    here = ["rollout.engine=torch", "trainer.runtime=local", f"trainer.run_dir={folder}"]
    size = ["rollout.total_rollout_steps=640", "trainer.val_before_train=false", "sft.steps=100"]
    return recipe.load("megatron_grpo", [*two, *here, *size, *overrides])


async def loss_after(s: Session, folder: Path, steps: int) -> float:
    """Return the loss of eight rows in the last of `steps` supervised steps."""
    c = config(folder, *BY_HEART, f"sft.steps={steps}")
    found = problems.prepare(c, problems.load(c), s.run.model)
    return await warm_up(replace(s, config=c, problems=found))


@pytest.mark.slow
def test_a_run_with_two_tensor_parallel_ranks_learns_and_then_eight_rows_by_heart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{runs.ROOT}")
    monkeypatch.setattr(machine, "NVIDIA", Path(os.devnull))  # the run expects a GPU here
    folder = tmp_path / "run"

    async def main() -> None:
        async with open_session(config(folder), runs.progress()) as s:
            await run_training(s, await start_state(s), StopRequest())
            assert await loss_after(s, folder, 1) > 0.01
            assert await loss_after(s, folder, 50) < 1e-2
            await s.engines.train.export(str(tmp_path / "by heart"))

    asyncio.run(main())
    assert (tmp_path / "by heart" / "model.safetensors").is_file()
    rows = runs.rows(folder)
    exported = export(folder, tmp_path / "exported")  # without Megatron and its ranks
    assert exported["complete"] and exported["version"] == 10 and exported["parameters"] > 0
    assert len(rows) == 10
    first, last = (rows[i]["reward/mean"] for i in (0, -1))
    assert last > first + 0.08
    gaps = [
        row["actor/log_prob_gap_same_version"]
        for row in rows
        if "actor/log_prob_gap_same_version" in row
    ]
    assert gaps and max(gaps) < 1e-5, "the replica has the weights of both ranks"
