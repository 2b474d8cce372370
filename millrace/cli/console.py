"""The parts that commands share: options, the recipe, signals, and the last line."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TextIO, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millrace.config import Config, recipe
from millrace.config.explain import hint_of
from millrace.config.keys import Work
from millrace.config.layers import is_native
from millrace.errors import ConfigError, MissingDependency, bad_value
from millrace.observe.panel import plain
from millrace.observe.progress import Progress, make_view
from millrace.persist.run_reader import RunReader
from millrace.run.signals import with_signals
from millrace.waits.registry import began

T = TypeVar("T")

Recipe = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or a name that `millrace recipes` lists, such as quickstart",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as rollout.n=8"),
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        help="verl's name of a base configuration, such as fully_async_ppo_trainer. It takes the "
        "place of RECIPE and means the recipe verl/NAME.",
        show_default=False,
    ),
]
ConfigPath = Annotated[
    str | None,
    typer.Option(help="verl's folder of base configurations. It is not read.", hidden=True),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object as the last line. Progress goes to standard error.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Run on this Ray cluster: HOST:PORT or auto. Sets trainer.runtime and "
        "trainer.ray_address.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the resolved configuration and the derived numbers, then exit."
    ),
]
HelpConfig = Annotated[
    bool,
    typer.Option(
        "--help-config",
        help="Print every key of the configuration, or the KEYs and sections that follow, then exit.",
    ),
]


class _Stream:
    """A standard stream that may close during a run, with its terminal or its pipe.

    The run continues without it, because metrics.jsonl and the checkpoints have what matters.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self._replace()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._replace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _replace(self) -> None:
        """Let the stream write to nowhere from now on."""
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, self._stream.fileno())
        os.close(sink)


def open_console(json_: bool) -> Console:
    """Return the console of a run: standard error with --json, else standard output."""
    return Console(file=cast(TextIO, _Stream(sys.stderr if json_ else sys.stdout)))


def overrides_on(address: str | None, overrides: list[str] | None) -> list[str]:
    """Return the overrides, with those of --address last.

    Raises ConfigError if --address is empty, because a script may have passed an unset variable.
    """
    if address is None:
        return overrides or []
    if not address.strip():
        raise bad_value(
            "--address", address, "names no cluster", "--address HOST:PORT, or --address auto"
        )
    return [*(overrides or []), "trainer.runtime=ray", f"trainer.ray_address={address}"]


def refuse_keys(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a key, or another system's name, that is written as an option."""
    command = next(iter(arguments), "-")
    if command not in ("train", "sft", "eval", "bench") and not command.startswith("-"):
        return  # It takes no keys.

    for i, argument in enumerate(arguments):
        name, equals, value = argument.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not argument.startswith("--") or not (hint := _setting(key)):
            continue
        if not equals and arguments[i + 1 :] and not arguments[i + 1].startswith("-"):
            value = arguments[i + 1]
        fix = hint.replace("VALUE", value) if value else hint
        raise bad_value(f"--{name}", value, "is no option; a setting has no dashes", fix)


def _setting(key: str) -> str:
    """Return the override that sets a key, or that has the meaning of another system's name."""
    if key in {name for name, _ in recipe.all_keys()}:
        return f"{key}=VALUE"
    return hint[0] if (hint := hint_of(key)) else ""


def base_of(
    path: str | None, overrides: list[str] | None, name: str | None, folder: str | None
) -> tuple[str | None, list[str] | None]:
    """Return the recipe and the overrides, with verl's --config-name in place of RECIPE.

    Raises ConfigError if the name is not one of verl's, or if --config-path stands alone.
    """
    from millrace.config.packaged import packaged

    if name is None and folder is None:
        return path, overrides
    if (found := configuration(name or "")) is None:
        key, value = ("--config-name", name) if name is not None else ("--config-path", folder)
        known = [recipe.removeprefix("verl/") for recipe in packaged() if recipe[:5] == "verl/"]
        rule = "millrace has the base configurations of verl's trainers, and reads no folder"
        raise bad_value(key, value, rule, f"--config-name {' or '.join(known)}, or a RECIPE")
    base, added = found
    if path is not None and "=" not in path:
        rule = f"--config-name {name} names a recipe too"
        raise bad_value("RECIPE", path, rule, f"one of them, or {base} as RECIPE")
    return base, [*added, *([path] if path is not None else []), *(overrides or [])]


def configuration(name: str) -> tuple[str, list[str]] | None:
    """Return the recipe of one of verl's configurations and what it adds, or None for another."""
    form = r"(?:transfer_queue_)?((?:one_step_off_|fully_async_)?ppo_)(megatron_)?trainer(\.yaml)?"
    # What dapo_trainer adds to ppo_trainer is off.
    match = re.fullmatch(form, re.sub("^dapo_", "ppo_", name))
    engine = ["model_engine=megatron"] if match and match[2] else []
    return (f"verl/{match[1]}trainer", engine) if match else None


def configure(
    path: str | None,
    overrides: list[str],
    json_: bool,
    dry_run: bool,
    help_config: bool,
    *,
    work: Work = "eval",
) -> Config:
    """Return the Config, or print what an option asks for and exit.

    A dry run of a training finds the run's folder and what its resume refuses, too.
    """
    if help_config:
        _print_keys([path or "", *overrides], json_)
        raise typer.Exit
    if not path:
        raise typer.BadParameter("RECIPE is missing, for example quickstart")
    config = recipe.load(path, overrides, keep_warm_up=work == "sft")
    if dry_run:
        from millrace.run import problems
        from millrace.run.algorithms import try_algorithms
        from millrace.run.folder import find_run
        from millrace.run.machine import check_machine, check_shape
        from millrace.run.session import check_end

        try:
            check_machine(config)
        except (ConfigError, MissingDependency) as lack:  # another machine may run it
            _note(f"this machine cannot run it: {lack}")
        for note in config.notes:
            _note(note)
        checkpoint, trains = None, work != "eval"
        if trains and not config.trainer.val_only:
            _, checkpoint, notes = find_run(config)
            for note in notes if checkpoint is None else (*notes, f"it resumes from {checkpoint}"):
                _note(note)
        for line in config.translated:
            typer.echo(f"  {line}", err=True)
        if trains:
            try_algorithms(config, _note)
        from millrace.run.agents import described

        lines: list[tuple[str, str]] = []
        agents = config.agents
        rows = problems.prompts_of_an_epoch(
            config,
            work=work,
            inspect=(lambda t: lines.extend(described(agents, t))) if agents.agent_kind else None,
            note=_note,
            resume_from=checkpoint,
        )
        if checkpoint is not None:
            check_end(config, rows, checkpoint)
        check_shape(config.model, config.actor, config.trainer)
        _print_dry_run(config, rows, json_, lines)
        raise typer.Exit
    return config


def _note(text: str) -> None:
    typer.echo(text if text.startswith("warning: ") else f"note: {text}", err=True)


def _print_dry_run(
    config: Config, rows: int, json_: bool, agents: Sequence[tuple[str, str]]
) -> None:
    """Print the configuration, the numbers that follow from it, and the memory of each device.

    `rows` is the number of training prompts, and `agents` describes who plays.
    """
    from millrace.run.memory import estimate, size_of

    derived, limits = asdict(config.derived(rows)), config.limits(rows)
    size = size_of(config.model)
    batch = config.largest_batch
    memory = estimate(config, size, **batch) if size is not None else {}
    if json_:
        whole = {"config": config.model_dump(mode="json"), "derived": derived, "memory": memory}
        whole |= {"limits": limits, "memory_assumes": batch, "agents": dict(agents)}
        print_json({**whole, "translated": list(config.translated)})
        return
    typer.echo(recipe.dump(config))
    table = Table(title="derived", box=None, show_header=False)
    for name, value in derived.items():
        table.add_row(name, f"{value:,}")
    for key, samples in limits.items():
        ends = " (ends the run)" if key == config.end(rows)[0] else ""
        table.add_row(f"samples by {key}", f"{samples:,}{ends}")
    if memory:
        filled = "a full micro-batch" if batch["micro_batches"] > 1 else "all rows at their longest"
        table.add_row("trainer tokens a device, assumed", f"{batch['tokens']:,}: {filled}")
    for side, parts in memory.items():
        for name, count in {**parts, "sum": sum(parts.values())}.items():
            table.add_row(f"{side} GiB a device, estimate: {name}", f"{count / 2**30:,.1f}")
    for name, text in agents:
        table.add_row(name, text)
    Console().print(table)


def _print_keys(words: list[str], json_: bool) -> None:
    """Print every key with its type, default and meaning, or those that `words` begin with.

    A recipe among the words is not read.
    """
    rows = list(recipe.describe())
    known, asked = {row[0] for row in rows}, []
    for word in filter(None, words):
        name = word.partition("=")[0]
        shown = re.sub(r"^teachers\.\w+", "teachers.NAME", name)
        while shown not in known and is_native(name):  # in a mapping with free names
            shown = shown.rpartition(".")[0]
        if shown in known:
            asked.append(shown)
        else:
            _note(f"--help-config reads no recipe and knows no key {word!r}: it is ignored")
    if asked:
        rows = [row for row in rows if any(f"{row[0]}.".startswith(f"{k}.") for k in asked)]
    if json_:
        print_json(
            {
                key: {"type": kind, "default": default, "meaning": meaning}
                for key, kind, default, meaning in rows
            }
        )
        return
    console = Console()
    for key, kind, default, meaning in rows:
        if kind:
            console.print(
                Text.assemble(
                    "  ", (key, "bold"), " ", (f"<{kind}>", "cyan"), " ", (f"= {default}", "dim")
                ),
                soft_wrap=True,
            )
            console.print(f"      {meaning}", highlight=False, markup=False)
        else:
            console.print(Text.assemble("\n", (key, "bold underline"), f"  {meaning}"))


def run_async(
    json_: bool,
    name: str,
    mode: str,
    work: Callable[[Progress], Coroutine[Any, Any, T]],
    request_stop: Callable[[], bool] = lambda: False,
) -> T:
    """Run `work` with a progress display and signal handlers."""
    began("imports")
    with Progress(make_view(open_console(json_)), name, mode) as progress:
        return asyncio.run(with_signals(work(progress), progress, request_stop))


def unwrap_help(*apps: typer.Typer) -> None:
    """Let the terminal wrap the paragraphs of a command's help, in place of the source."""
    for command in (c for app in apps for c in app.registered_commands):
        text = inspect.cleandoc(command.help or command.callback.__doc__ or "")
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def report(json_: bool, result: dict[str, Any], text: str) -> None:
    """Print the result: an object with --json, else the text."""
    if json_:
        print_json(result)
    else:
        typer.echo(text)


def warn(run: RunReader) -> None:
    """Print what is wrong with a run's folder on standard error, as each command on a run does."""
    for note in run.notes:
        typer.echo(f"warning: {plain(note)}", err=True)


_printed = False


def has_printed() -> bool:
    """Return whether this command has printed its JSON object."""
    return _printed


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object as the last line. Numbers that are not finite become null."""
    global _printed
    _printed = True

    def clean(item: Any) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            return None
        if isinstance(item, list | tuple):
            return [clean(v) for v in item]
        return {str(k): clean(v) for k, v in item.items()} if isinstance(item, dict) else item

    print(json.dumps(clean(value), default=str), flush=True)  # noqa: T201 - the command's result
