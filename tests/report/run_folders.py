"""Folders of simulated runs, written by the real writers: metrics, history, accounts, trace, samples."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.config import ReportConfig, recipe
from millrace.config.packaged import find
from millrace.observe.sinks import JsonLines
from millrace.persist.history import History
from millrace.report.record import Devices, EventRecorder
from millrace.report.samples.store import SampleStore
from millrace.schedule.ledger import Ledger, LedgerSnapshot
from millrace.types import Sample, Tokens
from millrace.waits.registry import Event
from tests.pipeline.simulated import Outcome, mixed, schedule_of, simulate
from tests.report.runs import Watch

WORDS = ("the", "a", "one", "two", "sum", "of", "is", "so", "then", "we", "add", "take", "digit")


def decode(tokens: Tokens) -> str:
    """Return a text for simulated tokens. Every token is a word."""
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)


def write_config(folder: Path, *overrides: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = recipe.load(find(Path("quickstart"), Path(), "NAME"), list(overrides))
    (folder / "config.yaml").write_text(recipe.dump(config))
    (folder / ".millrace-run").write_text("a test made this folder\n")


class _Attempt:
    """The writers of one attempt."""

    def __init__(self, folder: Path, attempt: int, counts: dict[str, float], tools: bool) -> None:
        self._folder, self._attempt, self._counts, self._tools = folder, attempt, counts, tools
        self._now, self.notes = 0.0, list[str]()
        self.recorder: EventRecorder

    def __call__(self, now: float, ledger: Ledger) -> list[Any]:
        self._now = now
        self._history = History(self._folder, ledger.totals())
        devices = Devices(1, {"rollout-0": 1, "rollout-1": 1}, tools=self._tools)
        self.recorder = EventRecorder(
            *(
                self._folder,
                self._attempt,
                ledger,
                self._counts,
                devices,
                ReportConfig(trace_load=1),
            ),
            *(self._clock, self.notes.append, decode),
        )
        return [self._tick, *self.recorder.watchers, self._publish]

    def _clock(self) -> float:
        return self._now

    def _tick(self, event: Event) -> None:
        self._now = event.time

    def _publish(self, event: Event) -> None:
        if event.name == "published":
            self._history.version(event.facts["totals"], list(event.facts["ids"]))

    def end(self, ledger: Ledger, complete: bool) -> None:
        """End the attempt. Without this it looks killed."""
        self.recorder.end(ledger.snapshot())
        self._history.end(ledger.totals(), complete)


def write_run(
    folder: Path,
    *overrides: str,
    mode: str = "async_partial",
    samples: int = 64,
    killed_at: float | None = None,
    **options: Any,
) -> Path:
    """Simulate a run into `folder`. With `killed_at`, a first attempt ends there without an end."""
    schedule = schedule_of(mode)
    sizes = (
        f"actor.ppo_mini_batch_size={schedule.ppo_mini_batch_size}",
        f"async_training.trigger_parameter_sync_step={schedule.trigger_parameter_sync_step}",
        f"async_training.staleness_threshold={schedule.staleness_threshold}",
    )
    write_config(folder, f"mode={mode}", "rollout.n=4", *sizes, *overrides)
    start: LedgerSnapshot | None = None
    counts: dict[str, float] = {}
    rows: dict[int, dict[str, float]] = {}
    chosen: dict[str, Any] = {"replicas": 2, "chance": mixed, "validation_s": 3.0, "save_s": 1.0}
    chosen |= options
    attempts = [killed_at, None] if killed_at else [None]
    for attempt, stop_at in enumerate(attempts, start=1):
        writers = _Attempt(folder, attempt, counts, "agent" in options)
        done: Outcome = simulate(
            schedule, samples, watchers=writers, start=start, stop_at=stop_at, **chosen
        )
        if start := done.record.saved:
            counts = writers.recorder.counts(start)
        rows |= {int(row.pop("version")): row for row in done.record.rows}
        if stop_at is None:
            writers.end(done.ledger, complete=True)
        writers.recorder.close()
        assert not writers.notes, writers.notes
    write_metrics(folder, rows)
    return folder


def write_metrics(folder: Path, rows: dict[int, dict[str, float]]) -> None:
    """Write metrics.jsonl: the rows, alarms, and a validation of every second version."""
    sink = JsonLines(folder / "metrics.jsonl", None)
    noise = random.Random(0)
    for version, row in sorted(rows.items()):
        alarms = {"alarm/truncation": float(version < 3), "alarm/low_ess": 0.0}
        sink.write(version, row | alarms)
        if version % 2 == 0:
            score = 1 - 0.9**version + noise.uniform(-0.02, 0.02)
            sink.write(version, {"val/sim/mean@1": score, "val/sim/greedy": score + 0.05})
    sink.close()


def keep_samples(folder: Path, by_version: dict[int, Sequence[Sample]]) -> None:
    """Keep these samples as those that trained each version. Their tokens are characters."""
    notes: list[str] = []
    store = SampleStore(folder, 1, 0, lambda tokens: "".join(map(chr, tokens)), notes.append)
    watch = Watch(lambda: 0.0, [store])
    for version, samples in by_version.items():
        watch.at("trainer", "stepped", samples=list(samples), version=version - 1, report=None)
        ids = [sample.prompt.index for sample in samples]
        watch.at("run", "published", version=version, ids=ids, totals=None)
    store.close()
    assert not notes, notes


def renamed(sample: Sample, **prompt: Any) -> Sample:
    """Return the sample with other facts of its prompt."""
    return dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, **prompt))
