"""Follow the advice of a run, and compare the gain with the prediction.

    python benchmarks/advice_case.py [--out DIR] [--steps 2] [--turns 1] [--limit-s 500]
        [--samples 640] [--recipe NAME] [--simulate] [key=value ...]

The default case needs two GPUs and vLLM: 1.5B with random weights, one trainer and one engine of
256 decode slots, windows of 32 x 8, log-normal lengths (median 250, sigma 0.8, cut at 1,024),
staleness 2. There, trainer and engine idle at the same time.

All runs use the same engines. A short run warms them up. The first run has the overrides above.
Each further run also has those of the first advice that needs no other engines. `--turns 2` then
does the same runs once more, so that a slow change of the machine does not look like a gain. No
further run starts if it would end after `--limit-s` seconds. DIR/advice_case.json has the figures,
also of the runs before a failure.

`--simulate` follows the same advice on the virtual clock first, with the costs of such an engine:
22k tokens a second from 256 requests, 13.8k from 64.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace.config import recipe
from millrace.extras.bench import modes
from millrace.observe.progress import Lines, Progress
from millrace.persist.run_reader import RunReader
from millrace.report.advice.balance import Advice
from millrace.run.folder import open_run_dir
from millrace.run.session import Session, open_session

ROOT = Path(__file__).parent.parent
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
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"runs": []}
    if options.simulate:
        result["simulated"] = simulated(options.steps)
        print(table(result["simulated"], "simulated"))
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
    from millrace.report.advice.advise import advise
    from millrace.report.advice.measure import measure

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
    measured = measure(RunReader(session.run.path).read())
    advice = advise(measured) if measured else []
    figures["all_advice"] = [said(one) for one in advice]
    figures["step_cost"] = measured.step_cost if measured else None
    return figures


def same_engines(advice: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first advice whose overrides change only the Schedule."""
    for one in advice:
        if one["overrides"] and all(key.startswith(OF_SCHEDULE) for key in one["overrides"]):
            return dict(one)
    return None


def simulated(steps: int) -> list[dict[str, Any]]:
    """Return the figures of the case and of its advice on the virtual clock."""
    sys.path.insert(0, str(ROOT))
    from millrace.report.advice.advise import advise
    from tests.report.simulated import run
    from tests.report.test_advice import MEASURED, followed

    case, runs = MEASURED.but(versions=20), []
    for _ in range(steps + 1):
        measured = run(case)
        advice = advise(measured)
        runs.append(
            {
                "overrides": [f"staleness {case.staleness:g}"],
                "samples_per_s": measured.rate,
                "drawn_tokens_per_s": measured.drawn_tokens / measured.seconds,
                "trainer_idle": measured.trainer_idle,
                "rollouter_idle": measured.rollouts_idle,
                "stock_share": measured.stock_share,
                "advice": [str(one) for one in advice],
            }
        )
        all_advice = [said(one) for one in advice]
        chosen = same_engines(all_advice)
        if chosen is None:
            break
        runs[-1]["followed"] = chosen
        case = followed(case, next(a for a in advice if list(a.overrides) == chosen["overrides"]))
    return runs


def said(one: Advice) -> dict[str, Any]:
    """Return a sentence with its number, as the JSON has it."""
    overrides = list(one.overrides)
    return {"text": str(one), "overrides": overrides, "gain": one.gain, "at_most": one.at_most}


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
            bound = "at most " if followed["at_most"] else ""
            predicted = "no number"
            if followed["gain"] is not None:
                predicted = f"{bound}{followed['gain']:+.0%}"
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
