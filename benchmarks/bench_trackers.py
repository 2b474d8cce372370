"""The cost of each tracker for the process that writes to it.

    python benchmarks/bench_trackers.py [--trackers wandb,mlflow] [--version-s 1]
        [--versions 5] [--repetitions 5] [--json]

One process does the work of a version in pure Python, and then writes a row of 120 figures. Its
work needs the interpreter all the time, which a run does not: the cost is an upper limit. Versions
with the tracker and without it take turns in blocks. All trackers work in their local mode, in a
temporary folder. For each tracker, it prints:

| figure | meaning |
|---|---|
| throughput | versions per second with the tracker, relative to those without it: median (min to max) |
| cpu | milliseconds of this process's CPU for each row: the median. A noisy machine changes it little |
| write | the longest call of write(), in milliseconds |
| close | seconds until every row is in the tracker |
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from millrace.observe import trackers

ROW = {f"group/figure_{i}": i / 7 for i in range(120)}


def work(rounds: int) -> int:
    """Do the work of a version: it never releases the interpreter."""
    total = 0
    for i in range(rounds):
        total += i * i % 7
    return total


def rounds_of(seconds: float) -> int:
    """Return the rounds that take `seconds` here."""
    begin = time.perf_counter()
    work(1_000_000)
    return int(1_000_000 * seconds / (time.perf_counter() - begin))


def measure(name: str, folder: Path, rounds: int, versions: int, repetitions: int) -> Any:
    """Return the figures of one tracker."""
    about = trackers.About(folder, "bench", name)
    (sink,) = trackers.start([name], about, lambda text: None)
    sink.write(0, ROW)
    while not sink.idle():  # the start of a library is not the cost of its rows
        time.sleep(0.1)
    ratios, cpu, longest, version = [], [], 0.0, 0
    for _ in range(repetitions):
        seconds, used = {}, {}
        for tracked in (False, True):
            begin, used[tracked] = time.perf_counter(), -time.process_time()
            for _ in range(versions):
                work(rounds)
                if tracked:
                    version += 1
                    called = time.perf_counter()
                    sink.write(version, ROW)
                    longest = max(longest, time.perf_counter() - called)
            seconds[tracked] = time.perf_counter() - begin
            while not sink.idle():  # its last row is not a cost of the next block
                time.sleep(0.01)
            time.sleep(0.5)
            used[tracked] += time.process_time()
        cpu.append(1e3 * (used[True] - used[False]) / versions)
        ratios.append(seconds[False] / seconds[True])
    begin = time.perf_counter()
    sink.close()
    return {
        "throughput": ratios,
        "cpu_ms": statistics.median(cpu),
        "write_ms": 1e3 * longest,
        "close_s": time.perf_counter() - begin,
        "dropped": sink.dropped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trackers", default=",".join(trackers.TRACKERS))
    parser.add_argument("--version-s", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds, results = rounds_of(options.version_s), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "TRACKIO_DIR": f"{folder}/trackio",
        }
        for name in options.trackers.split(","):
            found = measure(name, Path(folder), rounds, options.versions, options.repetitions)
            results[name] = found
            if not options.json:
                ratios = found["throughput"]
                print(
                    f"{name:<11} throughput {statistics.median(ratios):.4f} "
                    f"({min(ratios):.4f} to {max(ratios):.4f})  "
                    f"cpu {found['cpu_ms']:.1f} ms  write {found['write_ms']:.2f} ms  "
                    f"close {found['close_s']:.1f} s  dropped {found['dropped']}"
                )
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
