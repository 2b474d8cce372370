"""The runs of a campaign, and the two that last: goodput, and learning."""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from chaos_faults import FAULTS
from chaos_run import HERE, Failed, Run
from chaos_trial import Trial

from millrace.config import recipe
from millrace.persist.run_reader import RunReader

KEYS = [
    "sft.steps=100", "rollout.total_rollout_steps=100000000", "data.val_files=[]",
    "rollout.test_freq=0", "trainer.val_before_train=false", "rollout.n_gpus_per_node=2",
    "trainer.save_freq=5", "trainer.max_ckpt_to_keep=3", "actor.optim.lr_scheduler_type=constant", "trainer.threads=1",
    "report.enable=false", "report.trace_mb=64", "report.samples_mb=64",
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
DISK, LARGE_DISK = "256m", "4g"
"""A small disk is filled in no time. Twenty minutes write more than it holds."""
BLOCKS = 4
"""How many blocks of faults --goodput has. A quiet period is before, between and after them."""
LEARNING = ["rollout.n_gpus_per_node=2", "trainer.save_freq=5", "trainer.threads=1"]
"""Keys of --learn."""


def own_disk(here: bool, size: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if here:
        return folder
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(folder)], check=True)
    return folder


def new_run(options: argparse.Namespace, kind: str = "quickstart", size: str = DISK) -> Run:
    keys = [*KEYS, *OWN[kind], f"trainer.runtime={options.runtime}", *options.set]
    name = options.recipe if options.recipe and kind == "quickstart" else kind
    run = Run(own_disk(options.here, size), name, keys, options.tools)
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
        rows = RunReader(run.folder).read().rows.values()
        oldest = max((row.get("staleness/max", 0.0) for row in rows), default=0.0)
        bound = recipe.load(str(run.folder / "config.yaml"), []).schedule.lag_bound
        print(f"staleness/max: {oldest:g}, bound {bound}", flush=True)
        if oldest > bound:
            wrong += f" staleness {oldest:g} is over {bound}"
    except Failed as error:
        wrong = f" {error}"
    run.remove()
    return wrong


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


def goodput(names: Sequence[str], options: argparse.Namespace) -> list[Trial]:
    """Make a fault in each period of one run, and print what it costs.

    The rate without faults is that of quiet periods of the same run, before, between and after the
    faults. So other work on the machine slows both down.
    """
    dice = random.Random(options.seed)
    deck: list[str] = []
    trials: list[Trial] = []
    periods = round(60 * options.minutes / options.every)
    run = new_run(options, size=LARGE_DISK)
    run.moves(4, 300)
    calm, busy = [span(run, options.every)], list[Span]()
    for number in range(1, periods + 1):
        begin, before = time.monotonic(), run.trained()
        deck = deck or dice.sample(names, len(names))
        trials.append(trial(run, number, deck.pop(), dice))
        time.sleep(max(0.0, begin + options.every - time.monotonic()))
        busy.append(Span(run.trained() - before, time.monotonic() - begin))
        print(json.dumps({"period": number, **busy[-1]._asdict()}), flush=True)
        if trials[-1].error:
            break
        if number * BLOCKS % periods < BLOCKS:
            calm.append(span(run, options.every))
    trials[-1].error += close(run)
    quiet = rate(calm)
    print(f"without faults: {[round(rate([s]), 1) for s in calm]} samples/s")
    for t, s in zip(trials, busy, strict=True):
        print(f"{t.name}: {s.seconds * (1 - rate([s]) / quiet):.1f} s lost")
    print(
        f"goodput: {rate(busy):.1f} of {quiet:.1f} samples/s, {rate(busy) / quiet:.3f}, with "
        f"{len(trials)} faults in {options.minutes:g} minutes"
    )
    return trials


class Span(NamedTuple):
    """A part of a run."""

    trained: int
    seconds: float


def span(run: Run, seconds: float) -> Span:
    """Let a run train without faults."""
    begin, before = time.monotonic(), run.trained()
    time.sleep(seconds)
    if not run.alive:
        raise Failed(f"the run ended: {run.tail()}")
    return Span(run.trained() - before, time.monotonic() - begin)


def rate(spans: Sequence[Span]) -> float:
    """Return samples per second."""
    return sum(s.trained for s in spans) / sum(s.seconds for s in spans)


def learn(names: Sequence[str], options: argparse.Namespace) -> list[Trial]:
    """Train whole runs of every seed, with each fault in turn and without faults."""
    trials: list[Trial] = []
    ends: dict[bool, list[float]] = {False: [], True: []}
    for faulty in (True, False):
        for seed in range(options.seeds):
            dice = random.Random(seed)
            keys = [*LEARNING, f"trainer.seed={seed}", f"trainer.runtime={options.runtime}"]
            name = options.recipe or "quickstart"
            disk = own_disk(options.here, LARGE_DISK)
            run = Run(disk, name, [*keys, *options.set], options.tools)
            run.start()
            run.moves(5, 300)
            for fault in names if faulty else ():
                trials.append(trial(run, len(trials) + 1, fault, dice))
            ends[faulty].append(end_of(run))
            trials[-1].error += close(run)
            print(f"seed {seed}, faults: {faulty}, mean@1 {ends[faulty][-1]:.3f}", flush=True)
    calm, hurt = ends[False], ends[True]
    print(
        f"without faults {min(calm):.3f} to {max(calm):.3f}, with {min(hurt):.3f} to {max(hurt):.3f}"
    )
    return trials


def end_of(run: Run) -> float:
    """Wait for the end of a whole run. Return its last score on held-out problems."""
    assert run.driver is not None
    if run.driver.wait(600) or not run.account().complete:
        raise Failed(f"the run did not complete: {run.tail()}")
    scores = RunReader(run.folder).read().validations
    return next(v for k, v in scores[max(scores)].items() if k.endswith("/mean@1"))
