"""Reward over wall-clock time, synchronous against asynchronous, at equal samples: 122 M parameters, a reasoning-gym mix.

    python benchmarks/reasoning_mix.py                       # the problems, on a machine with reasoning-gym
    python benchmarks/bench_gpu_learning.py [key=value ...]  # on four GPUs
    python benchmarks/bench_gpu_learning.py --summarise benchmarks/results/gpu_learning.jsonl --plot docs/gpu_learning.svg

Warms one model up with all GPUs (`--model FOLDER` takes one that is there), then trains it by RL. Each run has two GPUs: in
`sync`, mode=colocate_sync, both roll out and both train, in turns; in `async`, mode=async_partial, there is one for each;
and so in `pipeline`, mode=on_policy_pipeline, which is not among the default modes. Each pair of GPUs has one run at a
time. Overrides go to everything. Where time is short, `--budget-s` starts no run that would not end in it, judging by the
longest of its mode so far, and `--run-timeout-s` kills one that hangs.

Writes PATH.jsonl, a line for each run as soon as it ends, failed ones with their error: held-out reward before and after,
and of each version the seconds since RL began and the training reward. Tables and plot are made of that file, on any
machine. All of it on two cores, small, in about five minutes:

    python benchmarks/reasoning_mix.py --rows 2000 --held-out 16 --folder build/small
    python benchmarks/bench_gpu_learning.py --gpus 0 --seeds 2 --write build/small/learning --folder build/small \\
        data.train_files=[build/small/train.jsonl] data.val_files=[build/small/val.jsonl] sft.steps=80 sft.batch_size=64 \\
        sft.lr=4e-3 model.shape.hidden_size=64 model.shape.num_hidden_layers=2 model.shape.num_attention_heads=2 \\
        model.shape.num_key_value_heads=1 model.shape.intermediate_size=192 rollout.total_rollout_steps=512 actor.optim.lr=4e-4
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from command import ROOT, millrace

Run = dict[str, Any]

RECIPE = str(ROOT / "recipes" / "gpu_reasoning.yaml")
MODES = {"sync": "colocate_sync", "async": "async_partial", "pipeline": "on_policy_pipeline"}
ON_CPU = ["trainer.device=cpu", "rollout.engine=torch", "model.dtype=float32"]
MEASURED = [  # nothing is written in a run but its figures, and no validation interrupts it
    "sft.steps=0",
    "data.train_max_samples=8192",  # rows are mixed; reading all of them takes each run some seconds more
    "rollout.test_freq=0",
    "trainer.save_freq=0",
    "trainer.save_last=false",
    "trainer.logger=[]",
]
SHARES = ("wait_samples", "wait_rollouts", "step", "switch", "sync_transfer", "sync_activate", "other")
SMOOTH = 5
"""Versions whose mean reward counts where a level is asked for."""


def warm_up(options: argparse.Namespace) -> Run:
    """`millrace sft` on all GPUs: what it came to, with the folder of the model that every run starts from."""
    folder = options.folder / "sft"
    shutil.rmtree(folder, ignore_errors=True)
    ranks = [f"trainer.n_gpus_per_node={options.gpus}"] if options.gpus else ON_CPU
    arguments = ["mode=colocate_sync", *ranks, f"trainer.run_dir={folder}", *options.overrides]  # no GPU is kept for rollouts
    return millrace("sft", RECIPE, *arguments, env=environment(range(options.gpus)))


def environment(gpus: Iterable[int]) -> dict[str, str]:
    shown = ",".join(map(str, gpus))
    return {"HF_HUB_OFFLINE": "1"} | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {})


def devices_of(mode: str, options: argparse.Namespace) -> list[str]:
    """A pair of GPUs: shared by two ranks and two replicas, or one for each side."""
    if not options.gpus:
        return ON_CPU
    each = 2 if mode == "sync" else 1
    return [f"trainer.n_gpus_per_node={each}", f"rollout.n_gpus_per_node={each}"]


def one_run(labels: Run, model: Path, gpus: tuple[int, ...], options: argparse.Namespace) -> Run:
    folder = options.folder / f"{labels['mode']}-{labels['seed']}"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = [f"mode={MODES[labels['mode']]}", f"trainer.seed={labels['seed']}", f"model.path={model}"]
    arguments += [f"trainer.run_dir={folder}", *devices_of(labels["mode"], options), *options.overrides, *MEASURED]
    start = time.perf_counter()
    try:
        result = millrace("train", RECIPE, *arguments, env=environment(gpus), timeout_s=options.run_timeout_s)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        said = error.stderr or b"" if isinstance(error, subprocess.TimeoutExpired) else b""
        why = f"{str(error)[-3000:]} {said.decode(errors='replace')[-1000:]}".strip()
        return labels | {"gpus": gpus, "seconds_in_all": round(time.perf_counter() - start, 1), "error": why}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return labels | {"gpus": gpus, "seconds_in_all": round(time.perf_counter() - start, 1)} | figures(result, rows)


def figures(result: dict[str, Any], rows: list[dict[str, Any]]) -> Run:
    """What is kept of a run: its result, and of every version the seconds since RL began, samples and training reward."""
    trained = [row for row in rows if "reward/mean" in row]
    seconds = [row["perf/time_per_version"] for row in trained]
    # The first row may also hold what came before the first rollout; the end is the same moment in both.
    ends = [result["train_seconds"] - sum(seconds) + at for at in accumulate(seconds)]
    samples = accumulate(row["train/samples"] for row in trained)
    rewards = [row["reward/mean"] for row in trained]
    parts = {name: sum(row.get(f"timing_s/{name}", 0.0) for row in trained) / sum(seconds) for name in SHARES}

    def mean(name: str) -> float:
        return round(statistics.mean(row[name] for row in trained if row.get(name) is not None), 4)

    return {
        "samples": result["samples_trained"],
        "versions": result["versions"],
        "rl_seconds": round(result["train_seconds"], 2),
        "start_seconds": round(result["timings"]["start"], 2),
        "val_before": kept(result["val_before"]),
        "val": kept(result["val"]),
        "staleness": mean("staleness/mean"),
        "idle_trainer": mean("trainer/idle_ratio"),
        "idle_rollouter": mean("rollouter/idle_ratio"),
        "response_length": mean("response_length/mean"),
        "entropy_end": trained[-1]["actor/entropy"],
        "shares": {name: round(share, 4) for name, share in parts.items()},
        "alarms": sorted({name for row in trained for name, value in row.items() if name.startswith("alarm/") and value}),
        "curve": [[round(s, 2), int(n), round(r, 4)] for s, n, r in zip(ends, samples, rewards, strict=True)],
    }


def kept(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items() if name.endswith("/greedy") or "/mean@" in name}


def measure(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    output = options.write.with_suffix(".jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("")
    lock = Lock()

    def write(found: Run) -> None:
        with lock, output.open("a") as file:
            file.write(json.dumps(found) + "\n")
        shown = {name: value for name, value in found.items() if name not in ("curve", "val_before", "val", "shares")}
        if "val" in found:
            shown |= {name: round(held_out(found[name], "mean@"), 3) for name in ("val_before", "val")}
        say(f"{time.perf_counter() - begin:.0f} s: {shown}")

    model = options.model
    if model is None:
        warm = warm_up(options)
        model = Path(warm["model"])
        write({"warm_up": {name: warm[name] for name in ("steps", "seconds", "loss")}})
    pairs: SimpleQueue[tuple[int, ...]] = SimpleQueue()
    for first in range(0, max(options.gpus, 1), 2):
        pairs.put((first, first + 1) if options.gpus else ())
    longest = dict.fromkeys(MODES, 0.0)

    def run(labels: Run) -> None:
        gpus = pairs.get()
        try:
            spent = time.perf_counter() - begin
            if options.budget_s and spent + longest[labels["mode"]] > options.budget_s:
                say(f"not started, {spent:.0f} s are spent: {labels}")
                return
            found = one_run(labels, model.resolve(), gpus, options)
        finally:
            pairs.put(gpus)
        longest[labels["mode"]] = max(longest[labels["mode"]], found["seconds_in_all"])
        write(found)

    # The modes of a seed beside each other: whatever else the host does, it does to both.
    plan = [{"mode": mode, "seed": seed} for seed in range(options.seeds) for mode in options.modes]
    with ThreadPoolExecutor(max(options.gpus // 2, 1)) as pool:
        list(pool.map(run, plan))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What was measured ----------------------------------------------------------------------------------------------------


def held_out(values: dict[str, float], kind: str) -> float:
    """Mean over tasks of `mean@K` or `greedy`."""
    return statistics.mean(value for name, value in values.items() if name.rsplit("/", 1)[1].startswith(kind))


def smoothed(run: Run) -> Iterator[tuple[float, float]]:
    """(seconds, mean reward of the last `SMOOTH` versions)."""
    rewards = [reward for _, _, reward in run["curve"]]
    for i in range(min(SMOOTH, len(rewards)) - 1, len(rewards)):
        yield run["curve"][i][0], statistics.mean(rewards[max(0, i - SMOOTH + 1) : i + 1])


def common_level(runs: list[Run]) -> float:
    """The highest multiple of 0.05 that every run's smoothed reward comes to."""
    return int(20 * min(max(reward for _, reward in smoothed(run)) for run in runs)) / 20


def spread(values: list[float], digits: int = 3) -> str:
    middle = f"{statistics.mean(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def tables(runs: list[Run]) -> str:
    level = common_level(runs)
    rows: dict[str, Any] = {
        "seeds": lambda found: str(len(found)),
        "samples trained": lambda found: str(found[0]["samples"]),
        "held out, sampled, before": lambda found: spread([held_out(run["val_before"], "mean@") for run in found]),
        "held out, sampled, after": lambda found: spread([held_out(run["val"], "mean@") for run in found]),
        "held out, greedy, before": lambda found: spread([held_out(run["val_before"], "greedy") for run in found]),
        "held out, greedy, after": lambda found: spread([held_out(run["val"], "greedy") for run in found]),
        "seconds of RL": lambda found: spread([run["rl_seconds"] for run in found], 1),
        f"seconds to a training reward of {level:.2f}": lambda found: spread(
            [next(at for at, reward in smoothed(run) if reward >= level) for run in found], 1
        ),
        "mean staleness, versions": lambda found: spread([run["staleness"] for run in found], 2),
        "idle trainer": lambda found: spread([run["idle_trainer"] for run in found], 2),
        "idle rollouts": lambda found: spread([run["idle_rollouter"] for run in found], 2),
        "time in switches and syncs": lambda found: spread(
            [sum(run["shares"][name] for name in ("switch", "sync_transfer", "sync_activate")) for run in found], 2
        ),
    }
    by_mode = {mode: [run for run in runs if run["mode"] == mode] for mode in MODES}
    by_mode = {mode: found for mode, found in by_mode.items() if found}
    lines = [f"| mean over seeds (min to max) | {' | '.join(MODES[mode] for mode in by_mode)} |", "|---|" + "--:|" * len(by_mode)]
    lines += [f"| {name} | {' | '.join(of(found) for found in by_mode.values())} |" for name, of in rows.items()]
    tasks = sorted(name.split("/")[1] for name in runs[0]["val"] if name.endswith("/greedy"))
    lines += [
        "",
        f"| held out, sampled: before, after | {' | '.join(MODES[mode] for mode in by_mode)} |",
        "|---|" + "--:|" * len(by_mode),
    ]
    for task in tasks:
        cells = [", ".join(spread_of_task(found, task)) for found in by_mode.values()]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread_of_task(runs: list[Run], task: str) -> tuple[str, str]:
    def mean(values: str) -> str:
        found = [v for run in runs for name, v in run[values].items() if name.startswith(f"val/{task}/mean@")]
        return f"{statistics.mean(found):.3f}"

    return mean("val_before"), mean("val")


def plot(runs: list[Run], path: Path) -> None:
    """Training reward over seconds and over samples; thin lines are seeds, thick ones their means, version by version."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for mode, name in MODES.items():
        curves = [run["curve"] for run in runs if run["mode"] == mode]
        for axis, x in zip(axes, (0, 1), strict=True) if curves else ():
            versions = list(zip(*curves, strict=True))
            mean = [[statistics.mean(point[k] for point in points) for points in versions] for k in (x, 2)]
            (thick,) = axis.plot(*mean, linewidth=2, label=name)
            for curve in curves:
                axis.plot([p[x] for p in curve], [p[2] for p in curve], color=thick.get_color(), alpha=0.3, linewidth=0.8)
    for axis, label in zip(axes, ("seconds of RL", "samples trained"), strict=True):
        axis.set_xlabel(label, fontsize=9)
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("training reward", fontsize=9)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def summarise(options: argparse.Namespace) -> None:
    found = [json.loads(line) for line in options.summarise.read_text().splitlines()]
    lines = [line for line in found if "mode" in line]
    warm = "".join(f"Warm-up: {w['steps']} steps in {w['seconds']:.0f} s. " for line in found if (w := line.get("warm_up")))
    failed, runs = ([run for run in lines if ("error" in run) == wanted] for wanted in (True, False))
    for run in failed:
        say(f"failed: {run['mode']}, seed {run['seed']}: {run['error'][-600:]}")
    if not runs:
        raise SystemExit(f"{options.summarise} has no complete run")
    text = tables(runs)
    print(text)
    options.summarise.with_suffix(".md").write_text(
        "# Learning on GPUs: reward over time, synchronous and asynchronous\n\n    benchmarks/bench_gpu_learning.py\n\n"
        f"The recipe is recipes/gpu_reasoning.yaml. Runs and curves: {options.summarise.name}; {len(failed)} runs failed.\n"
        f"{warm}Held-out figures are means over the tasks.\n\n{text}\n"
    )
    if options.plot:
        plot(runs, options.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value, for the warm-up and every run")
    parser.add_argument("--gpus", type=int, default=4, help="an even number: each run takes a pair; 0 is the CPU")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sync", "async"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a warmed-up model: no warm-up")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu_learning", help="of the warm-up and the runs")
    parser.add_argument(
        "--budget-s", type=float, default=0, help="seconds from the start after which no run may end; 0 sets no limit"
    )
    parser.add_argument("--run-timeout-s", type=float, help="seconds that one run may take, its start included")
    parser.add_argument("--write", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_learning", help="write PATH.jsonl")
    parser.add_argument("--summarise", type=Path, help="run nothing: make PATH.md of an earlier PATH.jsonl")
    parser.add_argument("--plot", type=Path, help="with --summarise: plot the curves as SVG, PNG or PDF")
    options = parser.parse_args()
    if options.gpus % 2:
        parser.error(f"--gpus {options.gpus} must be even: each run takes a pair")
    if options.summarise:
        summarise(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
