"""Short runs of the real command on SmolLM2, and their gaps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from millrace.observe.metrics import GAP, GAP_LIMIT
from millrace.persist.history import audit
from tests.gpu.test_real_tokens import FOLDER, record

K3 = "actor/k3_to_sampler"
SMALL = [
    *("actor.ppo_mini_batch_size=16", "trainer.val_before_train=false", "rollout.test_freq=1000"),
    *("trainer.save_last=false", "report.enable=false", "guard.max_clip_ratio=1"),
]


def train(run: Path, keys: Sequence[str]) -> subprocess.CompletedProcess[str]:
    given = [f"model.path={FOLDER}", f"trainer.run_dir={run}", *SMALL, *keys]
    command = [sys.executable, "-m", "millrace", "train", "smollm2_vllm", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=Path.cwd())


def gaps_of_a_run(name: str, run: Path, samples: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Train so many samples. Record the gaps, and check them. Return the rows of metrics."""
    ended = train(run, [f"rollout.total_rollout_steps={samples}", *keys])
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if GAP in row]
    record(
        {
            "test": name,
            "card": torch.cuda.get_device_name(),
            "gaps": [row[GAP] for row in steps],
            "limit": steps[0][GAP_LIMIT],
            "k3": [row[K3] for row in rows if K3 in row],
            "rewards": [row["reward/mean"] for row in rows if "reward/mean" in row],
        }
    )
    assert all(0 < row[GAP] <= row[GAP_LIMIT] for row in steps), steps
    found = audit(run)
    assert (found.trained, found.lost, found.trained_twice) == (samples, 0, 0)
    return rows
