"""Compares predicted and measured samples/s of finished runs.

    python benchmarks/plan_check.py --calibrate RUN,RUN --predict RUN,RUN [--out FILE.jsonl]

The costs come from the first runs alone. Each run of the second list is then simulated with its own
configuration. Its measured rate is over the versions in which the pipeline neither fills nor drains.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from millrace.extras.plan.fit import WALL, calibrate, machine_here, read, steady
from millrace.extras.plan.search import Search
from millrace.extras.plan.simulation import simulate
from millrace.persist.run_reader import RunReader


def measured(run: RunReader) -> float:
    """Return samples per second."""
    rows = steady(run)
    return sum(r["train/samples"] for r in rows) / sum(r[WALL] for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibrate", required=True, help="folders, separated by commas")
    parser.add_argument("--predict", required=True, help="folders, separated by commas")
    parser.add_argument(
        "--gib", type=int, default=0, help="memory of a device of these runs; 0: not checked"
    )
    parser.add_argument("--out", type=Path, help="add the rows to this file as JSON lines")
    options = parser.parse_args()
    runs = [read(Path(p)) for p in options.calibrate.split(",")]
    costs = calibrate(runs, machine_here()[0], options.gib << 30)
    for name, term in costs.shares().items():
        print(f"{name}: {term.held_out:.0%} of {term.points} held-out versions in the interval")
    print("\n| run | measured samples/s | predicted | interval | error | inside |")
    print("|---|--:|--:|--:|--:|---|")
    for folder in map(Path, options.predict.split(",")):
        run = RunReader(folder).read()
        assert run.config is not None
        search = Search(str(folder / "config.yaml"), [], costs, 1)
        rates = []
        for end in (0, 1, -1):
            case, *_ = search.case_of((), end)
            rates.append(run.config.schedule.window / simulate(case).seconds)
        middle, low, high = rates
        actual = measured(run)
        row = {
            "run": folder.name, "mode": run.mode, "measured": actual, "predicted": middle,
            "low": low, "high": high, "error": middle / actual - 1, "inside": low <= actual <= high,
            "calibrated_on": costs.runs,
        }  # fmt: skip
        inside = "yes" if row["inside"] else "no"
        print(
            f"| {folder.name} | {actual:.0f} | {middle:.0f} | {low:.0f} to {high:.0f} "
            f"| {row['error']:+.0%} | {inside} |"
        )
        if options.out:
            with options.out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
