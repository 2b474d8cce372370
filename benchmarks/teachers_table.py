"""Print when each arm of benchmarks/teachers.sh reached 95 % of its teacher's score.

    python benchmarks/teachers_table.py OUT [--best N KIND ...]

An arm has reached it at the first validation that has at least this score together with the next,
as a mean. Seconds are those of the versions up to there, without start and validations. `--best`
prints the N arms of these kinds that were first: names that teachers.sh takes.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

SHARE = 0.95


class Arm(NamedTuple):
    name: str
    """KIND:PROMPTSxN:LR:SCHEDULER:SEED"""
    seconds: float
    """Infinite if the score was not reached."""
    steps: int
    best: float
    first: float
    per_version: float


def scores(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the version and the score of each validation: the mean over tasks of mean@n."""
    found = []
    for row in rows:
        tasks = [
            v
            for k, v in row.items()
            if k.startswith("val/") and k.count("/") == 2 and "/mean@" in k
        ]
        if tasks:
            found.append((int(row["version"]), mean(tasks)))
    return found


def arm_of(path: Path, teacher: float) -> Arm:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    step_s = {int(r["version"]): r["timing_s/step"] for r in rows if "timing_s/step" in r}
    validations = scores(rows)
    version = next(
        (
            v
            for (v, a), (_, b) in itertools.pairwise(validations)
            if min(a, (a + b) / 2) >= SHARE * teacher
        ),
        None,
    )
    return Arm(
        name=path.name.removesuffix(".metrics.jsonl"),
        seconds=float("inf")
        if version is None
        else sum(s for v, s in step_s.items() if v < version),
        steps=2 * (version or 0),
        best=max(score for _, score in validations),
        first=validations[0][1],
        per_version=sorted(step_s.values())[len(step_s) // 2],
    )


def main(out: str, *choice: str) -> None:
    folder = Path(out)
    teacher = scores(
        [json.loads(x) for x in (folder / "teacher.metrics.jsonl").read_text().splitlines()]
    )[-1][1]
    arms = [arm_of(p, teacher) for p in sorted(folder.glob("*:*.metrics.jsonl"))]
    if choice:
        kinds = choice[2:]
        chosen = sorted(a for a in arms if a.name.split(":")[0] in kinds)
        first = sorted(chosen, key=lambda a: (a.seconds, -a.best))[: int(choice[1])]
        print(*(a.name for a in first))
        return
    print(f"teacher {teacher:.3f}, {SHARE:.0%} {SHARE * teacher:.3f}")
    for arm in arms:
        print(
            f"{arm.name:32} first {arm.first:.3f} best {arm.best:.3f} s/version {arm.per_version:.3f} "
            f"to {SHARE:.0%}: {arm.seconds:.1f} s, {arm.steps} steps"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
