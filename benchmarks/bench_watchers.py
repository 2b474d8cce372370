"""The cost of what watches a run, in one run: it works in every other block of a few seconds.

    python benchmarks/bench_watchers.py trace [--seconds 300] [--block 5] [key=value ...]
    python benchmarks/bench_watchers.py samples
    python benchmarks/bench_watchers.py wandb|mlflow|trackio|prometheus

It trains the quickstart. The rate of a block with the watcher is divided by the mean of both
neighbours without it, so that the machine's slow changes cancel. The first half second of a block
does not count, because the watcher may still write what came before it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from command import millrace
from millrace.report.trace.scoring import Scoring

import millrace.report.record as record
import millrace.report.samples.store as store
from millrace.cli.main import main as cli
from millrace.observe.trackers import Background, Row
from millrace.report.samples.store import SampleStore
from millrace.report.trace.writer import TraceWriter
from millrace.waits.registry import Event

SETTLE_S = 0.5
LOGGERS = ("wandb", "mlflow", "trackio", "prometheus")


def processor_seconds(name: str) -> float:
    """Return the processor time of the threads with this name."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name == name and thread.ident
    ]
    return sum(map(time.clock_gettime, clocks))


class Blocks:
    """The blocks of a run: their rates, and whether the watcher works now."""

    def __init__(self, block_s: float) -> None:
        self.block_s, self.on = block_s, False
        self.rates: list[tuple[bool, float]] = []
        self.used: list[float] = []
        """The share of a core of the trace's thread in each block with it."""
        self._begin: float | None = None
        self._from: float | None = None
        self._samples, self._used = 0, 0.0

    def see(self, event: Event) -> bool:
        """Count an event. Return whether a block has just ended."""
        if event.name == "stepped" and event.track == "trainer":
            self._samples += len(event.facts["samples"])
        if event.name != "published" or event.track != "run":
            return False
        if self._begin is None:
            self._begin = event.time
        elif self._from is None and event.time >= self._begin + SETTLE_S:
            self._from, self._samples, self._used = event.time, 0, processor_seconds("trace")
        elif self._from is not None and event.time >= self._begin + self.block_s:
            seconds = event.time - self._from
            self.rates.append((self.on, self._samples / seconds))
            if self.on:
                self.used.append((processor_seconds("trace") - self._used) / seconds)
            self._begin, self._from, self.on = event.time, None, not self.on
            return True
        return False

    def ratios(self) -> list[float]:
        """Return the rate of each block with the watcher, by that of its neighbours."""
        rates = [rate for _, rate in self.rates]
        return [
            2 * rates[i] / (rates[i - 1] + rates[i + 1])
            for i in range(1, len(rates) - 1)
            if self.rates[i][0]
        ]


def watch_in_blocks(what: str, blocks: Blocks) -> None:
    """Let `what` work in every other block."""

    class Trace(TraceWriter):
        """Sees every event. It writes those of its blocks, if the trace is measured."""

        def __call__(self, event: Event) -> None:
            ended = blocks.see(event)
            if ended:  # A load over a block without it and one with it would be half the load.
                self._choice._since = None
            if ended and what == "trace" and not blocks.on:
                super().put(Event(event.time, "run", "gap", "at"))
                self._scoring = Scoring(self.put)
            elif ended and what == "trace":
                for state in self._states(event.time):
                    super().put(state)
            elif what == "trace" and blocks.on:
                super().__call__(event)

        def put(self, event: Event) -> None:
            """Write an event, also one of the states that the accounts tell."""
            if blocks.on or what != "trace":
                super().put(event)

    class Samples(SampleStore):
        def _hand_over(self, *kept: Any) -> None:
            if blocks.on:
                super()._hand_over(*kept)
            else:
                self._dropped, self._dropped_bytes = [], 0

    hand_over = Background.write

    def write(tracker: Background, version: int, row: Row) -> None:
        if blocks.on:
            hand_over(tracker, version, row)

    record.TraceWriter = Trace  # type: ignore[misc]
    store.SampleStore = Samples  # type: ignore[misc]
    Background.write = write  # type: ignore[assignment, method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["trace", "samples", *LOGGERS])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--block", type=float, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("keys", nargs="*", help="more keys of the configuration")
    options = parser.parse_args()
    blocks = Blocks(options.block)
    os.environ.setdefault("WANDB_MODE", "offline")
    watch_in_blocks(options.what, blocks)
    with tempfile.TemporaryDirectory() as name:
        model = millrace("sft", "quickstart", f"trainer.run_dir={name}/sft")["model"]
        logger = f"[{options.what}]" if options.what in LOGGERS else "[]"
        sys.argv = [
            *("millrace", "train", "quickstart", f"model.path={model}", "report.enable=false"),
            *(
                f"trainer.run_dir={name}/run",
                "trainer.val_before_train=false",
                "trainer.test_freq=0",
            ),
            *("trainer.save_last=false", "trainer.save_freq=0", f"trainer.logger={logger}"),
            *("report.trace=true", f"report.samples={float(options.what == 'samples')}"),
            *(
                "rollout.test_freq=0",
                "rollout.total_rollout_steps=100000000",
                "actor.optim.lr=1e-9",
            ),
            "actor.optim.lr_scheduler_type=constant",
            *options.keys,
        ]
        timer = threading.Timer(options.seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        with suppress(SystemExit):
            cli()
    ratios = blocks.ratios()
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    figures = {
        "what": options.what,
        "samples_per_s": statistics.median(rate for _, rate in blocks.rates),
        "mean": statistics.mean(ratios),
        "standard_error": error,
        "median": statistics.median(ratios),
        "share_of_a_core": statistics.mean(blocks.used) if blocks.used else 0.0,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
