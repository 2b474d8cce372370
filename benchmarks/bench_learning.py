"""Does asynchrony cost reward? Every recipe of recipes/algorithms, synchronous and asynchronous, to the same number of samples.

    .venv/bin/python benchmarks/bench_learning.py --write benchmarks/results/learning --plot docs/learning.svg

Each seed has one warmed-up model, from which all runs of that seed start; arms take turns. An arm's result is the mean reward on
held-out problems after the last sample. The asynchronous arm is `async_partial` with staleness_threshold=0.5. Writes
learning.jsonl (a line for each run, with its curve) and learning.md (the table), and plots the curves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from command import ROOT, millrace

RECIPES = ("grpo", "dr_grpo", "dapo", "ppo", "rloo", "reinforce_plus_plus", "gspo", "cispo", "decoupled_ppo")
ARMS = {"sync": ["mode=colocate_sync"], "async": ["mode=async_partial", "async_training.staleness_threshold=0.5"]}
HELD_OUT = "val/sort_digits/mean@4"


def warm_model(folder: Path, seed: int) -> str:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    return str(millrace("sft", recipe, f"trainer.run_dir={folder / f'sft-{seed}'}", f"trainer.seed={seed}")["model"])


def one_run(folder: Path, recipe: str, arm: str, model: str, seed: int, samples: int, every: int) -> dict[str, Any]:
    """Train once: the final held-out reward, and the curve of held-out reward over samples."""
    shutil.rmtree(folder, ignore_errors=True)
    base = [f"model.path={model}", "sft.steps=0", f"rollout.total_rollout_steps={samples}", f"trainer.run_dir={folder}"]
    base += [f"trainer.seed={seed}", f"rollout.test_freq={every}", "trainer.save_freq=0", "trainer.logger=[]"]
    base += ["trainer.threads=1"]  # seconds are not the point here, and runs may share the cores
    base += ["data.val_files=['task:sort_digits?min_digits=4&max_digits=6&split=val&size=256']"]
    base += ["rollout.val_kwargs.n=4", "rollout.val_kwargs.greedy=false"]
    result = millrace("train", str(ROOT / "recipes" / "algorithms" / f"{recipe}.yaml"), *base, *ARMS[arm])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    per_version = samples / result["versions"]
    return {
        "recipe": recipe,
        "arm": arm,
        "seed": seed,
        "samples": result["samples_trained"],
        "before": result["val_before"][HELD_OUT],
        "held_out": result["val"][HELD_OUT],
        "seconds": round(result["train_seconds"], 2),
        "staleness": round(statistics.mean(row["staleness/mean"] for row in trained), 3),
        "alarms": sorted({name for row in trained for name, value in row.items() if name.startswith("alarm/") and value}),
        "curve": [[round(row["version"] * per_version), row[HELD_OUT]] for row in rows if HELD_OUT in row],
    }


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each recipe: means, standard deviations over seeds, and whether the arms agree."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run["recipe"]][run["arm"]].append(run["held_out"])
    lines = []
    for recipe, arms in found.items():
        line: dict[str, Any] = {"recipe": recipe}
        for arm, values in arms.items():
            line[arm] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0, min(values), max(values))
        if set(arms) == set(ARMS):
            line["within"] = line["async"][0] >= line["sync"][2]  # not below the worst seed of the sync arm
        lines.append(line)
    return lines


def table(runs: list[dict[str, Any]]) -> str:
    rows = [
        "| recipe | sync: mean ± std (min to max) | async: mean ± std (min to max) | async - sync | async mean within sync's spread |"
    ]
    rows.append("|---|--:|--:|--:|---|")
    for line in summarise(runs):
        cells = ["{:.3f} ± {:.3f} ({:.3f} to {:.3f})".format(*line[arm]) if arm in line else "-" for arm in ARMS]
        gap, within = "-", "-"
        if "within" in line:
            gap = f"{line['async'][0] - line['sync'][0]:+.3f}"
            within = ("yes" if line["async"][0] <= line["sync"][3] else "yes, above it") if line["within"] else "NO"
        rows.append(f"| {line['recipe']} | {cells[0]} | {cells[1]} | {gap} | {within} |")
    return "\n".join(rows)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Held-out reward over samples: a panel for each recipe, a thin line for each seed, their mean thick."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    recipes = [r for r in RECIPES if any(run["recipe"] == r for run in runs)]
    figure, axes = pyplot.subplots(-(-len(recipes) // 3), 3, figsize=(9, 2.4 * -(-len(recipes) // 3)), squeeze=False, sharey=True)
    for axis, recipe in zip(axes.flat, recipes, strict=False):
        for arm, colour in (("sync", "#4c6ef5"), ("async", "#e8590c")):
            curves = [run["curve"] for run in runs if run["recipe"] == recipe and run["arm"] == arm]
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colour, alpha=0.3, linewidth=0.8)
            means = [statistics.mean(points) for points in zip(*([y for _, y in curve] for curve in curves), strict=False)]
            axis.plot([x for x, _ in curves[0]][: len(means)] if curves else [], means, color=colour, linewidth=2, label=arm)
        axis.set_title(recipe, fontsize=9)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=7)
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("samples trained", fontsize=9)
    figure.supylabel("held-out reward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5120)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--every", type=int, default=8, help="versions between two points of a curve")
    parser.add_argument("--write", type=Path, help="write PATH.jsonl and PATH.md")
    parser.add_argument("--plot", type=Path, help="plot the curves as SVG, PNG or PDF")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-learning-"))
    runs: list[dict[str, Any]] = []
    total = options.seeds * len(options.recipes) * len(ARMS)
    models = [warm_model(folder, seed) for seed in range(options.seeds)]

    def run(what: tuple[int, str, str]) -> None:
        seed, recipe, arm = what
        where = folder / f"{recipe}-{arm}-{seed}"
        runs.append(one_run(where, recipe, arm, models[seed], seed, options.samples, options.every))
        shown = {name: value for name, value in runs[-1].items() if name != "curve"}
        print(f"{len(runs)} of {total}: {shown}", file=sys.stderr, flush=True)
        if options.write:
            lines = "".join(json.dumps(run) + "\n" for run in runs)
            options.write.with_suffix(".jsonl").write_text(lines)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, itertools.product(range(options.seeds), options.recipes, ARMS)))
    runs.sort(key=lambda r: (RECIPES.index(r["recipe"]), r["seed"], r["arm"]))
    shutil.rmtree(folder)
    print(table(runs))
    if options.write:
        command = f"benchmarks/bench_learning.py --seeds {options.seeds} --samples {options.samples} --every {options.every}"
        note = f"Mean held-out reward (256 problems, 4 responses each) after {options.samples} samples, {options.seeds} seeds."
        options.write.with_suffix(".md").write_text(
            f"# Learning, synchronous and asynchronous\n\n    {command}\n\n{note}\n\n{table(runs)}\n"
        )
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
