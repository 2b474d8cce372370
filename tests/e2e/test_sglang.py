"""Training with SGLang's replicas in an environment of their own: `make sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.persist.history import audit
from tests.e2e import runs
from tests.e2e.accounts import check_accounts

PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="make sglang")
@pytest.mark.parametrize("mode", ["async_partial", "async_swap", "colocate_sync"])
def test_the_quickstart_learns_with_replicas_of_another_python(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "run"
    keys = [
        *("rollout.engine=sglang", f"rollout.python={PYTHON}", f"mode={mode}"),
        *("model.shape.num_attention_heads=2", "model.shape.num_key_value_heads=1"),
        *(
            "rollout.total_rollout_steps=1024",
            "rollout.test_freq=1000",
            f"trainer.run_dir={folder}",
        ),
    ]
    done = runs.millrace("train", "quickstart", *keys)
    assert done.code == 0, done.err
    check_accounts(folder, 8)
    found = audit(folder)
    assert (found.trained, found.lost, found.trained_twice) == (1024, 0, 0)
    rows = [row for row in runs.rows(folder) if "reward/mean" in row]
    first, last = rows[0]["reward/mean"], rows[-1]["reward/mean"]
    assert first < 0.6 and last > 0.7, f"reward went from {first:.2f} to {last:.2f}"
    gaps = [row[k] for row in rows if (k := "actor/log_prob_gap_same_version") in row]
    assert gaps and max(gaps) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="make sglang")
def test_a_mixture_learns_with_the_experts_that_sglang_chose(tmp_path: Path) -> None:
    engine = ["rollout.engine=sglang", f"rollout.python={PYTHON}"]
    runs.mixture_learns(tmp_path / "run", *engine)
