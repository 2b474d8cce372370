"""The table of arms, from their events: `python table.py MACHINE/ARM.jsonl ...`.

A file's folder names its machine. Runs of the same arm and task are one row: the mean, and least
to greatest. Seconds begin with the first step. A reward is reached if the mean of eight optimizer
steps reaches it. The last reward is the mean of the last quarter of the steps: an arm has its own
order of problems, and eight steps of `sums` differ by 0.017 (standard deviation) for it alone. The
ratio is that of RL seconds to the mean of millrace:async_partial on the same machine and task. A
run without all its steps has no RL seconds. A start with compiled code has no seconds of a start.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEVELS = (0.3, 0.4, 0.5)
WINDOW = 8
YARDSTICK = "millrace:async_partial"


@dataclass
class Arm:
    name: str
    task: str
    machine: str
    start_s: float | None = None
    rl_s: float | None = None
    reached_s: tuple[float | None, ...] = (None,) * len(LEVELS)
    held_out: float | None = None
    reward: float | None = None
    tokens_per_s: float | None = None
    whole: bool = False
    """All steps were done."""
    fault: str = ""
    """The end of a run that was cut off or failed."""


def read(file: Path) -> Arm:
    events = [json.loads(line) for line in file.read_text().splitlines()]
    one = {event["event"]: event for event in events}
    start, steps = one["start"], [event for event in events if event["event"] == "step"]
    arm = Arm(start["arm"], start["task"], file.resolve().parent.name)
    done, code = steps[-1]["step"] if steps else 0, one.get("end", {}).get("code")
    arm.whole = done >= start["steps"]
    if code != 0 or not arm.whole:
        verb = {0: "ended", 124: "cut off"}.get(code, "failed")
        arm.fault = f"{verb} after {done} of {start['steps']} steps"
    if "val" in one:
        arm.held_out = statistics.fmean(one["val"]["values"].values())
    if "begin" in one and not start["warm"]:
        arm.start_s = one["begin"]["t"] - start["t"]
    if steps:
        begin = one["begin"]["t"]
        arm.rl_s = steps[-1]["t"] - begin
        arm.tokens_per_s = sum(step["tokens"] for step in steps) / arm.rl_s
        curve = list(smooth(steps))
        rewards = [step["reward"] for step in steps for _ in range(step["steps"])]
        arm.reward = statistics.fmean(rewards[-max(start["steps"] // 4, 1) :])
        arm.reached_s = tuple(
            next((t - begin for t, reward in curve if reward >= level), None) for level in LEVELS
        )
    return arm


def smooth(steps: list[dict[str, Any]]) -> Iterable[tuple[float, float]]:
    """Return (time, mean reward of the last `WINDOW` optimizer steps), once there are so many."""
    recent: list[float] = []
    for step in steps:
        recent = [*recent, *[step["reward"]] * step["steps"]][-WINDOW:]
        if len(recent) == WINDOW:
            yield step["t"], statistics.fmean(recent)


def table(arms: list[Arm]) -> str:
    machines = {(arm.machine, arm.task) for arm in arms}
    yardsticks = {
        place: [
            arm.rl_s
            for arm in arms
            if (arm.machine, arm.task, arm.name) == (*place, YARDSTICK) and arm.rl_s and arm.whole
        ]
        for place in machines
    }
    lines = [
        "| arm | task | machine | start s | RL s | s to 0.3 | 0.4 | 0.5 | held-out | last reward "
        "| tokens/s | ratio |",
        "|---|---|---|" + "--:|" * 9,
    ]
    for name, task in dict.fromkeys((arm.name, arm.task) for arm in arms):
        runs = [arm for arm in arms if (arm.name, arm.task) == (name, task)]
        ratios = [
            arm.rl_s / statistics.fmean(known)
            for arm in runs
            if arm.rl_s and arm.whole and (known := yardsticks[arm.machine, task])
        ]
        cells = [
            spread([arm.start_s for arm in runs], 1),
            spread([arm.rl_s for arm in runs if arm.whole], 1),
            *(spread([arm.reached_s[i] for arm in runs], 1) for i in range(len(LEVELS))),
            spread([arm.held_out for arm in runs], 3),
            spread([arm.reward for arm in runs if arm.whole], 3),
            spread([arm.tokens_per_s for arm in runs], 0),
            spread(ratios, 2),
        ]
        faults = "; ".join(f"{arm.fault}, {arm.rl_s or 0:.1f} s" for arm in runs if arm.fault)
        where = ", ".join(dict.fromkeys(arm.machine for arm in runs))
        label = f"{name} ({faults})" if faults else name
        lines.append(f"| {label} | {task} | {where} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Iterable[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    middle = f"{statistics.fmean(known):.{digits}f}"
    if len(known) == 1:
        return middle
    return f"{middle} ({min(known):.{digits}f} to {max(known):.{digits}f})"


if __name__ == "__main__":
    print(table([read(Path(file)) for file in sys.argv[1:]]))
