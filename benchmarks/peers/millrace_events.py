"""Add a run of millrace to the events of its arm: the begin, each version, the held-out scores.

    python millrace_events.py RUN EVENTS

Seconds of a version are those of its step without validation.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

MEAN = re.compile(r"val/.*/mean@\d+")


def events(start: float, seconds: float, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a run whose command began at `start` and needed `seconds` to begin."""
    t, done = start + seconds, 0
    found = [{"event": "begin", "t": t}]
    for row in rows:
        if "reward/mean" in row:
            validation = row.get("timing_s/validate", 0.0) + row.get(
                "timing_s/wait_validation", 0.0
            )
            t += row["timing_s/step"] - validation
            steps = int(row["train/optimizer_steps"])
            done += steps
            responses = sum(v for k, v in row.items() if k.startswith("staleness/hist/"))
            step = {"step": done, "steps": steps, "reward": row["reward/mean"]}
            tokens = round(responses * row["response_length/mean"])
            found.append({"event": "step", "t": t, **step, "tokens": tokens})
        if held_out := {k: v for k, v in row.items() if MEAN.fullmatch(k)}:
            found.append({"event": "val", "values": held_out})
    return found


def main(run: str, file: str) -> None:
    start = json.loads(Path(file).read_text().splitlines()[0])["t"]
    if not (started := Path(run, "start.jsonl")).exists():
        return  # it ended during its start
    seconds = json.loads(started.read_text().splitlines()[0])["seconds"]
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    with Path(file).open("a") as out:
        out.writelines(json.dumps(event) + "\n" for event in events(start, seconds, rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
