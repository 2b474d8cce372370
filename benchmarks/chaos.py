"""Faults on real processes: a run trains while its parts are killed, stopped, cut off and damaged.

    python benchmarks/chaos.py --faults all --trials 2
    python benchmarks/chaos.py --faults replica,trainer --runtime ray
    python benchmarks/chaos.py --goodput --minutes 20
    python benchmarks/chaos.py --learn --faults "replica killed,trainer killed,driver killed"

Each trial waits for a quiet run, makes one fault, proves that it fired, and waits until the run has
healed. At the end the run is stopped and every sample is accounted for.

A crash loop takes a replica away for good, so --goodput and --learn leave it out.

| option | what it does |
|---|---|
| `--goodput` | makes one fault a minute, and compares the rate with that of quiet minutes between |
| `--learn` | compares the final rewards of whole runs, with every fault and without faults |

The command runs in its own network, mount and process namespaces (Linux, `unshare`). So a partition
and a full disk touch nothing else, and nothing outlives it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS
from chaos_long import close, goodput, learn, new_run, trial
from chaos_run import Run
from chaos_tools import serving
from chaos_trial import Trial

LOOP = "replica in a crash loop"
_INSIDE = "CHAOS_INSIDE"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default="all", help="parts of names, with commas, or all")
    parser.add_argument("--trials", type=int, default=1, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--recipe", help="in place of quickstart")
    parser.add_argument("--here", action="store_true", help="use no namespaces and no small disk")
    parser.add_argument("--set", nargs="*", default=[], help="further keys of the run")
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--seeds", type=int, default=3, help="of --learn")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=60, help="seconds between faults")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    return parser.parse_args()


def isolated() -> None:
    """Go on in namespaces of our own, and mount a small disk."""
    if _INSIDE not in os.environ:
        spaces = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--mount-proc"]
        command = ["unshare", *spaces, "--fork", "--kill-child", sys.executable]
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", [*command, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def campaign(names: Sequence[str], options: argparse.Namespace) -> list[Trial]:
    """Make every fault `trials` times, in a drawn order. A failed trial ends its run only."""
    dice = random.Random(options.seed)
    plan = [name for name in names for _ in range(options.trials)]
    dice.shuffle(plan)
    # A crash loop takes a replica away, so it comes last.
    plan.sort(key=lambda name: (FAULTS[name].recipe, name == LOOP))
    trials: list[Trial] = []
    run: Run | None = None
    kind = ""
    for number, name in enumerate(plan, start=1):
        if run is not None and kind != FAULTS[name].recipe:
            trials[-1].error += close(run)
            run = None
        kind = FAULTS[name].recipe
        run = run or new_run(options, kind)
        trials.append(trial(run, number, name, dice))
        if trials[-1].error or name == LOOP:
            trials[-1].error += close(run)
            run = None
    if run is not None:
        trials[-1].error += close(run)
    return trials


def table(trials: Sequence[Trial]) -> None:
    print("\n| fault | row | fired | failed | seen, median s (most) | healed, median s (most) |")
    print("|---|---|--:|--:|--:|--:|")
    for name in FAULTS:
        own = [t for t in trials if t.name == name]
        if own:
            seen, healed = (
                figures([t.seen_s for t in own]), figures([t.healed_s for t in own])
            )  # fmt: skip
            fired = sum(bool(t.proof) for t in own)
            failed = sum(bool(t.error) for t in own)
            print(f"| {name} | {FAULTS[name].row} | {fired} | {failed} | {seen} | {healed} |")
    fired, failed = sum(bool(t.proof) for t in trials), sum(bool(t.error) for t in trials)
    print(f"\n{fired} faults fired in {len(trials)} trials, {failed} failed.")


def figures(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{statistics.median(known):.1f} ({max(known):.1f})" if known else ""


def main() -> None:
    options = arguments()
    if not options.here:
        isolated()
    if "vllm" in (options.recipe or ""):
        Run.patience = 4  # On a CPU, its engines take half a minute to start.
    wanted = options.faults.split(",")
    names = [n for n in FAULTS if options.faults == "all" or any(w in n for w in wanted)]
    with serving() as options.tools:
        if options.goodput or options.learn:
            names = [name for name in names if name != LOOP]
        kind = goodput if options.goodput else learn if options.learn else campaign
        trials = kind(names, options)
    del options.tools
    table(trials)
    if options.json:
        with options.json.open("a") as file:
            figures_of: dict[str, Any] = {"options": vars(options) | {"json": str(options.json)}}
            file.write(json.dumps(figures_of | {"trials": [asdict(t) for t in trials]}) + "\n")
    sys.exit(any(t.error for t in trials))


if __name__ == "__main__":
    main()
