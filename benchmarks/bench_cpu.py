"""The CPU of each process of the quickstart's RL, for one trajectory. Code trees take turns.

    millrace sft quickstart trainer.run_dir=/tmp/warm
    python benchmarks/bench_cpu.py --model /tmp/warm/sft TREE [TREE ...] [--rounds 3] [--steps 80]

A TREE is a checkout, such as one of `git worktree add TREE COMMIT`. Its benchmarks have the reward.
The run is that of bench_trl.py's plain case. CPU is that of all threads, in microseconds, between
the eighth version and the last but one. It needs Linux. A busy machine makes every figure larger,
so compare figures of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SKIPPED = 8
WINDOW = 64
N = 8
ROLES = {"rewards.worker": "reward", "trainer-": "trainer", "rollout-": "rollout"}


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def role_of(process: psutil.Process) -> str:
    line = " ".join([process.name(), *process.cmdline()])
    return next((role for part, role in ROLES.items() if part in line), "driver")


def overrides(tree: Path, model: str, folder: Path, steps: int, seed: int) -> list[str]:
    return [
        *(f"model.path={model}", "sft.steps=0", f"trainer.run_dir={folder}"),
        *(f"trainer.seed={seed}", f"rollout.total_rollout_steps={steps * WINDOW // 2}"),
        f"reward.function={tree}/benchmarks/trl_training.py:fast",
        *("trainer.save_freq=0", "rollout.test_freq=0", "trainer.val_before_train=false"),
        *("data.val_files=[]", "trainer.logger=[]"),
    ]


def run(tree: Path, model: str, steps: int, seed: int) -> dict[str, float]:
    """Run once. Return microseconds of CPU for each trajectory by role, and the run's seconds."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as said:
        folder, first, versions = Path(name, "run"), 0, 0
        driver = psutil.Popen(
            [
                *(sys.executable, "-m", "millrace.cli.main", "train", "quickstart", "--json"),
                *overrides(tree, model, folder, steps, seed),
            ],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdout=said,
            stderr=subprocess.DEVNULL,
        )
        processes: dict[int, str] = {}
        used: dict[int, float] = {}
        while driver.poll() is None and versions < steps // 2 - 1:
            rows = folder / "metrics.jsonl"
            versions = rows.read_text().count("\n") if rows.is_file() else 0
            if versions >= SKIPPED and not processes:
                first = versions
                processes = {p.pid: role_of(p) for p in (driver, *driver.children(recursive=True))}
                used = {pid: -cpu_s(pid) for pid in processes}
            time.sleep(0.004)
        if driver.poll() is None:
            used = {pid: before + cpu_s(pid) for pid, before in used.items()}
        if driver.wait() or not processes:
            sys.exit(f"the run of {tree} failed")
        said.seek(0)
        summary = json.loads(said.read().splitlines()[-1])
    found: dict[str, float] = {}
    for pid, role in processes.items():
        spent = used[pid] / ((versions - first) * WINDOW * N) * 1e6
        found[role] = found.get(role, 0.0) + spent
    return found | {"all": sum(found.values()), "train_seconds": summary["train_seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--model", required=True, help="a warmed-up model")
    parser.add_argument("--rounds", type=int, default=3, help="round k has seed k")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each run")
    options = parser.parse_args()
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in options.trees}
    for k in range(options.rounds):
        for tree in options.trees if k % 2 == 0 else options.trees[::-1]:
            one = run(tree.resolve(), options.model, options.steps, k)
            found[tree].append(one)
            load = {"load": os.getloadavg()[0]}
            print(tree.name, json.dumps({n: round(v, 1) for n, v in (one | load).items()}))
    names = list(found[options.trees[0]][0])
    print(f"\n| tree | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    for tree, runs in found.items():
        medians = [f"{statistics.median(one[name] for one in runs):.1f}" for name in names]
        print(f"| {tree.name} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()
