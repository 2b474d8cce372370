"""The keys of small runs, for tests and for the scripts in `stories`."""

from __future__ import annotations

from typing import Any

HANG_S = 120.0
SMALL: dict[str, Any] = {
    "sft": {"steps": 5, "batch_size": 16},
    "actor": {"ppo_mini_batch_size": 4},
    "rollout": {
        "n": 4,
        "total_rollout_steps": 32,
        "test_freq": 0,
        # A busy machine is slow, and loses no worker.
        "heartbeat_s": HANG_S,
        "stall_s": HANG_S,
    },
    "guard.enable": False,
    "report.enable": False,
    "trainer": {"save_freq": 2, "val_before_train": False, "threads": 1},
}
"""Four versions of eight prompts each."""

ROWS = [
    {"prompt": f"{i:04d}", "answer": "".join(sorted(f"{i:04d}")), "place": i}
    for i in range(1000, 1040)
]


def length(solution_str: str, **columns: Any) -> float:
    """A reward that a worker imports: its file imports little."""
    return float(len(solution_str))
