"""PPO and T-PPO on responses with a long tail: seconds and samples to a held-out score.

    .venv/bin/python benchmarks/bench_windows.py --write benchmarks/results/tppo

A model copies digits. 19 of 20 problems have 2 to 6 of them, and one has 60 to 70. Both arms begin
with the same warm-up, a critic and colocated devices: a step of PPO draws until the longest response
ends, and a step of T-PPO draws 8 tokens. Arms take turns. Seconds are those of drawing, training and
the weight sync, without validation. It writes PATH.jsonl, a line for each run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from command import millrace

LEVELS = (0.7, 0.75, 0.8)
SHORT, LONG = "min_digits=2&max_digits=6", "min_digits=60&max_digits=70"
KEYS = [
    f'data.train_files=["task:copy?{SHORT}&size=3800","task:copy?{LONG}&size=200"]',
    f'data.val_files=["task:copy?{SHORT}&split=val&size=243","task:copy?{LONG}&split=val&size=13"]',
    *("mode=colocate_sync", "rollout.n=1", "rollout.max_prompt_length=72"),
    *("rollout.max_response_length=72", "rollout.test_freq=2", "actor.ppo_mini_batch_size=128"),
    *("sft.steps=300", "sft.messiness=0.3", "trainer.critic_warmup=9", "trainer.save_freq=0"),
    *("report.enable=false", "guard.enable=false", "rollout.val_kwargs.greedy=false"),
]
ARMS = {
    "ppo": ["rollout.total_rollout_steps=10240"],
    "tppo": ["rollout.total_rollout_steps=14848", "algorithm.tppo.window=8"],
}


def run(arm: str, seed: int) -> dict[str, object]:
    """Return the curve of one run: (seconds, samples, responses that ended, held-out score)."""
    with tempfile.TemporaryDirectory() as folder:
        millrace(
            "train",
            "ppo",
            *KEYS,
            *ARMS[arm],
            f"trainer.seed={seed}",
            f"trainer.run_dir={folder}/run",
        )
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    seconds, samples, ended, curve, row = 0.0, 0, 0, list[tuple[float, int, int, float]](), {}
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if "timing_s/step" in row:
            seconds += row["timing_s/step"]
            samples += int(row["train/samples"])
            ended += round(row["train/samples"] * row.get("windows/ended_share", 1.0))
        elif "val/copy/mean@1" in row:
            curve.append((round(seconds, 2), samples, ended, row["val/copy/mean@1"]))
    steps = [row["timing_s/gen"] for row in rows if "timing_s/gen" in row]
    return {"arm": arm, "seed": seed, "gen_s": sum(steps) / len(steps), "curve": curve}


def reached(curve: list[tuple[float, int, int, float]], level: float) -> str:
    """Return the seconds and the responses until a score was reached, for the table."""
    first = next((point for point in curve if point[3] >= level), None)
    return "never" if first is None else f"{first[0]:.1f} s, {first[2]:,} responses"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--write", type=Path)
    given = options.parse_args()
    runs = []
    for seed in range(given.seeds):
        for arm in ARMS:
            one = run(arm, seed)
            runs.append(one)
            cells = " | ".join(reached(one["curve"], level) for level in LEVELS)  # type: ignore[arg-type]
            print(f"| {seed} | {arm} | {one['gen_s']:.2f} | {cells} |", flush=True)
    if given.write:
        text = "".join(json.dumps(one) + "\n" for one in runs)
        given.write.with_suffix(".jsonl").write_text(text)


if __name__ == "__main__":
    main()
