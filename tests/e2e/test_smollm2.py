"""The recipe `smollm2` on the real weights: one short run. `make test-real` gets the weights."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from millrace.cli import main as cli
from millrace.config.packaged import model_folder

FOLDER = Path(os.environ.get("MILLRACE_SMOLLM2") or model_folder("smollm2"))


@pytest.mark.real
@pytest.mark.skipif(
    not (FOLDER / "model.safetensors").is_file(), reason="make test-real gets the weights"
)
def test_a_short_run_on_real_weights_trains_and_shows_the_same_problems_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    small = [
        f"model.path={FOLDER}",
        f"trainer.run_dir={run}",
        "data.val_max_samples=4",
        "rollout.total_rollout_steps=4",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=2",
        "trainer.save_last=false",
        "report.enable=false",
    ]
    monkeypatch.setattr("sys.argv", ["millrace", "train", "smollm2", *small])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capfd.readouterr().out
    assert not ended.value.code, printed
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2 and all(0 <= row["reward/mean"] <= 1 for row in steps)
    # The engines agree on the text. Random weights would not notice a wrong context.
    assert all(row["actor/log_prob_gap_same_version"] < 1e-4 for row in steps)
    assert all(math.isfinite(row["actor/grad_norm"]) for row in steps)
    assert printed.count("What is ") == 3 and "<|im_start|>" not in printed
