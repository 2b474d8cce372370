"""The table of benchmarks/results/real.md: the gain of `make real` over seeds.

    python benchmarks/real.py RUN.json [RUN.json ...]

A RUN.json is the last line that `make real ARGS=--json` prints. The interval is conservative: it
takes the answers to one problem as one answer, and the two validations as independent.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

PROBLEMS = 128
"""Held-out products of the recipe."""


def main(files: list[str]) -> None:
    print("| run | before | after | gain | 95 % interval | RL s |\n|---|--:|--:|--:|---|--:|")
    for file in files:
        run = json.loads(Path(file).read_text().splitlines()[-1])
        name = next(n for n in run["val"] if n.startswith("val/products/mean@"))
        before, after = run["val_before"][name], run["val"][name]
        spread = sum(p * (1 - p) for p in (before, after)) / PROBLEMS
        gain, half = after - before, 1.96 * math.sqrt(spread)
        print(
            f"| {Path(file).stem} | {before:.3f} | {after:.3f} | {gain:+.3f} "
            f"| {gain - half:+.3f} to {gain + half:+.3f} | {run['train_seconds']:.0f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
