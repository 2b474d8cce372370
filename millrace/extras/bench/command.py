"""The commands of `millrace bench`."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.cli.console import (
    Address,
    DryRun,
    HelpConfig,
    Json,
    Overrides,
    Recipe,
    configure,
    overrides_on,
    report,
    run_async,
)
from millrace.observe.progress import Progress

_Splits = Annotated[
    str, typer.Option(help="TRAINERS+ROLLOUTS devices, such as 1+1,2+6, separated by commas.")
]
_Skip = Annotated[
    int,
    typer.Option(
        min=0, help="First optimizer steps to leave out. The end of a run is always left out."
    ),
]

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure the modes, the training or the weight sync of a recipe on these devices.\n\n"
    "Example: millrace bench sync quickstart",
)


@bench.command(name="sync")
def bench_sync(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Syncs to time for each load: idle and busy.")
    ] = 5,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Measure a weight sync: bytes, transfer, pause, and share of the link's bandwidth.

    Example: millrace bench sync shapes/qwen2_1.5b --repeats 10
    """
    config = configure(path, overrides_on(address, overrides), json_, dry_run, help_config)
    from millrace.extras.bench.engines import bench_sync as measure
    from millrace.run.session import open_session

    async def work(progress: Progress) -> dict[str, Any]:
        async with open_session(config, progress) as s:
            return await measure(s, repeats)

    result = run_async(json_, config.name, "bench sync", work)
    lines = [
        f"{result['bytes'] / 1e6:,.1f} MB over {result['transport']}; "
        f"the bare link carries {result['link_gb_per_s']:.4g} GB/s"
    ]
    for load, f in ((load, result[load]) for load in ("idle", "busy") if load in result):
        lines.append(
            f"{load}: transfer {f['transfer_s'] * 1e3:.1f} ms ({f['gb_per_s']:.4g} GB/s, "
            f"{f['share_of_link']:.0%} of the link), pause {f['pause_s'] * 1e3:.1f} ms"
        )
    report(json_, result, "\n".join(lines))


@bench.command(name="train")
def bench_train(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each document.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to time.")] = 5,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Measure training alone: tokens per second, MFU and memory.

    MFU is the share of the devices' matmul rate that training reaches.

    Example: millrace bench train shapes/qwen2_1.5b --length 2048
    """
    config = configure(path, overrides_on(address, overrides), json_, dry_run, help_config)
    from millrace.errors import bad_value
    from millrace.extras.bench.engines import bench_train as measure
    from millrace.run.session import open_session

    limit = config.max_tokens
    if length > limit:
        share = f" x {config.context_size} ranks" if config.context_size > 1 else ""
        raise bad_value(
            "--length",
            length,
            f"must be at most actor.ppo_max_token_len_per_gpu{share} = {limit}",
            f"--length {limit} or less",
        )

    async def work(progress: Progress) -> dict[str, Any]:
        async with open_session(config, progress, work="sft") as s:
            return await measure(s, length=length, steps=steps)

    result = run_async(json_, config.name, "bench train", work)
    report(
        json_,
        result,
        f"{result['tokens_per_step']} tokens in {result['step_s']:.3f} s on "
        f"{result['ranks']} ranks: {result['tokens_per_s_per_device']:.0f} tokens/s and "
        f"{result['model_tflops_per_device']:.4g} TFLOP/s per device, MFU {result['mfu']:.1%} of "
        f"{result['matmul_tflops']:.4g}; {result['peak_memory_gib']:.1f} GiB, estimated "
        f"{result['estimated_memory_gib']:.1f}",
    )


@bench.command(name="modes")
def bench_modes(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    modes: Annotated[
        str, typer.Option(help="Modes to measure, separated by commas.")
    ] = "colocate_sync,colocate_partial,one_step_off,async_partial",
    splits: _Splits = "1+1",
    uniform: Annotated[
        str, typer.Option(help="Modes to repeat with all responses at the mean length.")
    ] = "",
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Runs of each mode and split. Runs on the same devices alternate."
        ),
    ] = 1,
    skip: _Skip = 1,
    folder: Annotated[Path, typer.Option(help="New folder for the runs.")] = Path(
        "runs/bench-modes"
    ),
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Compare modes and splits of the same devices on the same samples.

    With rollout.drawn_lengths.enable=true, random weights give realistic response lengths.

    Example: millrace bench modes shapes/qwen2_1.5b --modes colocate_sync,async_partial --splits 1+1
    """
    overrides = overrides_on(address, overrides)
    config = configure(path, overrides, json_, dry_run, help_config)
    from millrace.errors import bad_value
    from millrace.extras.bench import modes as work

    assert path is not None
    if folder.exists():
        raise bad_value("--folder", str(folder), "already exists", "another folder, or delete it")
    arms = work.arms_of(modes.split(","), splits.split(","), uniform.split(",") if uniform else ())

    figures: list[dict[str, Any]] = []

    def measure(progress: Progress) -> Coroutine[Any, Any, None]:
        return work.bench_modes(
            Path(path), overrides, arms, folder, progress, figures, skip=skip, repeats=repeats
        )

    try:
        run_async(json_, config.name, "bench modes", measure)
    finally:
        if figures:  # after an error or a stop, report the runs that are complete
            lines = [work.table(figures), *work.remarks(figures)]
            _report_runs(json_, folder, figures, lines, planned=len(arms) * repeats)


def _report_runs(
    json_: bool, folder: Path, figures: list[dict[str, Any]], lines: list[str], *, planned: int
) -> None:
    """Report the figures of all finished runs, out of `planned` runs."""
    complete = len(figures) == planned
    note = "" if complete else f"\nnot complete: {len(figures)} of {planned} runs"
    result = {"folder": str(folder), "complete": complete, "runs": figures}
    report(json_, result, "\n".join(lines) + note)


@bench.command(name="agents")
def bench_agents(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    modes: Annotated[
        str, typer.Option(help="Modes to measure, separated by commas.")
    ] = "colocate_sync,one_step_off,async_staleness,async_partial,async_swap,colocate_partial",
    splits: _Splits = "1+1",
    staleness: Annotated[
        str,
        typer.Option(
            help="Values of async_training.staleness_threshold, separated by commas: more of it is "
            "more sessions at once. Empty: the recipe's value."
        ),
    ] = "",
    tool: Annotated[
        list[str] | None,
        typer.Option(help="Seconds of a tool's call, MEDIAN,SIGMA,CUT. Repeat it."),
    ] = None,
    turns: Annotated[str, typer.Option(help="Turns of an episode, MEDIAN,SIGMA,CUT.")] = "4,0.5,12",
    draw: Annotated[str, typer.Option(help="Tokens of a turn, MEDIAN,SIGMA,CUT.")] = "16,0.5,64",
    result: Annotated[
        str, typer.Option(help="Tokens of a tool's result, MEDIAN,SIGMA,CUT.")
    ] = "16,0.5,64",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 1,
    skip: _Skip = 1,
    folder: Annotated[Path, typer.Option(help="New folder for the runs.")] = Path(
        "runs/bench-agents"
    ),
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Compare modes and numbers of sessions, for episodes of several turns with slow tools.

    Turns, lengths and delays are drawn, the same ones in every mode.

    Example: millrace bench agents quickstart --tool 0.1,1,2 --tool 1,1,10 --staleness 1,4
    """
    overrides = overrides_on(address, overrides)
    config = configure(path, overrides, json_, dry_run, help_config)
    from millrace.errors import bad_value
    from millrace.extras.bench import agents as work

    assert path is not None
    if folder.exists():
        raise bad_value("--folder", str(folder), "already exists", "another folder, or delete it")
    workloads = work.workloads_of(turns, draw, result, tool or ["1,1,10"])
    arms = work.agent_arms(modes.split(","), splits.split(","), staleness, workloads)
    figures: list[dict[str, Any]] = []

    run = partial(work.bench_agents, Path(path), overrides, arms, folder, skip=skip)
    try:
        work_on = partial(run, figures=figures, repeats=repeats)
        run_async(json_, config.name, "bench agents", work_on)
    finally:
        if figures:  # after an error or a stop, report the runs that are complete
            table = work.agents_table(figures)
            _report_runs(json_, folder, figures, [table], planned=len(arms) * repeats)
