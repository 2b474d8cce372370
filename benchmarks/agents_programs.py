"""Train agents_quickstart with a program over HTTP: seconds and CPU until the policy has learned.

    python benchmarks/agents_programs.py --seeds 0 1 2 3 4

The program is millrace/environments/chase_program.py, with openai's client, in worker processes.
Each seed has two rows of JSON: one for each validation, and one for the whole command. CPU is user
and system time of each process, as of the last look.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from subprocess import STDOUT, Popen

import psutil

PROGRAM = "millrace.environments.chase_program"
NAMES = {"trainer-0": "trainer and rollout", "rollout-0": "trainer and rollout", PROGRAM: "worker"}
SCORES = re.compile(r"validation of version (\d+): chase/mean@1 (\S+)")


def look(driver: psutil.Process, used: dict[int, tuple[str, float]]) -> dict[str, float]:
    """Note the CPU seconds of every live process of a run. Return the sums by name."""
    for process in (driver, *driver.children(recursive=True)):
        try:
            words, times = [process.name(), *process.cmdline()], process.cpu_times()
        except psutil.Error:
            continue
        own = (name for mark, name in NAMES.items() if mark in words)
        name = "driver" if process == driver else next(own, "others")
        used[process.pid] = name, times.user + times.system
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in used.values():
        sums[name] += seconds
    return {name: round(seconds, 1) for name, seconds in sums.items()}


def train(seed: int, workers: int, folder: Path) -> None:
    """Run the recipe once, and print what is known at each validation and at the end."""
    output, used, seen = folder / "output.txt", dict[int, tuple[str, float]](), 0
    keys = [
        f"trainer.seed={seed}",
        f"trainer.run_dir={folder / 'run'}",
        "agents.environment=",
        f"agents.command={sys.executable} -m {PROGRAM}",
        f"agents.workers={workers}",
        "agents.max_concurrent=128",
    ]
    begin = time.monotonic()
    command = [sys.executable, "-m", "millrace", "train", "agents_quickstart", *keys]
    with output.open("w") as file:
        process = Popen(command, stdout=file, stderr=STDOUT)
    driver = psutil.Process(process.pid)
    while process.poll() is None:
        sums = look(driver, used)
        found = SCORES.findall(output.read_text())
        for version, score in found[seen:]:
            at = {"seed": seed, "version": int(version), "mean@1": float(score)}
            print(json.dumps({**at, "s": round(time.monotonic() - begin), "CPU s": sums}), flush=True)  # fmt: skip
        seen = len(found)
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(output.read_text()[-3000:])
    print(json.dumps({"seed": seed, "s": round(time.monotonic() - begin)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            train(seed, given.workers, Path(folder))


if __name__ == "__main__":
    main()
