"""`millrace calibrate` and `millrace plan`."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from millrace.cli.console import Json, Overrides, Recipe, open_console, report
from millrace.errors import bad_value

_Machine = Annotated[
    str | None,
    typer.Option(help="Name of the kind of machine. By default it is that of this machine."),
]


def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", show_default=False)],
    out: Annotated[Path, typer.Option(help="File of the costs.")] = Path("costs.json"),
    machine: _Machine = None,
    json_: Json = False,
) -> None:
    """Fit the costs of a model on a kind of machine from the accounts of finished runs.

    The costs are those of a decode step, of reading, of training, of a sync, of a hand-over and of
    rewards. All versions of all runs count, so runs with different slots and modes show more. Each
    cost has an interval, and the share of held-out versions in it is printed: it should be 0.9.

    Type it on the machine of the runs, because a run's folder does not name its machine.

    Example: millrace calibrate runs/quickstart-1 runs/quickstart-2 --out costs.json
    """
    from millrace.extras.plan.costs import save
    from millrace.extras.plan.fit import calibrate as fitted
    from millrace.extras.plan.fit import machine_here, read

    here, size = machine_here()
    found = [read(folder) for folder in runs]
    costs = fitted(found, machine or here, size if machine in (None, here) else 0)
    save(costs, out)
    lines = [f"{costs.model}; {costs.engine}; {costs.machine}", ""]
    for name, term in costs.shares().items():
        parts = ", ".join(f"{key} {value:.3g}" for key, value in term.values.items() if value)
        held = (
            f"{term.held_out:.0%} of held-out versions" if term.held_out else "too few to hold out"
        )
        lines.append(f"{name}: {parts or 0}; interval {term.low:+.0%} to {term.high:+.0%}, {held}")
    lines += ["", f"costs in {out}: millrace plan RECIPE --gpus N --costs {out}"]
    report(json_, {"costs": str(out), **_terms(costs)}, "\n".join(lines))


def _terms(costs: Any) -> dict[str, Any]:
    return {
        name: {"low": t.low, "high": t.high, "held_out": t.held_out, "points": t.points, **t.values}
        for name, t in costs.shares().items()
    }


def plan(
    path: Recipe = None,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="GPUs of all nodes. On a CPU: processes.")] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    costs: Annotated[Path, typer.Option(help="File of `millrace calibrate`.")] = Path("costs.json"),
    machine: _Machine = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Most versions between admission and training.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, help="Money that a GPU costs per hour.")] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = min(2, os.cpu_count() or 1),
    json_: Json = False,
) -> None:
    """Predict the three best ways to run a recipe on a number of GPUs, before it starts.

    The real loops and the real Ledger run on a virtual clock, over the costs that `millrace
    calibrate` fitted. The search tries modes, splits, slots, staleness, lookahead, require_batches
    and trigger_parameter_sync_step, as far as the memory estimate allows. A version keeps its number
    of samples. A KEY=VALUE that you give is kept: `mode=async_partial` plans that mode alone.

    An interval holds the measured seconds nine times in ten if the next run is like those of the
    calibration. Short runs of the plan show whether it is: docs/planning.md.

    Example: millrace plan quickstart --gpus 2 --costs costs.json
    """
    if not path:
        raise typer.BadParameter("RECIPE is missing, for example quickstart")
    for key, value in (("--gpus", gpus), ("--nodes", nodes)):
        if value < 1:
            raise bad_value(key, value, "must be at least 1", f"{key} 1, or more")
    from millrace.extras.plan.costs import load
    from millrace.extras.plan.fit import machine_here
    from millrace.extras.plan.search import Search

    found = load(costs)
    here = machine or machine_here()[0]
    if found.machine != here:
        rule = f"has the costs of {found.machine}, and the plan is for {here}"
        raise bad_value("--costs", str(costs), rule, f"--machine '{found.machine}', to plan for it")
    search = Search(path, overrides or [], found, gpus, nodes, max_lag)
    columns = (TextColumn("simulating"), BarColumn(), TimeElapsedColumn())
    console = open_console(json_)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        plans = search.run(jobs, lambda done, of: progress.update(task, completed=done, total=of))
    text = [
        line
        for k, one in enumerate(plans, 1)
        for line in _described(k, one, [path, *(overrides or [])], price, found)
    ]
    turns = search.turns
    first = plans[0].schedule
    if first.colocated and not first.staleness_threshold:
        text.append("Synchronous turns are best here: no asynchronous plan is faster.")
    elif turns is not None:
        gain = turns.gpu_s / plans[0].gpu_s
        text.append(f"Plan 1 is {gain:.2f} times as fast as the best synchronous turns.")
    if _asks_other_cores(found):
        text.append("Devices share the cores of one CPU: more of them are slower than predicted.")
    given = [{**asdict(one), "gpu_s": one.gpu_s, "constraint": one.constraint} for one in plans]
    report(json_, {"plans": given}, "\n".join(text))


def _asks_other_cores(costs: Any) -> bool:
    return str(costs.machine).startswith("CPU")


def _described(number: int, one: Any, recipe: list[str], price: float, costs: Any) -> list[str]:
    """Return a plan as lines."""
    o, s = one.outcome, one.schedule
    memory = ", ".join(f"{side} {n / 2**30:.1f} GiB" for side, n in one.memory.items())
    money = f", {one.gpu_s / 3600 * price * 1000:.4g} for 1,000 samples" if price else ""
    lacks = " (no calibrated run had this placement)" if costs.lacks(s.colocated) else ""
    steps = s.lag_bound * s.require_batches * s.trigger_parameter_sync_step
    return [
        f"{number}. {one.choice.mode}: {o.seconds:.3g} s for a version of {s.window} samples, "
        f"{one.low:.3g} to {one.high:.3g}; {s.window / o.seconds:.4g} samples/s{lacks}",
        f"   idle: trainer {o.trainer_idle:.0%}, rollouts {o.rollouts_idle:.0%}; staleness: "
        f"{o.staleness:.2f} versions on average, at most {s.lag_bound} ({steps} optimizer steps)",
        f"   {one.gpu_s:.3g} GPU-seconds a sample{money}; memory of a device: "
        f"{memory or 'unknown, because only the data decides the size of the model'}",
        f"   bound by {one.constraint}",
        f"   millrace train {shlex.join([*recipe, *one.overrides])}",
        "",
    ]
