"""The cost of each tracker for the process that writes to it.

    python benchmarks/bench_trackers.py [--trackers wandb,mlflow] [--version-s 1]
        [--versions 5] [--repetitions 5] [--json]

One process does the work of a version in pure Python, and then writes a row of 120 figures. Its
work needs the interpreter all the time, which a run does not: the cost is an upper limit. Versions
with the tracker and without it take turns in blocks. All trackers work in their local mode, in a
temporary folder. The CPU is that of threads, so a busy machine changes it little. For each tracker,
it prints:

| figure | meaning |
|---|---|
| throughput | versions per second with the tracker, relative to those without it: median (min to max) |
| cpu | milliseconds of CPU for each row, in write() and in all other threads: median (min to max) |
| children | the same in the tracker's own processes. They run on another core |
| 1 % at | seconds of a version of which cpu is 1 % |
| write | the longest call of write(), in milliseconds |
| close | seconds until every row is in the tracker |

`--paced 60` measures the whole process instead, and its children. It writes two rows per second for
60 seconds and does nothing else, once with each tracker and once without any. The difference is the
tracker's share of one processor, with every thread and every timer of its library.
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

import psutil

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


def others() -> float:
    """Return the CPU seconds of all threads of this process but this one."""
    return time.process_time() - time.thread_time()


def of_children() -> float:
    """Return the CPU seconds of the processes that this one started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def measure(name: str, folder: Path, rounds: int, versions: int, repetitions: int) -> Any:
    """Return the figures of one tracker."""
    about = trackers.About(folder, "bench", name)
    (sink,) = trackers.start([name], about, lambda text: None)
    sink.write(0, ROW)
    while not sink.idle():  # the start of a library is not the cost of its rows
        time.sleep(0.1)
    ratios, cpu, children, longest, version = [], [], [], 0.0, 0
    for _ in range(repetitions):
        seconds, used, outside = {}, {}, {}
        for tracked in (False, True):
            begin, used[tracked], outside[tracked] = time.perf_counter(), -others(), -of_children()
            for _ in range(versions):
                work(rounds)
                if tracked:
                    version += 1
                    called, own = time.perf_counter(), time.thread_time()
                    sink.write(version, ROW)
                    longest = max(longest, time.perf_counter() - called)
                    used[tracked] += time.thread_time() - own
            seconds[tracked] = time.perf_counter() - begin
            while not sink.idle():  # its last row is not a cost of the next block
                time.sleep(0.01)
            time.sleep(0.5)
            used[tracked] += others()
            outside[tracked] += of_children()
        cpu.append(1e3 * (used[True] - used[False]) / versions)
        children.append(1e3 * (outside[True] - outside[False]) / versions)
        ratios.append(seconds[False] / seconds[True])
    begin = time.perf_counter()
    sink.close()
    return {
        "throughput": ratios,
        "cpu_ms": cpu,
        "children_ms": children,
        "write_ms": 1e3 * longest,
        "close_s": time.perf_counter() - begin,
        "dropped": sink.dropped,
    }


def paced(name: str, folder: Path, seconds: float) -> float:
    """Return the share of one processor that this process and its children take."""
    sinks = trackers.start([name], trackers.About(folder, "bench", name), print) if name else []
    for sink in sinks:
        sink.write(0, ROW)
        while not sink.idle():
            time.sleep(0.1)
    time.sleep(1.2 * trackers.PAUSE_S)  # the start of a library is not the cost of its rows
    begin, used, rows = time.monotonic(), -time.process_time() - of_children(), 0
    while time.monotonic() - begin < seconds:
        rows += 1
        for sink in sinks:
            sink.write(rows, ROW)
        time.sleep(max(0.0, begin + rows / 2 - time.monotonic()))
    used += time.process_time() + of_children()
    wall = time.monotonic() - begin
    for sink in sinks:
        sink.close()
    return used / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trackers", default=",".join(trackers.NEEDS))
    parser.add_argument("--version-s", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--paced", type=float, default=0.0, help="seconds of each measurement")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds, results = rounds_of(options.version_s), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "TRACKIO_DIR": f"{folder}/trackio",
        }
        names = options.trackers.split(",")
        if options.paced:
            for name in ["", *names]:
                share = paced(name, Path(folder), options.paced)
                print(f"{name or 'nobody':<11} {share:.3%} of one processor", flush=True)
            return
        for name in names:
            found = measure(name, Path(folder), rounds, options.versions, options.repetitions)
            results[name] = found
            if not options.json:
                ratios, cpu = found["throughput"], found["cpu_ms"]
                print(
                    f"{name:<11} throughput {statistics.median(ratios):.4f} "
                    f"({min(ratios):.4f} to {max(ratios):.4f})  "
                    f"cpu {statistics.median(cpu):.1f} ms ({min(cpu):.1f} to {max(cpu):.1f})  "
                    f"1 % at {statistics.median(cpu) / 10:.2f} s  "
                    f"children {statistics.median(found['children_ms']):.1f} ms  "
                    f"write {found['write_ms']:.2f} ms  "
                    f"close {found['close_s']:.1f} s  dropped {found['dropped']}"
                )
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
