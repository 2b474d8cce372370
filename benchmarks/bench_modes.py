"""Every mode on the same machine, from the same warmed-up model, with the same number of samples.

    .venv/bin/python benchmarks/bench_modes.py --write benchmarks/results/modes.md

| workload | content |
|---|---|
| plain | the quickstart task |
| tail | long-tailed response lengths, and rewards that take 0.2 s to 0.5 s, like tools |

Arms take turns within each repetition, so ratios stay correct if the speed of the machine drifts.
Seconds are those of training, from the first rollout to the last step. `lookahead` compares values
of async_training.lookahead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import ROOT, millrace

from millrace.config import recipe
from millrace.data.prompts import shuffled
from millrace.data.rows import problem
from millrace.data.sources import load_sources
from millrace.schedule.modes import MODES

RECIPE = "quickstart"
TAIL = [
    "data.train_files=['task:sort_digits?min_digits=4&max_digits=6&tail=0.1&tail_digits=64']",
    "data.val_files=['task:sort_digits?min_digits=4&max_digits=6&tail=0.1&tail_digits=64&split=val&size=128']",
    "rollout.max_prompt_length=66",
    "rollout.max_response_length=66",
]
SLOW = [f"reward.function={ROOT / 'benchmarks' / 'slow_reward.py'}:compute_score"]
WORKLOADS = {"plain": [], "tail": [*TAIL, *SLOW]}


def warm_model(folder: Path, workload: str) -> str:
    extra = [] if workload == "plain" else TAIL
    print(f"warming up the model of workload {workload} ...", file=sys.stderr)
    return str(
        millrace("sft", str(RECIPE), f"trainer.run_dir={folder / f'sft-{workload}'}", *extra)[
            "model"
        ]
    )


def one_run(
    folder: Path, model: str, samples: int, seed: int, overrides: list[str]
) -> dict[str, float]:
    """Train once and return the figures of its rows."""
    shutil.rmtree(folder, ignore_errors=True)
    base = [
        f"model.path={model}",
        "sft.steps=0",
        f"rollout.total_rollout_steps={samples}",
        f"trainer.run_dir={folder}",
    ]
    base += [
        f"trainer.seed={seed}",
        "trainer.val_before_train=false",
        "rollout.test_freq=0",
        "trainer.save_freq=0",
    ]
    result = millrace("train", str(RECIPE), *base, *overrides)
    rows = [
        r
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "reward/mean" in (r := json.loads(line))
    ]
    wall = sum(r["perf/time_per_version"] for r in rows)

    def share(part: str) -> float:
        return sum(r.get(f"timing_s/{part}", 0.0) for r in rows) / wall

    def over_time(name: str) -> float:
        return sum(r[name] * r["perf/time_per_version"] for r in rows) / wall

    trained = sum(r["train/samples"] for r in rows)
    return {
        "seconds": result["train_seconds"],
        "trainer_idle": over_time("trainer/idle_ratio"),
        "rollouter_idle": over_time("rollouter/idle_ratio"),
        "waiting": share("gen"),
        "stepping": share("train"),
        "staleness": sum(r["staleness/mean"] * r["train/samples"] for r in rows) / trained,
        "partial": sum(r["fully_async/partial/partial_ratio"] * r["train/samples"] for r in rows)
        / trained,
        "reward": next(v for k, v in result["val"].items() if "mean@" in k),
        "bias": length_bias(folder),
    }


def length_bias(folder: Path) -> float:
    """Return how much longer the trained answers are than the admitted ones: mean over versions.

    At each version, the answers trained so far are compared with the same number of samples in
    order of admission. Strict order gives 0. An order that prefers early samples gives a negative
    value until the long ones are trained.
    """
    config = recipe.load(folder / "config.yaml")
    rows = load_sources(config.data.train_files, seed=config.trainer.seed)

    def length(i: int) -> int:
        epoch, at = divmod(i, len(rows))
        row = (
            shuffled(at, len(rows), f"{config.trainer.seed}|{epoch}") if config.data.shuffle else at
        )
        return len(problem(rows, row).answer)

    trained: list[int] = []
    biases: list[float] = []
    for line in map(json.loads, (folder / "history.jsonl").read_text().splitlines()):
        if line["event"] == "version":
            trained += [length(i) for i in line["trained"]]
            biases.append(
                statistics.mean(trained) / statistics.mean(length(i) for i in range(len(trained)))
                - 1
            )
    return statistics.mean(biases)


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in runs) for name in runs[0]}


def table(title: str, arms: dict[str, list[dict[str, float]]], baseline: str) -> list[str]:
    """Return one row for each arm. Ratios are between runs of the same repetition."""
    lines = [
        f"### {title}",
        "",
        f"| arm | s (min to max) | {baseline} / arm | idle trainer | idle rollouter | staleness | partial | length bias | reward |",
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for arm, runs in arms.items():
        m = median_of(runs)
        seconds = [r["seconds"] for r in runs]
        ratio = statistics.median(
            b["seconds"] / r["seconds"] for b, r in zip(arms[baseline], runs, strict=True)
        )
        lines.append(
            f"| {arm} | {m['seconds']:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {ratio:.2f} | {m['trainer_idle']:.0%} "
            f"| {m['rollouter_idle']:.0%} | {m['staleness']:.2f} | {m['partial']:.1%} | {m['bias']:+.1%} | {m['reward']:.3f} |"
        )
    return [*lines, ""]


def ratio(arms: dict[str, list[dict[str, float]]], slow: str, fast: str) -> float:
    return statistics.median(
        s["seconds"] / f["seconds"] for s, f in zip(arms[slow], arms[fast], strict=True)
    )


def compare(
    title: str,
    arms: dict[str, list[str]],
    repeats: int,
    run: Callable[[str, list[str], int], dict[str, float]],
) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for k in range(repeats):
        for arm, overrides in arms.items():
            results[arm].append(run(arm, overrides, k))
            print(
                f"{title} {k + 1}/{repeats} {arm}: {results[arm][-1]['seconds']:.2f} s",
                file=sys.stderr,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1920, help="samples to train in each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument(
        "--lookahead",
        nargs="*",
        type=int,
        default=[1, 16, 64, 128],
        help="sweep for async_partial on `tail`",
    )
    parser.add_argument(
        "--staleness",
        type=float,
        default=1.0,
        help="staleness_threshold of the asynchronous modes on `tail`",
    )
    parser.add_argument("--runtime", default="local", choices=["local", "ray"])
    parser.add_argument(
        "--write",
        type=Path,
        help="file for the tables; the raw figures get the same name with .json",
    )
    parser.add_argument("--json", action="store_true", help="print raw figures as the last line")
    options = parser.parse_args()

    raw: dict[str, Any] = {}
    text = [
        f"{options.samples} samples, {options.repeats} repetitions, {os.cpu_count()} cores, "
        f"runtime {options.runtime}; medians.",
        "",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for workload in options.workloads:
            model = warm_model(folder, workload)

            def run(
                arm: str, overrides: list[str], k: int, workload: str = workload, model: str = model
            ) -> dict[str, float]:
                extra = [*WORKLOADS[workload], f"trainer.runtime={options.runtime}", *overrides]
                return one_run(folder / f"{workload}-{arm}", model, options.samples, k, extra)

            stale = (
                [f"async_training.staleness_threshold={options.staleness}"]
                if workload == "tail"
                else []
            )
            arms = {
                m: [f"mode={m}", *(stale if MODES[m].staleness_threshold is None else [])]
                for m in options.modes
            }
            results = compare(workload, arms, options.repeats, run)
            raw[workload] = results
            text += table(
                f"{workload}: every mode",
                results,
                "colocate_sync" if "colocate_sync" in arms else options.modes[0],
            )
            text += explain(results)
            if workload == "tail" and options.lookahead:
                sweep = {
                    f"lookahead {n}": [
                        "mode=async_partial",
                        *stale,
                        f"async_training.lookahead={n}",
                    ]
                    for n in options.lookahead
                }
                looks = compare("lookahead", sweep, options.repeats, run)
                raw["lookahead"] = looks
                text += table(
                    "tail: async_partial by look-ahead", looks, f"lookahead {options.lookahead[0]}"
                )
    print("\n".join(text))
    if options.write:
        command = f"python benchmarks/bench_modes.py --samples {options.samples} --repeats {options.repeats}"
        options.write.write_text("\n".join(["# Modes", "", f"`{command}`", "", *text]))
        options.write.with_suffix(".json").write_text(json.dumps(raw, indent=1))
    if options.json:
        print(json.dumps(raw))


def explain(arms: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the cause of each arm's speed, and the limit with perfect overlap."""
    lines: list[str] = []
    if "colocate_sync" in arms:
        m = median_of(arms["colocate_sync"])
        ceiling = 1 / max(m["waiting"], 1 - m["waiting"])
        lines.append(
            f"colocate_sync waits {m['waiting']:.0%} of its time for rollouts and rewards. "
            f"Overlap without any cost could make it {ceiling:.2f} times as fast."
        )
    steps = [
        ("overlap", "colocate_sync", "one_step_off"),
        ("streaming", "one_step_off", "async_staleness"),
    ]
    steps += [
        ("partial rollouts", "async_staleness", "async_partial"),
        ("all", "colocate_sync", "async_partial"),
    ]
    if all(a in arms and b in arms for _, a, b in steps):
        parts = ", ".join(f"{name} {ratio(arms, a, b):.2f} ({a} / {b})" for name, a, b in steps)
        lines.append(f"Speed-up of each step: {parts}.")
    return [*lines, ""]


if __name__ == "__main__":
    main()
