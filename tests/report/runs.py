"""Events of a small run, made by hand, on a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.ports import StepReport
from millrace.report.samples.store import SampleStore
from millrace.report.trace.writer import TraceWriter
from millrace.types import (
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)
from millrace.waits.registry import Registry, Watcher
from tests.waiting import HANG_S


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Watch(Registry):
    """A registry with watchers, of which no actor is a part."""

    def __init__(self, clock: Callable[[], float], watchers: Sequence[Watcher]) -> None:
        super().__init__("run", clock, *watchers)

    def state(self, track: str, name: str) -> None:
        """Report that `track` is in the state `name` from now on."""
        self.emit(track, name, "state", "", {})

    @contextmanager
    def span(
        self, track: str, name: str, key: str = "", /, **facts: Any
    ) -> Iterator[dict[str, Any]]:
        """Report the begin and the end of the body, which gets a dict of facts for the end."""
        ends: dict[str, Any] = {}
        self.emit(track, name, "begin", key, facts)
        yield ends
        self.emit(track, name, "end", key, ends)


def segment(version: int, ids: Sequence[int], stop: Stop | None = Stop.EOS) -> Segment:
    return Segment(tokens_of(ids), Author.POLICY, version, floats_of([-1.0] * len(ids)), stop)


def sample(index: int, *, text: str = "2 + 2 =", n: int = 2, **facts: Any) -> Sample:
    """Return a sample. Its last trajectory was interrupted once, and had a tool's turn."""
    plain = Trajectory.of((segment(0, [65, 66]),), Score(1.0, {"format": 0.5}, 0.25, "4"))
    cut = Trajectory.of(
        (
            segment(0, [67], Stop.INTERRUPTED),
            segment(1, [68, 69], None),
            Segment(tokens_of([70]), Author.ENVIRONMENT),
            segment(1, [71], Stop.LENGTH),
        ),
        Score(-1.0),
    )
    prompt = Prompt(index, tokens_of([1, 2, 3]), text, "task:sums", facts.get("truth", 4))
    return Sample(prompt, (*[plain] * (n - 1), cut), facts.get("admitted", 0))


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def life(watch: Watch, clock: Clock, version: int, ids: Sequence[int], step_s: float = 1.0) -> None:
    """Report the events of one version, which these samples train."""
    watch.state("trainer", "wait_samples")
    for i in ids:
        watch.at("samples", "waiting", str(i), version=version - 1)
        watch.at("samples", "running", str(i))
    for i in ids:
        with watch.span("rollout-0", "request", f"{i}/0") as first:
            clock.now += 0.25
            with watch.span("rollout-0", "request", f"{i}/1"):
                clock.now += 0.5
            first.update(tokens=2, versions=[[version - 1, 2]], stop="eos")
        with watch.span("rewards", "score", str(i), n=1), watch.span("rewards", "score", str(i)):
            clock.now += 0.125
        watch.at("samples", "ready", str(i))
    for i in ids:
        watch.at("samples", "taken", str(i))
    watch.state("trainer", "train")
    clock.now += step_s
    watch.state("trainer", "other")
    for i in ids:
        watch.at("samples", "trained", str(i))
    report = StepReport(1, seconds={"update_actor": step_s})
    watch.at(
        *("trainer", "stepped"),
        samples=[sample(i) for i in ids],
        version=version - 1,
        report=report,
    )
    for i in ids:
        watch.at("samples", "sealed", str(i))
    watch.state("trainer", "sync_transfer")
    with watch.span("sync", "transfer", str(version)) as last:
        clock.now += 0.25
        last["bytes"] = 1024
    with watch.span("sync", "activate", str(version)):
        clock.now += 0.125
        for i in ids:
            watch.at("samples", "retired", str(i))
        watch.at("run", "published", version=version, ids=list(ids), totals=None)
    watch.at("run", "row", version=version, row={"reward/mean": 0.5, "other": 1.0})


class Run:
    """A run of several attempts with both writers."""

    def __init__(self, folder: Path, watchers: Sequence[str] = ("trace", "samples")) -> None:
        self.folder, self.clock, self.notes = folder, Clock(), list[str]()
        self.attempt, self._watchers = 0, watchers

    def go(
        self,
        versions: Sequence[int],
        *,
        work: Callable[[Watch], None] | None = None,
        trace: dict[str, Any] | None = None,
        samples: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run one attempt from `versions[0] - 1` on, with two samples for each version."""
        self.attempt += 1
        writers: list[Any] = []
        if "trace" in self._watchers:
            make = TraceWriter(
                self.folder,
                self.attempt,
                self.clock,
                self.notes.append,
                **{"close_s": HANG_S, **(trace or {})},
            )
            writers.append(make)
        if "samples" in self._watchers:
            start = versions[0] - 1
            writers.append(
                SampleStore(
                    *(self.folder, self.attempt, start, decode, self.notes.append),
                    **{"close_s": HANG_S, **(samples or {})},
                )
            )
        watchers: list[Watcher] = list(writers)
        watch = Watch(self.clock, watchers)
        for version in versions:
            life(watch, self.clock, version, [2 * version - 2, 2 * version - 1])
        if work:
            work(watch)
        for writer in writers:
            writer.close()
        return writers
