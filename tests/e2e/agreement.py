"""The seconds of a run by its metrics, its accounts and its trace, each from its own file.

Version 1 to the last one is compared: the rows begin with the first step, the accounts and the trace
earlier. A row ends when the version is live and its line of the accounts is written, but with
overlap_sync before its transfer.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

from millrace.observe.timing import GEN, IDLE, TOTALS
from millrace.report.trace import spans

ENGINE = (
    "old_log_prob",
    "ref",
    "values",
    "teacher",
    "adv",
    "update_critic",
    "update_actor",
    "train_other",
)
"""The parts of a call of the train engine."""

Figures = dict[str, float]


def of_rows(folder: Path) -> list[Figures]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "timing_s/step" in row]


def by_metrics(rows: list[Figures]) -> Figures:
    """Return the sums of `timing_s` over versions, and the seconds behind the ratios."""
    found = defaultdict[str, float](float)
    for row in rows:
        for name, value in row.items():
            if name.startswith("timing_s/") and (part := name[9:]) not in TOTALS:
                found["train" if part in ENGINE else part] += value
        step = row["timing_s/step"]
        found["step"] += step
        found["trainer idle"] += row["trainer/idle_ratio"] * step
        live, idle = (
            row[f"fully_async/rollouter/{name}"] for name in ("version_time", "idle_ratio")
        )
        found["rollouts live"] += live
        found["rollouts idle"] += idle * live
    return found


def by_accounts(folder: Path, *, shared: bool) -> tuple[Figures, Figures]:
    """Return the seconds of the trainer by part, and of the first replica by state."""
    lines = [json.loads(line) for line in (folder / "accounts.jsonl").read_text().splitlines()]
    ends = [line for line in lines if line["event"] == "version"]
    first, last = (
        {track: device["seconds"] for track, device in line["devices"].items()}
        for line in (ends[0], ends[-1])
    )

    def of(track: str) -> Figures:
        found = defaultdict[str, float](float)
        for name, value in last[track].items():
            seconds = value - first[track].get(name, 0.0)
            found["train" if name in ENGINE else name] += seconds
            found["step"] += seconds
        return found

    replica = "shared-0" if shared else "rollout-0"
    return of(replica if shared else "trainer"), of(replica)


def by_trace(folder: Path, *, shared: bool) -> tuple[Figures, Figures]:
    """Return the seconds of the trainer by part, and of the first replica by state.

    Rollouts are idle from the end of the last running sample to the next version. On shared devices
    they are idle from the beginning of the trainer's turn at the latest.
    """
    read = spans.read(folder)
    live = [s.start for s in read if s.name == "published"]
    begin, end = live[0], live[-1]
    trainer, replica = defaultdict[str, float](float), defaultdict[str, float](float)
    tracks = {"trainer": trainer, "rollout-0": replica}
    for span in read:
        if span.track in tracks and span.name not in ("step", "request"):
            within = min(span.end, end) - max(span.start, begin)
            tracks[span.track][span.name] += max(0.0, within)
    trainer["step"] = end - begin
    trainer["trainer idle"] = sum(trainer[name] for name in IDLE)
    running = [s for s in read if s.track == "samples" and s.name == "running"]
    pauses = [s for s in read if s.track == "rollouts" and s.name == "pause"]
    pausing = ("wait_rollouts", "wait_prev_gen")
    turns = [s.start for s in read if s.track == "trainer" and s.name not in pausing]
    for since, until in itertools.pairwise(live):
        ran = (min(s.end, until) for s in running if s.start < until and s.end > since)
        last = max(ran, default=since)
        if shared:
            (pause,) = (s for s in pauses if s.start < until <= s.end)
            last = min(last, *(at for at in turns if pause.start <= at <= until))
        trainer["rollouts idle"] += until - max(since, last)
    return trainer, replica


def check_seconds(folder: Path, *, shared: bool) -> Figures:
    """Check that the files agree to 1 %, or to a few milliseconds of each version.

    Return the largest difference of each pair, as a share of the time.
    """
    rows = of_rows(folder)
    metrics = by_metrics(rows[1:])
    accounts, replica = by_accounts(folder, shared=shared)
    trace, drawn = by_trace(folder, shared=shared)
    most = max(0.01 * metrics["step"], 0.005 * len(rows))
    found: Figures = {}

    def compare(pair: str, name: str, one: float, other: float) -> None:
        found[pair] = max(found.get(pair, 0.0), abs(one - other) / metrics["step"])
        assert abs(one - other) <= most, (folder.name, pair, name, one, other)

    parts = {name for name in metrics if name != "rollouts live"}
    for name in parts:
        compare("metrics and trace", name, metrics[name], trace[name])
    parts.remove("rollouts idle")
    if shared:  # The replica draws while the trainer waits, or until it has paused.
        waits = {*GEN, "wait_rollouts", "wait_validation", "other"}
        parts -= {*waits, "trainer idle"}
        drawing = sum(value for name, value in accounts.items() if name not in {*parts, "step"})
        waiting = sum(metrics[name] for name in waits)
        compare("metrics and accounts", "the rollouts' turn", waiting, drawing)
    else:
        accounts["trainer idle"] = sum(accounts[name] for name in IDLE)
    for name in parts:
        compare("metrics and accounts", name, metrics[name], accounts[name])
    compare("accounts and trace", "generate", replica["generate"], drawn["generate"])
    return found
