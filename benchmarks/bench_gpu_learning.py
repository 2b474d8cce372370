r"""Reward over wall-clock time, synchronous and asynchronous, with the same number of samples.

The model has 122 M parameters, and the problems are a mix of reasoning-gym tasks.

    python benchmarks/reasoning_mix.py                       # the problems, needs reasoning-gym
    python benchmarks/bench_gpu_learning.py [key=value ...]  # on two GPUs
    python benchmarks/bench_gpu_learning.py \
        --summarise benchmarks/results/gpu_learning.jsonl --plot docs/gpu_learning.svg

It warms up one model, or takes the one of `--model FOLDER`. All RL runs start from its weights.

| arm | mode | GPUs |
|---|---|---|
| sync | colocate_sync | all roll out and all train, in turns |
| async | async_partial | one half trains, the other half rolls out |
| pipeline (not a default) | on_policy_pipeline | one half trains, the other half rolls out |

The engines of both placements start once, make a few versions that do not count (kernels compile),
and stay on the GPUs. The modes take turns, seed by seed, so that other work on the host affects all
of them alike. Overrides apply to the warm-up and to every run.

`--budget-s` starts no run that would end too late. The longest run of its mode so far gives the
estimate. `--run-timeout-s` ends everything if a run hangs.

It writes PATH.jsonl with a line for each run as soon as the run ends. A line has the validation
reward before and after. For each version, it has the seconds since RL began and the training
reward. `--summarise` makes tables and plot from that file, on any machine. Seeds may come from
several processes (`--first-seed`). The text of a line {"note": TEXT} appears above the tables.

A small version of everything takes about four minutes on two cores:

    python benchmarks/reasoning_mix.py --rows 2000 --held-out 16 --folder build/small
    python benchmarks/bench_gpu_learning.py --gpus 0 --seeds 2 --write build/small/learning \
        --folder build/small data.train_files=[build/small/train.jsonl] \
        data.val_files=[build/small/val.jsonl] sft.steps=80 sft.batch_size=64 sft.lr=4e-3 \
        model.shape.hidden_size=64 model.shape.num_hidden_layers=2 \
        model.shape.num_attention_heads=2 model.shape.num_key_value_heads=1 \
        model.shape.intermediate_size=192 rollout.total_rollout_steps=512 actor.optim.lr=4e-4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from command import ROOT, millrace
from gpu_learning_summary import MODES, Run, held_out, summarise
from rich.console import Console

from millrace.config import recipe
from millrace.observe.progress import Progress, make_view
from millrace.run.folder import open_run_dir
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.train import Outcome, run_training
from millrace.schedule.ledger import Ledger

RECIPE = "gpu_reasoning"
ON_CPU = ["trainer.device=cpu", "rollout.engine=torch", "model.dtype=float32"]
MEASURED = [  # a run writes only its figures, and no validation interrupts it
    "sft.steps=0",
    "data.train_max_samples=8192",  # rows are shuffled; reading all of them takes longer
    "rollout.test_freq=0",
    "trainer.save_freq=0",
    "trainer.save_last=false",
    "trainer.logger=[]",
]
SHARES = (
    "wait_samples",
    "wait_prev_gen",
    "wait_rollouts",
    "train",
    "switch",
    "sync_transfer",
    "sync_activate",
    "other",
)
REHEARSED = 3
"""Windows of a mode's first run, which does not count."""


def warm_up(options: argparse.Namespace) -> Run:
    """Run `millrace sft` on all GPUs. Return its result, with the folder of the start model."""
    folder = options.folder / "sft"
    shutil.rmtree(folder, ignore_errors=True)
    ranks = [f"trainer.n_gpus_per_node={options.gpus}"] if options.gpus else ON_CPU
    arguments = [
        "mode=colocate_sync",
        *ranks,
        f"trainer.run_dir={folder}",
        *options.overrides,
    ]  # rollouts need no GPU
    return millrace("sft", str(RECIPE), *arguments, env={"HF_HUB_OFFLINE": "1"})


class Arms:
    """The engines of the modes. They start when a mode first needs their placement."""

    def __init__(
        self, stack: AsyncExitStack, progress: Progress, model: Path, options: argparse.Namespace
    ) -> None:
        self.stack, self.progress, self.model, self.options = stack, progress, model, options
        self.sessions: dict[bool, Session] = {}

    def overrides(self, mode: str, seed: int) -> list[str]:
        each = self.options.gpus if mode == "sync" else self.options.gpus // 2
        devices = (
            [f"trainer.n_gpus_per_node={each}", f"rollout.n_gpus_per_node={each}"]
            if each
            else ON_CPU
        )
        own = [f"mode={MODES[mode]}", f"trainer.seed={seed}", f"model.path={self.model}"]
        return [*own, *devices, *MEASURED]

    def new_folder(self, name: str) -> Path:
        folder: Path = self.options.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    async def session(self, mode: str) -> Session:
        """Return engines with the start weights and new optimizers."""
        colocated = mode == "sync"
        if colocated not in self.sessions:
            folder = self.new_folder(f"engines-{mode}")
            config = recipe.load(
                RECIPE,
                self.options.overrides,
                [*self.overrides(mode, 0), f"trainer.run_dir={folder}"],
            )
            s = self.sessions[colocated] = await self.stack.enter_async_context(
                open_session(config, self.progress)
            )
            await s.engines.train.begin("rl", 1)
            (folder / "start").mkdir()
            await s.engines.train.save(str(folder / "start"))
        return self.sessions[colocated]

    async def run(
        self, mode: str, seed: int, name: str, *overrides: str
    ) -> tuple[Session, Outcome]:
        """Run once from the start weights."""
        s = await self.session(mode)
        start = s.run.path / "start"
        folder = self.new_folder(f"{mode}-{name}")
        config = recipe.load(
            RECIPE,
            self.options.overrides,
            [*self.overrides(mode, seed), *overrides, f"trainer.run_dir={folder}"],
        )
        problems = replace(s.problems, train=replace(s.problems.train, seed=seed))
        run = open_run_dir(config)
        run.model.symlink_to(s.run.model.resolve())
        own = replace(s, config=config, run=run, problems=problems)
        derived = config.derived(len(problems.train))
        await s.engines.turns.enter()
        await s.engines.train.begin("rl", derived.lr_horizon)
        await s.engines.train.load(str(start))
        return own, await run_training(own, Ledger(config.schedule, derived.samples), StopRequest())


def figures(outcome: Outcome, rows: list[dict[str, Any]]) -> Run:
    """Return the figures of a run.

    These are its result, and for each version the seconds since RL began, samples and training
    reward.
    """
    assert outcome.first is not None and outcome.last is not None
    trained = [row for row in rows if "reward/mean" in row]
    seconds = [row["perf/time_per_version"] for row in trained]
    # The first row may include time before the first rollout. The end is the same moment in both.
    ends = [outcome.train_seconds - sum(seconds) + at for at in accumulate(seconds)]
    samples = accumulate(row["train/samples"] for row in trained)
    rewards = [row["reward/mean"] for row in trained]
    parts = {
        name: sum(row.get(f"timing_s/{name}", 0.0) for row in trained) / sum(seconds)
        for name in SHARES
    }

    def mean(name: str) -> float:
        return round(statistics.mean(row[name] for row in trained if row.get(name) is not None), 4)

    return {
        "samples": outcome.samples_trained,
        "versions": outcome.versions,
        "rl_seconds": round(outcome.train_seconds, 2),
        "val_before": kept(outcome.first.values),
        "val": kept(outcome.last.values),
        "staleness": mean("staleness/mean"),
        "idle_trainer": mean("trainer/idle_ratio"),
        "idle_rollouter": mean("rollouter/idle_ratio"),
        "response_length": mean("response_length/mean"),
        "entropy_end": trained[-1]["actor/entropy"],
        "shares": {name: round(share, 4) for name, share in parts.items()},
        "alarms": sorted(
            {
                name
                for row in trained
                for name, value in row.items()
                if name.startswith("alarm/") and value
            }
        ),
        "curve": [
            [round(s, 2), int(n), round(r, 4)]
            for s, n, r in zip(ends, samples, rewards, strict=True)
        ],
    }


def kept(values: dict[str, float]) -> dict[str, float]:
    return {
        name: round(value, 4)
        for name, value in values.items()
        if name.endswith("/greedy") or "/mean@" in name
    }


async def measure(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    output = options.write.with_suffix(".jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("")

    def write(found: Run) -> None:
        with output.open("a") as file:
            file.write(json.dumps(found) + "\n")
        shown = {
            name: value
            for name, value in found.items()
            if name not in ("curve", "val_before", "val", "shares")
        }
        if "val" in found:
            shown |= {
                name: round(held_out(found[name], "mean@"), 3) for name in ("val_before", "val")
            }
        say(f"{time.perf_counter() - begin:.0f} s: {shown}")

    model = options.model
    if model is None:
        warm = warm_up(options)
        model = Path(warm["model"])
        write({"warm_up": {name: warm[name] for name in ("steps", "seconds", "loss")}})
    with Progress(make_view(Console(stderr=True)), "gpu_learning", "bench") as progress:
        async with AsyncExitStack() as stack:
            arms = Arms(stack, progress, model.resolve(), options)
            for mode in options.modes:
                start = time.perf_counter()
                window = (await arms.session(mode)).config.schedule.window
                ready = time.perf_counter()
                few = [
                    f"rollout.total_rollout_steps={REHEARSED * window}",
                    "trainer.val_before_train=false",
                ]
                await arms.run(mode, options.first_seed + options.seeds, "rehearsal", *few)
                seconds = {
                    "start_seconds": round(ready - start, 1),
                    "rehearsal_seconds": round(time.perf_counter() - ready, 1),
                }
                write({"engines_of": mode} | seconds)
            longest = dict.fromkeys(MODES, 0.0)
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            turns = [
                (seed, mode)
                for seed in seeds
                for mode in options.modes[:: 1 if seed % 2 == 0 else -1]
            ]
            for seed, mode in turns:
                start = time.perf_counter()
                if options.budget_s and start - begin + longest[mode] > options.budget_s:
                    say(f"not started, {start - begin:.0f} s are spent: {mode}, seed {seed}")
                    continue
                async with asyncio.timeout(options.run_timeout_s):
                    own, outcome = await arms.run(mode, seed, str(seed))
                rows = [
                    json.loads(line)
                    for line in (own.run.path / "metrics.jsonl").read_text().splitlines()
                ]
                seconds_in_all = time.perf_counter() - start
                longest[mode] = max(longest[mode], seconds_in_all)
                labels = {
                    "mode": mode,
                    "seed": seed,
                    "gpus": options.gpus,
                    "seconds_in_all": round(seconds_in_all, 1),
                }
                write(labels | figures(outcome, rows))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="key=value, for the warm-up and every run")
    parser.add_argument("--gpus", type=int, default=2, help="an even number; 0 is the CPU")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sync", "async"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="the first seed, to run seeds in parallel"
    )
    parser.add_argument("--model", type=Path, help="a warmed-up model: no warm-up")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "gpu_learning",
        help="of the warm-up and the runs",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=0,
        help="seconds from the start after which no run should end; 0 sets no limit",
    )
    parser.add_argument("--run-timeout-s", type=float, help="seconds that one run may take")
    parser.add_argument(
        "--write",
        type=Path,
        default=ROOT / "benchmarks" / "results" / "gpu_learning",
        help="write PATH.jsonl",
    )
    parser.add_argument(
        "--summarise", type=Path, help="run nothing: make PATH.md of an earlier PATH.jsonl"
    )
    parser.add_argument(
        "--plot", type=Path, help="with --summarise: plot the curves as SVG, PNG or PDF"
    )
    options = parser.parse_args()
    if options.gpus % 2:
        parser.error(f"--gpus {options.gpus} must be even: half of them train")
    if options.summarise:
        summarise(options)
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
