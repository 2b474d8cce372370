"""The commands of the command line: those of the core, and those of extras and other packages."""

from __future__ import annotations

import difflib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from millrace.cli.console import unwrap_help
from millrace.config import plugins
from millrace.errors import ConfigError


class Commands(TyperGroup):
    """The group of all commands. A command of another package is imported when it is typed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *plugins.names("commands")])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or only the line that `--help` needs of another package's command."""
        if cmd_name in self.commands or cmd_name not in plugins.names("commands"):
            return super().get_command(ctx, cmd_name)
        if cmd_name in plugins.OWN["commands"]:
            return _command(cmd_name)
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
            return name, _command(name) if found else self.commands[name], args[1:]
        near = difflib.get_close_matches(name, names, 1)
        if near and near[0] not in core:  # the group below suggests its own commands
            ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


def _command(name: str) -> Any:
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
