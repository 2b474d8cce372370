"""The recipe megatron_grpo on two ranks, with the shim, the torch rollout engine and no Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.run.export import export
from tests.e2e import runs

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "tests/train/megatron/site"
"""Puts Megatron on the CPU, in every process whose PYTHONPATH has it."""


def millrace(command: str, folder: Path, *overrides: str) -> str:
    """Run a command on the recipe, and return its standard output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "millrace", command, "megatron_grpo"),
            *("trainer.n_gpus_per_node=2", "trainer.megatron.tensor_model_parallel_size=2"),
            *("rollout.engine=torch", "trainer.runtime=local", f"trainer.run_dir={folder}"),
            *overrides,
        ],
        env=os.environ | {"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_eight_rows_are_learnt_by_heart(tmp_path: Path) -> None:
    few = ("sft.steps=300", "sft.batch_size=8", "sft.demonstrations=8", "sft.messiness=0")
    out = millrace("sft", tmp_path / "run", *few, "--json")
    assert json.loads(out.splitlines()[-1])["loss"] < 1e-3


@pytest.mark.slow
def test_a_run_with_two_tensor_parallel_ranks_learns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    millrace("train", folder, "rollout.total_rollout_steps=960", "trainer.val_before_train=false")
    rows = runs.rows(folder)
    exported = export(folder, tmp_path / "exported")  # without Megatron and its ranks
    assert exported["complete"] and exported["version"] == 15 and exported["parameters"] > 0
    assert len(rows) == 15
    first, last = (rows[i]["reward/mean"] for i in (0, -1))
    assert last > max(0.35, first + 0.2)
    gaps = [
        row["actor/log_prob_gap_same_version"]
        for row in rows
        if "actor/log_prob_gap_same_version" in row
    ]
    assert gaps and max(gaps) < 1e-5, "the replica has the weights of both ranks"
