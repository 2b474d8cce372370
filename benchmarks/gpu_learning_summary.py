"""The tables and the plot of bench_gpu_learning.py, from the lines that it wrote."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Run = dict[str, Any]
MODES = {"sync": "colocate_sync", "async": "async_partial", "pipeline": "on_policy_pipeline"}
SMOOTH = 5
"""Number of versions in a smoothed reward."""


def held_out(values: dict[str, float], kind: str) -> float:
    """Return the mean over tasks of `mean@K` or `greedy`."""
    return statistics.mean(
        value for name, value in values.items() if name.rsplit("/", 1)[1].startswith(kind)
    )


def smoothed(run: Run) -> Iterator[tuple[float, float]]:
    """Return (seconds, mean reward of the last `SMOOTH` versions)."""
    rewards = [reward for _, _, reward in run["curve"]]
    for i in range(min(SMOOTH, len(rewards)) - 1, len(rewards)):
        yield run["curve"][i][0], statistics.mean(rewards[max(0, i - SMOOTH + 1) : i + 1])


def common_level(runs: list[Run]) -> float:
    """Return the highest multiple of 0.05 that every run's smoothed reward reaches."""
    return int(20 * min(max(reward for _, reward in smoothed(run)) for run in runs)) / 20


def spread(values: list[float], digits: int = 3) -> str:
    middle = f"{statistics.mean(values):.{digits}f}"
    return (
        middle
        if len(values) == 1
        else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"
    )


def tables(runs: list[Run]) -> str:
    level = common_level(runs)
    rows: dict[str, Any] = {
        "seeds": lambda group: str(len(group)),
        "samples trained": lambda group: str(group[0]["samples"]),
        "held out, sampled, before": lambda group: spread(
            [held_out(run["val_before"], "mean@") for run in group]
        ),
        "held out, sampled, after": lambda group: spread(
            [held_out(run["val"], "mean@") for run in group]
        ),
        "held out, greedy, before": lambda group: spread(
            [held_out(run["val_before"], "greedy") for run in group]
        ),
        "held out, greedy, after": lambda group: spread(
            [held_out(run["val"], "greedy") for run in group]
        ),
        "seconds of RL": lambda group: spread([run["rl_seconds"] for run in group], 1),
        f"seconds to a training reward of {level:.2f}": lambda group: spread(
            [next(at for at, reward in smoothed(run) if reward >= level) for run in group], 1
        ),
        "mean staleness, versions": lambda group: spread([run["staleness"] for run in group], 2),
        "idle trainer": lambda group: spread([run["idle_trainer"] for run in group], 2),
        "idle rollouts": lambda group: spread([run["idle_rollouter"] for run in group], 2),
        "runs with an alarm": lambda group: str(sum(bool(run["alarms"]) for run in group)),
        "time in switches and syncs": lambda group: spread(
            [
                sum(run["shares"][name] for name in ("switch", "sync_transfer", "sync_activate"))
                for run in group
            ],
            2,
        ),
    }
    by_mode = {mode: [run for run in runs if run["mode"] == mode] for mode in MODES}
    by_mode = {mode: group for mode, group in by_mode.items() if group}
    lines = [
        f"| mean over seeds (min to max) | {' | '.join(MODES[mode] for mode in by_mode)} |",
        "|---|" + "--:|" * len(by_mode),
    ]
    lines += [
        f"| {name} | {' | '.join(of(group) for group in by_mode.values())} |"
        for name, of in rows.items()
    ]
    tasks = sorted(name.split("/")[1] for name in runs[0]["val"] if name.endswith("/greedy"))
    lines += [
        "",
        f"| held out, sampled: before, after | {' | '.join(MODES[mode] for mode in by_mode)} |",
        "|---|" + "--:|" * len(by_mode),
    ]
    for task in tasks:
        cells = [", ".join(spread_of_task(group, task)) for group in by_mode.values()]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread_of_task(runs: list[Run], task: str) -> tuple[str, str]:
    def mean(values: str) -> str:
        group = [
            v
            for run in runs
            for name, v in run[values].items()
            if name.startswith(f"val/{task}/mean@")
        ]
        return f"{statistics.mean(group):.3f}"

    return mean("val_before"), mean("val")


def plot(runs: list[Run], path: Path) -> None:
    """Plot training reward over seconds and over samples.

    Thin lines are seeds. Thick lines are their means, version by version.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for mode, name in MODES.items():
        curves = [run["curve"] for run in runs if run["mode"] == mode]
        for axis, x in zip(axes, (0, 1), strict=True) if curves else ():
            versions = list(zip(*curves, strict=True))
            mean = [
                [statistics.mean(point[k] for point in points) for points in versions]
                for k in (x, 2)
            ]
            (thick,) = axis.plot(*mean, linewidth=2, label=name)
            for curve in curves:
                axis.plot(
                    [p[x] for p in curve],
                    [p[2] for p in curve],
                    color=thick.get_color(),
                    alpha=0.3,
                    linewidth=0.8,
                )
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
    runs = [line for line in found if "seed" in line]
    if not runs:
        raise SystemExit(f"{options.summarise} has no complete run")
    note = "".join(f"**{line['note']}**\n\n" for line in found if "note" in line)
    warm = "".join(
        f"Warm-up: {w['steps']} steps in {w['seconds']:.0f} s. "
        for line in found
        if (w := line.get("warm_up"))
    )
    text = tables(runs)
    print(text)
    options.summarise.with_suffix(".md").write_text(
        "# Learning on GPUs: reward over time, synchronous and asynchronous\n\n"
        "    benchmarks/bench_gpu_learning.py\n\n"
        f"The recipe is gpu_reasoning, on {runs[0]['gpus']} GPUs. "
        f"Runs and curves: {options.summarise.name}.\n"
        f"{warm}Held-out figures are means over the tasks.\n\n{note}{text}\n"
    )
    if options.plot:
        plot(runs, options.plot)
