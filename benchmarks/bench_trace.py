"""The cost of the trace and of the kept samples.

    python benchmarks/bench_trace.py events [--samples 20000] [--repeats 3]
    python benchmarks/bench_trace.py quickstart [--rounds 4]

`events` runs the loops of bench_control.py, whose engines answer at once, with n=1. All threads of
the process count, so a figure has the work of the loop and of the writers. Its arms take turns.

| arm | who watches |
|---|---|
| none | nobody |
| watched | a function that does nothing: the price of the events themselves |
| trace | the trace |
| both | the trace and the samples |

`quickstart` trains the quickstart with `none`, `trace` and `both`, in turns, from one warmed-up
model. The accounts, which every run has, are in all of them. It prints the ratios of each round,
because a shared machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_control import Case, case, pipeline
from command import millrace

from millrace.report.samples.store import SampleStore
from millrace.report.trace import spans
from millrace.report.trace.writer import TraceWriter
from millrace.waits.registry import Event

ARMS = ("none", "watched", "trace", "both")
TRAINED = ("none", "trace", "both")


class Counter:
    """A watcher that counts."""

    def __init__(self) -> None:
        self.events = 0

    def __call__(self, event: Event) -> None:
        self.events += 1


def seconds(arm: str, c: Case, samples: int, folder: Path) -> tuple[float, int, int]:
    """Return the processor seconds of one run of `arm`, its events, and those that were lost."""
    counter, writers = Counter(), list[Any]()
    note: Callable[[str], None] = print
    begin = time.process_time()
    if arm in ("trace", "both"):
        writers.append(TraceWriter(folder, 1, time.monotonic, note, limit_mb=8192, close_s=120))
    if arm == "both":
        store = SampleStore(folder, 1, 0, lambda tokens: "a text", note, close_s=120)
        writers.append(store)
    watchers = [*writers, counter] if arm == "watched" else writers
    asyncio.run(pipeline(c, samples, 1, [], watchers))
    for writer in writers:
        writer.close()
    lost = writers[0].dropped if writers else 0
    return time.process_time() - begin, counter.events, lost


def events(samples: int, repeats: int) -> dict[str, Any]:
    """Print the cost of an event at two capacities."""
    found: dict[str, Any] = {}
    for capacity in (64, 65_536):
        c, count = case(capacity, lookahead=True, straggler=False), max(samples, capacity)
        spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
        number, size, read_s, lost = 0, 0, 0.0, 0
        for _ in range(repeats):
            for arm in ARMS:
                with tempfile.TemporaryDirectory() as name:
                    used, seen, dropped = seconds(arm, c, count, Path(name))
                    spent[arm].append(used)
                    number, lost = max(number, seen), lost + dropped
                    if arm == "trace":
                        size = sum(p.stat().st_size for p in Path(name, "trace").iterdir())
                        read_s = -time.process_time()
                        spans.read(Path(name))
                        read_s += time.process_time()
        best = {arm: min(values) for arm, values in spent.items()}
        row = {
            "events_per_sample": number / count,
            "us_per_event": {arm: 1e6 * (best[arm] - best["none"]) / number for arm in ARMS[1:]},
            "us_per_sample": {arm: 1e6 * best[arm] / count for arm in ARMS},
            "bytes_per_event": size / number,
            "read_s_per_million_events": 1e6 * read_s / number,
            "lost_share": lost / (2 * repeats * number),
        }
        found[str(capacity)] = row
        print(f"capacity {capacity:,}: {json.dumps(row, indent=1)}", flush=True)
    return found


def train(model: str, folder: Path, arm: str, samples: int) -> dict[str, float]:
    """Train the quickstart once. Return samples per second, and processor seconds."""
    trace, kept = str(arm != "none").lower(), float(arm == "both")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = millrace(
        *("train", "quickstart", f"model.path={model}", f"trainer.run_dir={folder}"),
        *("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_last=false"),
        *(f"rollout.total_rollout_steps={samples}", "report.enable=false"),
        *(f"report.trace={trace}", f"report.samples={kept}"),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"samples_per_s": result["samples_trained"] / result["train_seconds"], "cpu_s": cpu}


def quickstart(rounds: int, samples: int) -> dict[str, Any]:
    """Print the throughput and the processor time of each arm, relative to those of `none`."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in TRAINED}
    with tempfile.TemporaryDirectory() as name:
        model = millrace("sft", "quickstart", f"trainer.run_dir={name}/sft")["model"]
        for k in range(rounds):
            for i in range(len(TRAINED)):
                arm = TRAINED[(i + k) % len(TRAINED)]
                found[arm].append(train(model, Path(name, f"{k}-{arm}"), arm, samples))
            print({arm: runs[k] for arm, runs in found.items()}, flush=True)
        size = next(Path(name).glob("*-trace/trace/*.json")).stat().st_size
    for arm in TRAINED[1:]:
        for figure in ("samples_per_s", "cpu_s"):
            pairs = zip(found[arm], found["none"], strict=True)
            ratios = [run[figure] / base[figure] for run, base in pairs]
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"{arm} {figure}: median {statistics.median(ratios):.3f} ({shown})", flush=True)
    return {"runs": found, "trace_bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["events", "quickstart"])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="runs of each arm")
    parser.add_argument("--train", type=int, default=5120, help="samples of a run")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.what == "events":
        figures = events(options.samples, options.repeats)
    else:
        figures = quickstart(options.rounds, options.train)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
