"""Follow the advice of a run, and compare the gain with the prediction.

    python benchmarks/advice_case.py [--out DIR] [--steps 2] [--turns 1] [--limit-s 500]
        [--samples 640] [--recipe NAME] [key=value ...]

The default case needs two GPUs and vLLM: 1.5B with random weights, one trainer and one engine of
256 decode slots, windows of 32 x 8, log-normal lengths (median 250, sigma 0.8, cut at 1,024),
staleness 2. There, trainer and engine idle at the same time.

All runs use the same engines. A short run warms them up. The first run has the overrides above.
Each further run also has those of the first advice that needs no other engines. `--turns 2` then
does the same runs once more, so that a slow change of the machine does not look like a gain. No
further run starts if it would end after `--limit-s` seconds. DIR/advice_case.json has the figures,
also of the runs before a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.config import recipe
from millrace.extras.bench import modes
from millrace.observe.progress import Lines, Progress
from millrace.persist.run_reader import RunReader
from millrace.report.advice import Advice, advise
from millrace.run.folder import open_run_dir
from millrace.run.session import Session, open_session

CASE = [
    "rollout.max_num_seqs=256",
    "async_training.staleness_threshold=2",
    "trainer.n_gpus_per_node=1",
    "rollout.n_gpus_per_node=1",
]
"""The default case, on the recipe shapes/qwen2_1.5b."""
ASYNC = ["mode=async_partial"]
OF_SCHEDULE = ("async_training.", "mode=async_")
"""How overrides begin that the engines do not know."""
SKIP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/advice")))
    parser.add_argument("--steps", type=int, default=2, help="runs that follow advice")
    parser.add_argument("--turns", type=int, default=1, help="times that all runs are done")
    parser.add_argument("--limit-s", type=float, default=500.0)
    parser.add_argument("--samples", type=int, default=640, help="samples of each run")
    parser.add_argument("--recipe", default="shapes/qwen2_1.5b")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"runs": []}
    overrides = [
        *ASYNC,
        *(CASE if options.recipe.startswith("shapes/") else ()),
        *options.overrides,
    ]
    asyncio.run(follow(options, overrides, result))
    print(table(result["runs"], "measured"))


async def follow(options: argparse.Namespace, overrides: list[str], result: dict[str, Any]) -> None:
    """Run the case and what its advice says. Write the figures after each run."""
    begin = time.monotonic()
    folder = options.out / f"runs-{int(time.time())}"
    progress = Progress(Lines(Console(stderr=True)), "advice_case", "bench")
    fixed = [*modes.QUIET, f"trainer.run_dir={folder / 'engines'}"]
    async with open_session(recipe.load(options.recipe, overrides, fixed), progress) as s:
        result["started_s"] = time.monotonic() - begin
        window = s.config.schedule.window
        warm = s.config.schedule.capacity + 5 * window
        await one(s, options.recipe, overrides, folder / "warm", warm)
        plan = [overrides]
        followed: list[dict[str, Any] | None] = []
        for turn, step in itertools.product(range(options.turns), range(options.steps + 1)):
            if step == len(plan):
                continue
            since = time.monotonic()
            name = folder / f"run-{turn}-{step}"
            run = await one(s, options.recipe, plan[step], name, options.samples)
            run["took_s"] = time.monotonic() - since
            if turn == 0:
                chosen = same_engines(run["all_advice"])
                followed.append(chosen)
                if chosen is not None and step < options.steps:
                    plan.append([*plan[step], *chosen["overrides"]])
            run |= {"overrides": plan[step], "step": step, "followed": followed[step]}
            result["runs"].append(run)
            result["seconds"] = time.monotonic() - begin
            (options.out / "advice_case.json").write_text(json.dumps(result, indent=1) + "\n")
            progress.note(
                f"turn {turn}, run {step}: {run['samples_per_s']:.2f} samples/s; {run['advice'][0]}"
            )
            if result["seconds"] + 1.2 * run["took_s"] > options.limit_s:
                return


async def one(
    s: Session, name: str, overrides: Sequence[str], folder: Path, samples: int
) -> dict[str, Any]:
    """Return the figures of one run on the engines of `s`, and all of its advice."""
    fixed = [
        *modes.QUIET,
        f"trainer.run_dir={folder}",
        f"rollout.total_rollout_steps={samples}",
    ]
    config = recipe.load(name, list(overrides), fixed)
    run = open_run_dir(config)
    run.model.symlink_to(s.run.model.resolve())
    session = replace(s, config=config, run=run)
    figures = await modes.run_once(session, SKIP)
    return figures | {"all_advice": list(map(said, advise(RunReader(session.run.path).read())))}


def same_engines(advice: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first advice whose overrides change only the Schedule."""
    for one in advice:
        if one["gain"] is not None and all(key.startswith(OF_SCHEDULE) for key in one["overrides"]):
            return dict(one)
    return None


def said(one: Advice) -> dict[str, Any]:
    """Return a sentence with its number, as the JSON has it."""
    return asdict(one) | {"text": str(one), "overrides": list(one.overrides)}


def table(runs: Sequence[dict[str, Any]], what: str) -> str:
    """Return a Markdown table: each run, its advice, and the gain that the next run had."""
    lines = [
        f"| {what} | samples/s | drawn tokens/s | stock | trainer idle | rollouts idle | "
        "predicted | gain | by drawn tokens |",
        "|---" + "|--:" * 8 + "|",
    ]
    for k, run in enumerate(runs):
        before = runs[k - 1] if run.get("step", k) else None
        gain = drawn = predicted = ""
        if before is not None:
            gain = f"{run['samples_per_s'] / before['samples_per_s'] - 1:+.0%}"
            drawn = f"{run['drawn_tokens_per_s'] / before['drawn_tokens_per_s'] - 1:+.0%}"
            followed = before["followed"]
            low, high = followed["low"], followed["high"]
            predicted = f"{followed['gain']:+.0%}, {low:+.0%} to {high:+.0%}"
        name = " ".join(before["followed"]["overrides"]) if before else "the case"
        lines.append(
            f"| {name} | {run['samples_per_s']:.2f} | {run['drawn_tokens_per_s']:.0f} "
            f"| {run.get('stock_share', 0):+.0%} | {run['trainer_idle']:.0%} "
            f"| {run['rollouter_idle']:.0%} | {predicted} | {gain} | {drawn} |"
        )
    lines += [f"\n{line}" for run in runs for line in run["advice"][:1]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
