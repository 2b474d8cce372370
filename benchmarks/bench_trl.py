"""millrace compared with TRL's GRPOTrainer, on the same machine.

Both have the same warmed-up model, problems, rewards and hyper-parameters.

    python benchmarks/bench_trl.py [--repeats 3] [--steps 100] [--cases plain,slow]
        [--json out.json]

| case | rewards | goal |
|---|---|---|
| plain | exact answers of the quickstart's sort_digits, without delay | not slower than TRL |
| slow | the same, with 0.2 s to 0.5 s for each reward, like a judge or a sandbox | twice as fast |

Both arms are separate processes that alternate and use all cores. `millrace sft` makes the warm-up
once. An optimizer step of both has 32 problems x 8 completions. TRL is one process with
transformers' generate, without logging and saving. A short calibration finds its best number of
torch threads. millrace is `millrace train` on the quickstart recipe, as a user runs it. The slow
reward is the same `async def` function in both arms. TRL awaits it for a whole batch, and millrace
for each problem.

| figure | meaning |
|---|---|
| rate | trajectories per second, from the first generation to the end of the last step |
| to 0.9 | seconds of training until the mean reward over 10 optimizer steps reaches 0.90 |
| whole | seconds of the whole process, from start to exit |
| held-out | mean@1 at temperature 1 on 256 validation problems, by `millrace eval` for both |

`rate` leaves out start-up (imports, loading) and includes the filling of millrace's pipeline. 10
optimizer steps have 2,560 trajectories. Run it only on a quiet machine. The JSON has the load
before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl_training
from trl_training import GROUP, PROBLEMS, RECIPE, REWARDS, run_trl

ROOT = Path(__file__).resolve().parent.parent
MILLRACE = Path(sys.executable).with_name("millrace")
WINDOW = 10
GOAL = 0.90


# -- the processes of both arms


def to_goal(ends: Sequence[float], rewards: Sequence[float], window: int) -> float | None:
    """Return the time at which the mean of the last `window` rewards first reaches the goal."""
    for k in range(window, len(ends) + 1):
        if statistics.fmean(rewards[k - window : k]) >= GOAL:
            return ends[k - 1]
    return None


def command(arguments: Sequence[str | Path]) -> tuple[dict[str, Any], float]:
    """Return (last line of output as JSON, seconds of the whole process)."""
    begin = time.perf_counter()
    done = subprocess.run(
        [str(a) for a in arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TQDM_DISABLE": "1"},
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - begin


def result(
    case: str,
    arm: str,
    steps: int,
    load: float,
    whole: float,
    out: dict[str, Any],
    held_out: float | None,
) -> dict[str, Any]:
    return {
        "case": case,
        "arm": arm,
        "load_before": load,
        "rate": steps * PROBLEMS * GROUP / out["seconds"],
        "seconds": out["seconds"],
        "to_goal": to_goal(out["ends"], out["rewards"], out.get("window", WINDOW)),
        "whole": whole,
        "held_out": held_out,
    }


def held_out(folder: Path, *overrides: str) -> float:
    out, _ = command(
        [
            MILLRACE,
            "eval",
            RECIPE,
            f"trainer.run_dir={folder}",
            "sft.steps=0",
            "rollout.val_kwargs.greedy=false",
            "--json",
            *overrides,
        ]
    )
    return float(out["val"]["val/sort_digits/mean@1"])


def trl_arm(
    folder: Path, model: Path, case: str, steps: int, seed: int, threads: int, evaluate: bool = True
) -> dict[str, Any]:
    load = os.getloadavg()[0]
    arguments = [
        "--trl-arm",
        case,
        "--model",
        model,
        "--steps",
        steps,
        "--seed",
        seed,
        "--threads",
        threads,
        "--keep",
        folder,
    ]
    out, whole = command([sys.executable, __file__, *map(str, arguments)])
    score = held_out(folder / "eval", f"model.path={folder}") if evaluate else None
    return result(case, f"TRL, {threads} thread(s)", steps, load, whole, out, score)


def millrace_arm(
    folder: Path, model: Path, case: str, steps: int, seed: int, more: Sequence[str] = ()
) -> dict[str, Any]:
    load = os.getloadavg()[0]
    overrides = [
        *(
            f"model.path={model}",
            "sft.steps=0",
            f"trainer.run_dir={folder}",
            f"trainer.seed={seed}",
        ),
        *(
            f"rollout.total_rollout_steps={steps * PROBLEMS}",
            f"reward.function={trl_training.__file__}:{REWARDS[case].__name__}",
        ),
        # TRL's arm does not validate, save or write TensorBoard files during training either.
        *(
            "trainer.save_freq=0",
            "rollout.test_freq=0",
            "trainer.val_before_train=false",
            "data.val_files=[]",
            "trainer.logger=[]",
        ),
        *more,
    ]
    summary, whole = command([MILLRACE, "train", RECIPE, "--json", *overrides])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward/mean" in row]
    # Versions follow each other without a gap. The last one ends with the training.
    after = [sum(row["perf/time_per_version"] for row in rows[k + 1 :]) for k in range(len(rows))]
    out = {
        "seconds": summary["train_seconds"],
        "ends": [summary["train_seconds"] - seconds for seconds in after],
        "rewards": [row["reward/mean"] for row in rows],
        "window": round(WINDOW * len(rows) / steps),
    }
    score = held_out(
        folder.with_name(folder.name + "-eval"),
        f"trainer.resume={summary['checkpoint']}",
        "trainer.logger=[]",
    )
    return result(case, "millrace", steps, load, whole, out, score)


def spread(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} reached"
    digits = 0 if min(known) >= 100 else 2 if max(known) <= 1 else 1
    return f"{statistics.median(known):,.{digits}f} ({min(known):,.{digits}f} to {max(known):,.{digits}f})"


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of medians (minimum to maximum) and the ratios of the two arms."""
    lines = [
        "| rewards | arm | trajectories/s | s to 0.9 | s in training | s whole process | held-out mean@1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        arms = {
            arm: [r for r in of_case if r["arm"] == arm]
            for arm in sorted({r["arm"] for r in of_case})
        }
        for arm, runs in arms.items():
            figures = [
                spread([r[key] for r in runs])
                for key in ("rate", "to_goal", "seconds", "whole", "held_out")
            ]
            lines.append(f"| {case} | {arm} | {' | '.join(figures)} |")
        trl, millrace = arms.values()
        ratios = {
            key: [
                a[key] / b[key] if a[key] and b[key] else None for a, b in zip(*pair, strict=True)
            ]
            for key, pair in (
                ("rate", (millrace, trl)),
                ("to_goal", (trl, millrace)),
                ("seconds", (trl, millrace)),
                ("whole", (trl, millrace)),
            )
        }
        lines.append(
            f"| {case} | **millrace is faster by** | {' | '.join(ratio(v) for v in ratios.values())} | |"
        )
    return "\n".join(lines)


def ratio(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return (
        f"**{statistics.median(known):.2f}x** ({min(known):.2f} to {max(known):.2f})"
        if known
        else "-"
    )


def calibrate(folder: Path, model: Path) -> tuple[int, dict[int, list[float]]]:
    """Return the number of torch threads that is fastest for TRL, and all rates.

    Each number has two short runs, and the better one counts.
    """
    rates: dict[int, list[float]] = {n: [] for n in sorted({1, os.cpu_count() or 1})}
    for k in range(2):
        for n, found in rates.items():
            found.append(
                trl_arm(folder / f"calibration-{n}-{k}", model, "plain", 30, k, n, evaluate=False)[
                    "rate"
                ]
            )
    print(f"TRL's trajectories/s by torch threads: {rates}", flush=True)
    return max(rates, key=lambda n: max(rates[n])), rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="runs of each arm (default 3); repetition k has seed k",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="optimizer steps of each run (default 100)"
    )
    parser.add_argument(
        "--cases", default="plain,slow", help="which rewards: plain, slow, or both (the default)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="torch threads of TRL; 0 (the default) measures which is faster",
    )
    parser.add_argument(
        "--millrace",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="overrides of millrace's recipe",
    )
    parser.add_argument(
        "--model", type=Path, help="a warmed-up model (default: `millrace sft` makes one)"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: they are deleted)")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--trl-arm", choices=REWARDS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_arm:
        run_trl(
            str(options.model),
            options.trl_arm,
            options.steps,
            options.seed,
            options.threads,
            str(options.keep),
        )
        return
    cases = options.cases.split(",")
    if unknown := set(cases) - set(REWARDS):
        parser.error(f"--cases {', '.join(unknown)}: known are {', '.join(REWARDS)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        compare(options, cases, folder)


def compare(options: argparse.Namespace, cases: list[str], folder: Path) -> None:
    model = options.model
    if model is None:
        print("warm-up ...", flush=True)
        model = Path(
            command([MILLRACE, "sft", RECIPE, f"trainer.run_dir={folder / 'warm'}", "--json"])[0][
                "model"
            ]
        )
    model = (ROOT / model).resolve()
    start = held_out(folder / "start", f"model.path={model}")
    threads, calibration = (options.threads, {}) if options.threads else calibrate(folder, model)
    rows: list[dict[str, Any]] = []
    for k in range(options.repeats):
        for case in cases:
            arms = [
                lambda case=case, k=k: trl_arm(
                    folder / f"trl-{case}-{k}", model, case, options.steps, k, threads
                ),
                lambda case=case, k=k: millrace_arm(
                    folder / f"millrace-{case}-{k}", model, case, options.steps, k, options.millrace
                ),
            ]
            for arm in arms if k % 2 == 0 else arms[::-1]:
                rows.append(arm())
                print(json.dumps(rows[-1]), flush=True)
    text = table(rows)
    print(f"\n{text}")
    facts = {
        "command": " ".join(["python", "benchmarks/bench_trl.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "start_held_out": start,
        "trl_threads": threads,
        "trl_calibration": calibration,
        "steps": options.steps,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
