"""The time that the trainer waits for a checkpoint, with trainer.async_save and without it.

    python benchmarks/bench_save.py [--repetitions 3] [--json] [KEY=VALUE ...]

It trains the quickstart task with a new model of 64 M parameters and trainer.save_freq=2. Both
values of trainer.async_save take turns, each run in a new folder. Overrides apply to every run. For
each value, it prints medians (minimum to maximum) over all repetitions, without the first version:

- seconds that the trainer waits for a checkpoint
- seconds until the checkpoint is whole
- seconds of a local step
- seconds of a version
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from command import millrace

SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
}
RUN = [
    *(f"model.shape.{key}={value}" for key, value in SHAPE.items()),
    "sft.steps=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=2",
    "trainer.max_ckpt_to_keep=1",
    "trainer.save_last=false",
    "rollout.test_freq=0",
    "rollout.n=4",
    "rollout.total_rollout_steps=112",
    "rollout.max_response_length=16",
    "actor.ppo_mini_batch_size=8",
    "data.val_files=[]",
    "trainer.logger=[]",
]
COLUMNS = [
    "timing_s/save_checkpoint",
    "checkpoint/write_s",
    "timing_s/train",
    "perf/time_per_version",
]


def one_run(folder: Path, overrides: list[str], async_save: bool) -> list[dict[str, float]]:
    """Return the rows from the second version on, because the first step is slow."""
    arguments = [
        *RUN,
        f"trainer.async_save={str(async_save).lower()}",
        f"trainer.run_dir={folder}",
        *overrides,
    ]
    millrace("train", "quickstart", *arguments)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    size = 0
    for number in range(options.repetitions):
        for arm in rows if number % 2 == 0 else reversed(rows):
            with tempfile.TemporaryDirectory(prefix="save-") as folder:
                run = Path(folder) / "run"
                rows[arm] += one_run(run, options.overrides, arm)
                size = sum(p.stat().st_size for p in run.glob("checkpoints/version-*/engine/*"))
                print(f"repetition {number + 1}, async_save={arm}: done", file=sys.stderr)
    if options.json:
        raw = {
            f"async_save={arm}": {c: [round(r[c], 3) for r in rows[arm] if c in r] for c in COLUMNS}
            for arm in rows
        }
        print(json.dumps({"checkpoint_bytes": size} | raw))
        return
    print(
        f"checkpoint: {size / 1e6:.0f} MB\n\n| async_save | stands still, s | whole after, s | step, s | version, s |\n|---|--:|--:|--:|--:|"
    )
    for arm, runs in rows.items():
        print(
            f"| {str(arm).lower()} | "
            + " | ".join(cell([r[c] for r in runs if c in r]) for c in COLUMNS)
            + " |"
        )


if __name__ == "__main__":
    main()
