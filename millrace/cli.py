"""The command line. Exit codes: 0 the work is complete; 1 it failed; 2 a key, file or row is wrong; 130 and 143 it was told to
stop (Ctrl-C, SIGTERM) and, if it was training, saved a checkpoint first."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from millrace import __version__, recipe
from millrace.config import Config
from millrace.errors import MillraceError, WorkerError
from millrace.observe.progress import Progress, make_view

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous RL post-training of language models.\n\n"
    "Start with [bold]millrace train recipes/quickstart.yaml[/bold]. Every command takes a RECIPE (YAML) and any number of "
    "key=value overrides; [bold]millrace train --help-config[/bold] prints every key.\n\n"
    "Exit codes: 0 complete, 1 failed, 2 a key, file or row is wrong, 130 or 143 stopped by a signal.",
)

Recipe = Annotated[Path | None, typer.Argument(help="YAML recipe, for example recipes/quickstart.yaml", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example rollout.n=8")]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object as the last line of standard output; progress on standard error.")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Run on this Ray cluster, HOST:PORT or auto: trainer.runtime=ray trainer.ray_address=ADDRESS.", show_default=False
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and every derived number, and exit.")]
HelpConfig = Annotated[bool, typer.Option("--help-config", help="Print every key of the configuration, and exit.")]


def version_option(value: bool) -> None:
    if value:
        typer.echo(f"millrace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=version_option, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def train(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Train with RL: rollouts and training at the same time, in the recipe's mode."""
    config = _configure(path, _on(address, overrides), json_, dry_run, help_config)
    from millrace import launch, summary

    mode = config.mode or "custom"
    stop = launch.StopRequest()
    outcome = _run(json_, config.name, mode, lambda progress: launch.train(config, progress, stop), stop.request)
    console = Console(stderr=json_)
    summary.show(console, outcome)
    if json_:
        _print_json(summary.as_json(outcome))
    if not outcome.complete:
        raise typer.Exit(_stopped_by or 1)


@app.command()
def sft(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Supervised warm-up alone: next-token training on the recipe's demonstrations, then a Hugging Face model folder."""
    config = _configure(path, _on(address, overrides), json_, dry_run, help_config)
    from millrace import launch
    from millrace.errors import bad_value

    if not config.sft.steps:
        raise bad_value("sft.steps", 0, "there is nothing to do", "sft.steps=200")
    result = _run(json_, config.name, "sft", lambda progress: launch.supervise(config, progress), lambda: False)
    _report(
        json_,
        result,
        f"loss {result['loss']:.4f} after {result['steps']} steps in {result['seconds']:.1f} s; model: {result['model']}",
    )


@app.command(name="eval")
def evaluate(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Validate on data.val_files: a checkpoint (trainer.resume=FOLDER), a model (model.path=FOLDER) or the start weights."""
    config = _configure(path, _on(address, overrides), json_, dry_run, help_config)
    from millrace import launch

    result = _run(json_, config.name, "eval", lambda progress: launch.evaluate(config, progress), lambda: False)
    _report(json_, result, "  ".join(f"{name} {value:.3f}" for name, value in result["val"].items()))


bench = typer.Typer(no_args_is_help=True, help="Measure modes, training, and the weight sync, of a recipe on these devices.")
app.add_typer(bench, name="bench")


@bench.command(name="sync")
def bench_sync(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    repeats: Annotated[int, typer.Option(min=1, help="Syncs of an idle and of a busy engine.")] = 5,
    json_: Json = False,
) -> None:
    """What a weight sync costs: bytes, transfer, pause, and the share of what the link can carry."""
    config = _configure(path, _on(address, overrides), json_, False, False)
    from millrace.bench.sync import bench_sync as work

    found = _run(json_, config.name, "bench sync", lambda progress: work(config, progress, repeats), lambda: False)
    lines = [f"{found['bytes'] / 1e9:.3f} GB over {found['transport']}; the bare link carries {found['link_gb_per_s']:.1f} GB/s"]
    for load, f in ((load, found[load]) for load in ("idle", "busy") if load in found):
        lines.append(
            f"{load}: transfer {f['transfer_s'] * 1e3:.1f} ms ({f['gb_per_s']:.1f} GB/s, {f['share_of_link']:.0%} of the link), "
            f"pause {f['pause_s'] * 1e3:.1f} ms"
        )
    _report(json_, found, "\n".join(lines))


@bench.command(name="train")
def bench_train(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a document.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Timed optimizer steps.")] = 5,
    json_: Json = False,
) -> None:
    """Train engines alone: tokens a second, model FLOPs against the devices' matmuls (MFU), memory."""
    config = _configure(path, _on(address, overrides), json_, False, False)
    from millrace.bench.train import bench_train as work
    from millrace.errors import bad_value

    limit = config.actor.ppo_max_token_len_per_gpu
    if length > limit:
        raise bad_value("--length", length, f"actor.ppo_max_token_len_per_gpu = {limit}", f"--length {limit} or less")
    found = _run(
        json_, config.name, "bench train", lambda progress: work(config, progress, length=length, steps=steps), lambda: False
    )
    _report(
        json_,
        found,
        f"{found['tokens_per_step']} tokens in {found['step_s']:.3f} s on {found['ranks']} ranks: "
        f"{found['tokens_per_s_per_device']:.0f} tokens/s and {found['model_tflops_per_device']:.1f} TFLOP/s a device, "
        f"MFU {found['mfu']:.1%} of {found['matmul_tflops']:.1f}; {found['peak_memory_gib']:.1f} GiB",
    )


@bench.command(name="modes")
def bench_modes(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    modes: Annotated[str, typer.Option(help="Modes, with commas between.")] = "colocate_sync,one_step_off,async_partial",
    splits: Annotated[str, typer.Option(help="Devices that train + devices that roll out, with commas between.")] = "1+1",
    uniform: Annotated[str, typer.Option(help="Modes that run once more with all responses of the mean length.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each arm; arms on the same engines take turns.")] = 1,
    skip: Annotated[int, typer.Option(min=0, help="First optimizer steps, in no rate; nor is the end, as rollouts run dry.")] = 1,
    folder: Annotated[Path, typer.Option(help="Folder of the runs; must not exist")] = Path("runs/bench-modes"),
    json_: Json = False,
) -> None:
    """Modes and splits of the same devices on the same samples, in one run. rollout.drawn_lengths makes workloads without weights."""
    overrides = _on(address, overrides)
    _configure(path, overrides, json_, False, False)
    from millrace.bench import modes as work
    from millrace.errors import bad_value

    assert path is not None
    if folder.exists():
        raise bad_value("--folder", str(folder), "is there already", "another folder, or delete it")
    arms = work.arms_of(modes.split(","), splits.split(","), uniform.split(",") if uniform else ())

    def run(progress: Progress) -> Coroutine[Any, Any, list[dict[str, Any]]]:
        return work.bench_modes(path, overrides, arms, folder, progress, skip=skip, repeats=repeats)

    figures = _run(json_, path.stem, "bench modes", run, lambda: False)
    _report(json_, {"folder": str(folder), "runs": figures}, work.table(figures))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run folder for its newest one")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist")],
    json_: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face model folder that transformers loads."""
    from millrace import exporting

    result = exporting.export(checkpoint, folder)
    _report(json_, result, f"{result['model']}: {result['parameters']:,} parameters of version {result['version']}")


@app.command()
def ledger(run: Annotated[Path, typer.Argument(help="A run folder")], json_: Json = False) -> None:
    """Account for every sample of a run, over all attempts: admitted, trained, dropped, held, lost, trained twice."""
    import msgspec

    from millrace.errors import bad_value
    from millrace.pipeline.history import audit

    if not (run / "history.jsonl").is_file():
        raise bad_value("RUN", str(run), "has no history.jsonl: not a run folder", "a folder such as runs/quickstart-1")
    result = msgspec.to_builtins(audit(run))
    _report(json_, result, "  ".join(f"{name} {value}" for name, value in result.items()))
    if result["lost"] or result["trained_twice"]:
        raise typer.Exit(1)


@app.command()
def doctor(json_: Json = False) -> None:
    """Check versions, devices, ports, disk and shared memory; say what is missing and the command that installs it."""
    from millrace import checkup

    checks = checkup.run()
    if json_:
        _print_json({"checks": [asdict(c) for c in checks], "complete": all(c.state != "bad" for c in checks)})
    else:
        table = Table(box=None, show_header=False)
        colour = {"good": "green", "warning": "yellow", "bad": "red", "absent": "dim"}
        for check in checks:
            table.add_row(f"[{colour[check.state]}]{check.state}", check.name, check.found, check.fix)
        Console().print(table)
    if any(c.state == "bad" for c in checks):
        raise typer.Exit(1)


# -- what the commands share

_stopped_by: int | None = None


def _on(address: str | None, overrides: list[str] | None) -> list[str]:
    """The overrides, with --address as the last of them. Raises ConfigError for an empty one: an unset variable of a script."""
    from millrace.errors import bad_value

    if address is None:
        return overrides or []
    if not address.strip():
        raise bad_value("--address", address, "names no cluster", "--address HOST:PORT, or --address auto")
    return [*(overrides or []), "trainer.runtime=ray", f"trainer.ray_address={address}"]


def _configure(path: Path | None, overrides: list[str], json_: bool, dry_run: bool, help_config: bool) -> Config:
    """The Config; or print what was asked for and exit."""
    if help_config:
        _print_keys(json_)
        raise typer.Exit
    if path is None:
        raise typer.BadParameter("RECIPE is missing, for example recipes/quickstart.yaml")
    config = recipe.load(path, overrides)
    if dry_run:
        from millrace import problems

        derived = asdict(config.derived(len(problems.load(config).train)))
        if json_:
            _print_json({"config": config.model_dump(mode="json"), "derived": derived})
        else:
            typer.echo(recipe.dump(config))
            table = Table(title="derived", box=None, show_header=False)
            for name, value in derived.items():
                table.add_row(name, str(value))
            Console().print(table)
        raise typer.Exit
    return config


def _print_keys(json_: bool) -> None:
    rows = list(recipe.describe())
    if json_:
        _print_json({key: {"type": kind, "default": default, "meaning": meaning} for key, kind, default, meaning in rows})
        return
    console = Console()
    for key, kind, default, meaning in rows:
        if kind:
            console.print(f"  [bold]{key}[/bold] [cyan]<{kind}>[/cyan] [dim]= {default}[/dim]", highlight=False)
            console.print(f"      {meaning}", highlight=False, markup=False)
        else:
            console.print(f"\n[bold underline]{key}[/bold underline]  {meaning}", highlight=False)


def _run(
    json_: bool, name: str, mode: str, work: Callable[[Progress], Coroutine[Any, Any, T]], request_stop: Callable[[], bool]
) -> T:
    """Run `work` with progress and signals."""
    with Progress(make_view(Console(stderr=json_)), name, mode) as progress:
        return asyncio.run(_with_signals(work(progress), progress, request_stop))


async def _with_signals(work: Coroutine[Any, Any, T], progress: Progress, request_stop: Callable[[], bool]) -> T:
    """The first Ctrl-C or SIGTERM asks the run to save and end; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def on_signal(number: signal.Signals) -> None:
        global _stopped_by
        if _stopped_by is not None:
            os._exit(128 + number)  # workers die with this process
        _stopped_by = 128 + number
        if request_stop():
            progress.note(f"{number.name}: saving a checkpoint, then ending. Once more ends at once, without saving.")
        else:
            progress.note(f"{number.name}: ending; there is no training to save yet.")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return await task


def _report(json_: bool, result: dict[str, Any], text: str) -> None:
    if json_:
        _print_json(result)
    else:
        typer.echo(text)


def _print_json(value: dict[str, Any]) -> None:
    def clean(item: Any) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            return None
        return {k: clean(v) for k, v in item.items()} if isinstance(item, dict) else item

    print(json.dumps(clean(value), default=str), flush=True)  # noqa: T201 - the command's result


def first_cause(error: BaseException) -> BaseException:
    """The first leaf of an exception group that is not a mere cancellation."""
    if isinstance(error, BaseExceptionGroup):
        leaves = [first_cause(e) for e in error.exceptions]
        return next((e for e in leaves if not isinstance(e, asyncio.CancelledError)), leaves[0])
    return error


def main() -> None:
    """Entry point: every failure ends in one readable last line and a documented exit code."""
    try:
        app(standalone_mode=True)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the last boundary: nothing may end as a silent success
        cause = first_cause(error)
        if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt) and _stopped_by:
            sys.exit(_stopped_by)
        if isinstance(cause, MillraceError):
            text = str(cause)
            if isinstance(cause, WorkerError):  # the worker's last words come first: the last line is the one that names it
                text, _, words = text.partition("\n")
                sys.stderr.write(f"{words}\n" if words else "")
            sys.stderr.write(f"error: {text}\n")
            sys.exit(cause.exit_code)
        import traceback

        traceback.print_exception(cause)
        sys.stderr.write(f"error: {type(cause).__name__}: {cause}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
