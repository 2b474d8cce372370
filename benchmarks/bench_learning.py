r"""The effect of asynchrony on the reward, and of losses and corrections on old data.

    .venv/bin/python benchmarks/bench_learning.py --write benchmarks/results/learning \
        --plot docs/learning.svg

| part | runs |
|---|---|
| recipes | every recipe of RECIPES, as colocate_sync and as async_partial with staleness 0.5 |
| stale | losses and corrections on the quickstart, with all samples 8 versions old |

In `stale`, each version has one step and 9 windows are in flight in strict order. All its runs have
the same learning rate.

All arms train on the same number of samples. Each seed has one warmed-up model, and all its runs
start from it. Arms take turns. The result of an arm is the mean reward on validation problems after
the last sample. It writes PATH.jsonl, with a line and a curve for each run, and PATH.md, with the
tables. It also plots the curves. `--summarise PATH.jsonl` makes tables and plot from earlier runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from command import millrace

Run = dict[str, Any]

RECIPES = (
    "grpo",
    "dr_grpo",
    "dapo",
    "ppo",
    "rloo",
    "reinforce_plus_plus",
    "gspo",
    "cispo",
    "gmpo",
    "vespo",
    "decoupled_ppo",
)
ARMS = {
    "sync": ["mode=colocate_sync"],
    "async": ["mode=async_partial", "async_training.staleness_threshold=0.5"],
}

EIGHT_OLD = [
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=8",
    "async_training.lookahead=1",
]
RECOMPUTED = ["async_training.use_rollout_log_probs=false"]
IS = "algorithm.rollout_correction.rollout_is=token"
STALE = {
    # The old log-probs are the trainer's at a batch's arrival, so nothing corrects for the policy
    # that drew the tokens. millrace refuses this. A rule that never rejects passes its check.
    "PPO, not corrected": [
        *RECOMPUTED,
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1e-30_1e30",
    ],
    "PPO, clipped against the rollout policy": [],
    "TIS at 2, no clip": [
        "actor.policy_loss.loss_mode=reinforce",
        IS,
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
    ],
    "decoupled PPO, weights up to 5": [
        *RECOMPUTED,
        IS,
        "algorithm.rollout_correction.rollout_is_threshold=5.0",
    ],
    "CISPO": ["actor.policy_loss.loss_mode=cispo", "actor.clip_ratio_low=0.8"],
}
HELD_OUT = "val/sort_digits/mean@4"


def warm_model(folder: Path, seed: int) -> str:
    recipe = "quickstart"
    return str(
        millrace(
            "sft", recipe, f"trainer.run_dir={folder / f'sft-{seed}'}", f"trainer.seed={seed}"
        )["model"]
    )


def one_run(folder: Path, recipe: Path, overrides: list[str], options: argparse.Namespace) -> Run:
    """Train once. Return the final validation reward, and its curve over samples."""
    shutil.rmtree(folder, ignore_errors=True)
    base = [
        "sft.steps=0",
        f"rollout.total_rollout_steps={options.samples}",
        f"trainer.run_dir={folder}",
    ]
    base += ["trainer.save_freq=0", "trainer.logger=[]"]
    base += ["trainer.threads=1"]  # time is not measured, and runs may share the cores
    base += ["data.val_files=['task:sort_digits?min_digits=4&max_digits=6&split=val&size=256']"]
    base += ["rollout.val_kwargs.n=4", "rollout.val_kwargs.greedy=false"]
    result = millrace("train", str(recipe), *base, *overrides)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    per_version = options.samples / result["versions"]
    return {
        "samples": result["samples_trained"],
        "before": result["val_before"][HELD_OUT],
        "held_out": result["val"][HELD_OUT],
        "seconds": round(result["train_seconds"], 2),
        "staleness": round(statistics.mean(row["staleness/mean"] for row in trained), 3),
        "alarms": sorted(
            {
                name
                for row in trained
                for name, value in row.items()
                if name.startswith("alarm/") and value
            }
        ),
        "curve": [
            [round(row["version"] * per_version), row[HELD_OUT]] for row in rows if HELD_OUT in row
        ],
    }


def planned(options: argparse.Namespace) -> list[tuple[Run, Path, list[str]]]:
    """Return the runs in order: labels, recipe, overrides.

    A curve has a point every `options.every` windows of 64 samples.
    """
    plan: list[tuple[Run, Path, list[str]]] = []
    for seed in range(options.seeds):
        for name, arm in itertools.product(options.recipes, ARMS):
            recipe = f"algorithms/{name}"
            plan.append(
                (  # type: ignore[arg-type]
                    {"part": "recipes", "name": name, "arm": arm, "seed": seed},
                    recipe,
                    [*ARMS[arm], f"rollout.test_freq={options.every}"],
                )
            )
        for name in STALE if options.stale else ():
            overrides = [*EIGHT_OLD, *STALE[name], f"rollout.test_freq={2 * options.every}"]
            plan.append(
                (  # type: ignore[arg-type]
                    {"part": "stale", "name": name, "arm": "async", "seed": seed},
                    "quickstart",
                    overrides,
                )
            )
    return plan


def measure(options: argparse.Namespace) -> list[Run]:
    folder = Path(tempfile.mkdtemp(prefix="bench-learning-"))
    models = [warm_model(folder, seed) for seed in range(options.seeds)]
    plan = planned(options)
    runs: list[Run] = []

    def run(i: int) -> None:
        labels, recipe, overrides = plan[i]
        start = [f"model.path={models[labels['seed']]}", f"trainer.seed={labels['seed']}"]
        runs.append({**labels, **one_run(folder / str(i), recipe, [*overrides, *start], options)})
        shown = {name: value for name, value in runs[-1].items() if name != "curve"}
        print(f"{len(runs)} of {len(plan)}: {shown}", file=sys.stderr, flush=True)
        if options.write:
            options.write.with_suffix(".jsonl").write_text(
                "".join(json.dumps(run) + "\n" for run in runs)
            )

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, range(len(plan))))
    shutil.rmtree(folder)
    return runs


def of(runs: list[Run], **labels: Any) -> list[Run]:
    return [run for run in runs if all(run[key] == value for key, value in labels.items())]


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return (
        f"{statistics.mean(values):.3f} ± {deviation:.3f} ({min(values):.3f} to {max(values):.3f})"
    )


def table_of_recipes(runs: list[Run]) -> str:
    rows = [
        "| recipe | sync: mean ± std (min to max) | async: mean ± std (min to max) | async - sync | in sync's spread |"
    ]
    rows.append("|---|--:|--:|--:|---|")
    for name in RECIPES:
        sync, async_ = (
            [run["held_out"] for run in of(runs, part="recipes", name=name, arm=arm)]
            for arm in ARMS
        )
        if not (sync and async_):
            continue
        gap = statistics.mean(async_) - statistics.mean(sync)
        wide = 2 * statistics.stdev(sync) if len(sync) > 1 else 0.0
        inside = statistics.mean(async_) >= min(sync), gap >= -wide
        verdict = (
            "yes"
            if all(inside)
            else "NO"
            if not any(inside)
            else "its min to max"
            if inside[0]
            else "2 std, not its min"
        )
        rows.append(f"| {name} | {spread(sync)} | {spread(async_)} | {gap:+.3f} | {verdict} |")
    return "\n".join(rows)


def table_of_stale(runs: list[Run]) -> str:
    rows = [
        "| 8 versions old | measured staleness | final: mean ± std (min to max) | deepest fall of the mean curve | it |"
    ]
    rows.append("|---|--:|--:|--:|---|")
    for name in STALE:
        arm_runs = of(runs, part="stale", name=name)
        if not arm_runs:
            continue
        mean = [
            statistics.mean(points)
            for points in zip(*([y for _, y in run["curve"]] for run in arm_runs), strict=True)
        ]
        fall = max(before - min(mean[i:]) for i, before in enumerate(mean))
        verdict = (
            "does not learn"
            if mean[-1] < mean[0] + 0.1
            else "keeps learning"
            if fall < 0.05
            else "falls back, then learns"
        )
        stale = statistics.mean(run["staleness"] for run in arm_runs)
        rows.append(
            f"| {name} | {stale:.2f} | {spread([run['held_out'] for run in arm_runs])} | {fall:.3f} | {verdict} |"
        )
    return "\n".join(rows)


def plot(runs: list[Run], path: Path) -> None:
    """Plot validation reward over samples, with a panel for each recipe and one for stale data.

    Thin lines are seeds, thick lines are their means.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    panels = [
        (name, {arm: of(runs, part="recipes", name=name, arm=arm) for arm in ARMS})
        for name in RECIPES
    ]
    panels.append(("8 versions old", {name: of(runs, part="stale", name=name) for name in STALE}))
    panels = [(title, lines) for title, lines in panels if any(lines.values())]
    height = -(-(len(panels) + 1) // 3)  # the legend of the last panel takes a place too
    figure, axes = pyplot.subplots(height, 3, figsize=(9, 2.4 * height), squeeze=False, sharey=True)
    for axis, (title, lines) in zip(axes.flat, panels, strict=False):
        for label, arm_runs in lines.items():
            if arm_runs:
                curves = [run["curve"] for run in arm_runs]
                mean = [
                    statistics.mean(points)
                    for points in zip(*([y for _, y in curve] for curve in curves), strict=True)
                ]
                (thick,) = axis.plot([x for x, _ in curves[0]], mean, linewidth=2, label=label)
                for curve in curves:
                    axis.plot(
                        *zip(*curve, strict=True), color=thick.get_color(), alpha=0.3, linewidth=0.8
                    )
        axis.set_title(title, fontsize=9)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=7)
    axes.flat[0].legend(fontsize=7)
    handles = axes.flat[len(panels) - 1].get_legend_handles_labels()
    axes.flat[len(panels)].legend(
        *handles, fontsize=7, loc="upper left", title=panels[-1][0], title_fontsize=7
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.supxlabel("samples trained", fontsize=9)
    figure.supylabel("held-out reward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--stale", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--every", type=int, default=8, help="windows of 64 samples between two points of a curve"
    )
    parser.add_argument("--write", type=Path, help="write PATH.jsonl and PATH.md")
    parser.add_argument("--plot", type=Path, help="plot the curves as SVG, PNG or PDF")
    parser.add_argument(
        "--summarise", type=Path, help="run nothing: read the runs of an earlier PATH.jsonl"
    )
    options = parser.parse_args()
    runs = (
        [json.loads(line) for line in options.summarise.read_text().splitlines()]
        if options.summarise
        else measure(options)
    )
    tables = "\n\n".join((table_of_recipes(runs), table_of_stale(runs)))
    print(tables)
    if options.write:
        samples, seeds = runs[0]["samples"], 1 + max(run["seed"] for run in runs)
        options.write.with_suffix(".md").write_text(
            "# Learning: synchronous, asynchronous, and on old data\n\n"
            f"    benchmarks/bench_learning.py --seeds {seeds} --samples {samples}\n\n"
            f"Mean reward on 256 held-out problems, 4 responses each, after {samples} samples; "
            f"{seeds} seeds. In sync's spread: async's mean is not below\nsync's worst seed, and at "
            "most two of its standard deviations below its mean. "
            f"The runs and their curves: learning.jsonl.\n\n{tables}\n"
        )
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
