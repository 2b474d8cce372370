"""Faults on real processes: a run trains while its parts are killed, stopped, cut off and damaged.

    python benchmarks/chaos.py --faults all --trials 2
    python benchmarks/chaos.py --faults replica,trainer --runtime ray
    python benchmarks/chaos.py --goodput --minutes 20

Each trial waits for a quiet run, makes one fault, proves that it fired, and waits until the run has
healed. At the end the run is stopped and every sample is accounted for. --goodput makes one fault a
minute, and compares the rate with a run of the same length without faults.

The command runs in its own network, mount and process namespaces (Linux, `unshare`). So a partition
and a full disk touch nothing else, and nothing outlives it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS
from chaos_run import HERE, Failed, Run
from chaos_tools import serving
from chaos_trial import Trial

from millrace.observe.sinks import read_rows

KEYS = [
    "sft.steps=100", "rollout.total_rollout_steps=100000000", "data.val_files=[]",
    "rollout.test_freq=0", "trainer.val_before_train=false", "rollout.n_gpus_per_node=2",
    "trainer.save_freq=5", "trainer.max_ckpt_to_keep=3", "actor.optim.lr_scheduler_type=constant", "trainer.threads=1",
    "report.enable=false",
]  # fmt: skip
OWN = {
    "quickstart": [
        f"reward.function={HERE / 'chaos_reward.py'}:compute_score",
        "reward.timeout_s=2",
        "reward.memory_mb=1024",
    ],
    "agents_quickstart": [f"agents.environment={HERE / 'chaos_environment.py'}:Chase"],
}
"""Further keys of each recipe."""
DISK = "256m"
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


def small_disk(here: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if here:
        return folder
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(folder)], check=True)
    return folder


def trial(run: Run, number: int, name: str, dice: random.Random) -> Trial:
    """Make one fault in a run that moves."""
    fault = FAULTS[name]
    t = Trial(number, name, fault.row)
    try:
        run.moves(2, 300)
        time.sleep(dice.uniform(0.0, 1.0))  # any moment of a version
        fault.act(run, t, dice)
    except Failed as error:
        t.error = str(error)
        run.explain()
    print(json.dumps(asdict(t)), flush=True)
    return t


def campaign(names: Sequence[str], options: argparse.Namespace) -> list[Trial]:
    """Make every fault `trials` times, in a drawn order. A failed trial ends its run only."""
    dice = random.Random(options.seed)
    plan = [name for name in names for _ in range(options.trials)]
    dice.shuffle(plan)
    # A crash loop takes a replica away, so it comes last.
    plan.sort(key=lambda name: (FAULTS[name].recipe, name == "replica in a crash loop"))
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
        if trials[-1].error or name == "replica in a crash loop":
            trials[-1].error += close(run)
            run = None
    if run is not None:
        trials[-1].error += close(run)
    return trials


def goodput(names: Sequence[str], options: argparse.Namespace) -> list[Trial]:
    """Print the samples per second of a quiet run and of one with a fault in each period."""
    dice = random.Random(options.seed)
    quiet, _ = measure([], dice, options, options.minutes / 4)
    rate, trials = measure(names, dice, options, options.minutes)
    failed = sum(bool(t.error) for t in trials)
    print(
        f"goodput: {rate:.1f} of {quiet:.1f} samples/s, {rate / quiet:.3f}, in {options.minutes:g} "
        f"minutes with {len(trials)} faults, {failed} failed"
    )
    return trials


def measure(
    names: Sequence[str], dice: random.Random, options: argparse.Namespace, minutes: float
) -> tuple[float, list[Trial]]:
    """Return the samples per second of a run, and its faults, one for each period."""
    trials: list[Trial] = []
    deck: list[str] = []
    run = new_run(options)
    run.moves(4, 300)
    begin, before = time.monotonic(), run.account().trained
    end = begin + 60 * minutes
    while time.monotonic() < end and (not trials or not trials[-1].error):
        due = begin + options.every * (len(trials) + 1)
        if not names or due > end:
            time.sleep(max(0.0, end - time.monotonic()))
            break
        time.sleep(max(0.0, due - time.monotonic()))
        deck = deck or dice.sample(names, len(names))
        trials.append(trial(run, len(trials) + 1, deck.pop(), dice))
    seconds, after = time.monotonic() - begin, run.account().trained
    wrong = close(run)
    if trials:
        trials[-1].error += wrong
    return (after - before) / seconds, trials


def new_run(options: argparse.Namespace, recipe: str = "quickstart") -> Run:
    keys = [*KEYS, *OWN[recipe], f"trainer.runtime={options.runtime}", *options.set]
    name = options.recipe if options.recipe and recipe == "quickstart" else recipe
    run = Run(small_disk(options.here), name, keys, options.tools)
    run.start()
    return run


def close(run: Run) -> str:
    """Stop a run, and account for its samples. Return what is wrong."""
    wrong = ""
    try:
        if run.alive:
            run.stop(signal.SIGTERM, 60)
            run.orphans(10)
        account = run.account()
        print(f"audit: {account}", flush=True)
        if account.lost or account.trained_twice:
            wrong = f" lost {account.lost}, trained twice {account.trained_twice}"
        rows = read_rows(run.folder, 10**9)[0].values()
        oldest = max((row.get("staleness/max", 0.0) for row in rows), default=0.0)
        print(f"staleness/max: {oldest:g}", flush=True)
    except Failed as error:
        wrong = f" {error}"
    run.remove()
    return wrong


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
    wanted = options.faults.split(",")
    names = [n for n in FAULTS if options.faults == "all" or any(w in n for w in wanted)]
    with serving() as options.tools:
        trials = (goodput if options.goodput else campaign)(names, options)
    del options.tools
    table(trials)
    if options.json:
        with options.json.open("a") as file:
            figures_of: dict[str, Any] = {"options": vars(options) | {"json": str(options.json)}}
            file.write(json.dumps(figures_of | {"trials": [asdict(t) for t in trials]}) + "\n")
    sys.exit(any(t.error for t in trials))


if __name__ == "__main__":
    main()
