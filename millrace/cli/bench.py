"""`millrace bench`: the commands."""

from __future__ import annotations

from collections.abc import Coroutine
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

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure modes, training, and the weight sync, of a recipe on these devices.",
)


@bench.command(name="sync")
def bench_sync(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    repeats: Annotated[int, typer.Option(min=1, help="Syncs of an idle and of a busy engine.")] = 5,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """What a weight sync costs: bytes, transfer, pause, and the share of what the link can carry."""
    config = configure(path, overrides_on(address, overrides), json_, dry_run, help_config)
    from millrace.bench.sync import bench_sync as work

    found = run_async(
        json_,
        config.name,
        "bench sync",
        lambda progress: work(config, progress, repeats),
        lambda: False,
    )
    lines = [
        f"{found['bytes'] / 1e6:,.1f} MB over {found['transport']}; the bare link carries {found['link_gb_per_s']:.4g} GB/s"
    ]
    for load, f in ((load, found[load]) for load in ("idle", "busy") if load in found):
        lines.append(
            f"{load}: transfer {f['transfer_s'] * 1e3:.1f} ms ({f['gb_per_s']:.4g} GB/s, {f['share_of_link']:.0%} of the link), "
            f"pause {f['pause_s'] * 1e3:.1f} ms"
        )
    report(json_, found, "\n".join(lines))


@bench.command(name="train")
def bench_train(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a document.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Timed optimizer steps.")] = 5,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Train engines alone: tokens a second, model FLOPs against the devices' matmuls (MFU), memory."""
    config = configure(path, overrides_on(address, overrides), json_, dry_run, help_config)
    from millrace.bench.train import bench_train as work
    from millrace.errors import bad_value

    limit = config.actor.ppo_max_token_len_per_gpu
    if length > limit:
        raise bad_value(
            "--length",
            length,
            f"actor.ppo_max_token_len_per_gpu = {limit}",
            f"--length {limit} or less",
        )
    found = run_async(
        json_,
        config.name,
        "bench train",
        lambda progress: work(config, progress, length=length, steps=steps),
        lambda: False,
    )
    report(
        json_,
        found,
        f"{found['tokens_per_step']} tokens in {found['step_s']:.3f} s on {found['ranks']} ranks: "
        f"{found['tokens_per_s_per_device']:.0f} tokens/s and {found['model_tflops_per_device']:.4g} TFLOP/s a device, "
        f"MFU {found['mfu']:.1%} of {found['matmul_tflops']:.4g}; {found['peak_memory_gib']:.1f} GiB",
    )


@bench.command(name="modes")
def bench_modes(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    modes: Annotated[
        str, typer.Option(help="Modes, with commas between.")
    ] = "colocate_sync,one_step_off,async_partial",
    splits: Annotated[
        str, typer.Option(help="Devices that train + devices that roll out, with commas between.")
    ] = "1+1",
    uniform: Annotated[
        str, typer.Option(help="Modes that run once more with all responses of the mean length.")
    ] = "",
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each arm; arms on the same engines take turns.")
    ] = 1,
    skip: Annotated[
        int,
        typer.Option(
            min=0, help="First optimizer steps, in no rate; nor is the end, as rollouts run dry."
        ),
    ] = 1,
    folder: Annotated[Path, typer.Option(help="Folder of the runs; must not exist")] = Path(
        "runs/bench-modes"
    ),
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Modes and splits of the same devices on the same samples, in one run. rollout.drawn_lengths makes workloads without weights."""
    overrides = overrides_on(address, overrides)
    config = configure(path, overrides, json_, dry_run, help_config)
    from millrace.bench import modes as work
    from millrace.errors import bad_value

    assert path is not None
    if folder.exists():
        raise bad_value("--folder", str(folder), "is there already", "another folder, or delete it")
    arms = work.arms_of(modes.split(","), splits.split(","), uniform.split(",") if uniform else ())

    figures: list[dict[str, Any]] = []

    def measure(progress: Progress) -> Coroutine[Any, Any, None]:
        return work.bench_modes(
            path, overrides, arms, folder, progress, figures, skip=skip, repeats=repeats
        )

    try:
        run_async(json_, config.name, "bench modes", measure, lambda: False)
    finally:
        if figures:  # also where something ended it: what was measured until then
            done, planned = len(figures), len(arms) * repeats
            text = work.table(figures) + (
                f"\nnot complete: {done} of {planned} runs" if done < planned else ""
            )
            report(
                json_, {"folder": str(folder), "complete": done == planned, "runs": figures}, text
            )
