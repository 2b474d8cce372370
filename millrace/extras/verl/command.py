"""`millrace import-verl`: a launch script of verl's becomes a recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from millrace.cli.console import configuration
from millrace.config import recipe
from millrace.config.layers import is_native
from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.importing import import_layer
from millrace.extras.verl.kinds import Mapped
from millrace.extras.verl.script import Script, read, short
from millrace.extras.verl.translate import entry

ScriptFile = Annotated[
    Path,
    typer.Argument(
        metavar="SCRIPT",
        help="A launch script, or a file with one override in each line; - reads stdin",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Value of a variable, words of an array, or section.key=value in place of the script's.",
    ),
]
Base = Annotated[
    str,
    typer.Option(
        help="Recipe with verl's defaults. Empty takes the one of the program that the script "
        "starts.",
        show_default=False,
    ),
]
Drop = Annotated[
    bool,
    typer.Option("--drop", help="Leave out settings of features that millrace does not have."),
]


def import_verl(script: ScriptFile, set_: Sets = None, base: Base = "", drop: Drop = False) -> None:
    """Print the recipe that does what a launch script of verl's does.

    The script is read and not executed. Each line of the recipe has verl's setting as a comment.

    Example: millrace import-verl run_dapo_7b.sh > my.yaml
    """
    given, text = set_ or [], _text(script)
    replaced = [
        item
        for item in given
        if "." in (key := item.partition("=")[0]) or (key == "model_engine" and key not in text)
    ]
    answers = _variables([item for item in given if item not in replaced])
    found = read(text, answers, _environment(script), set(map(short, replaced)))
    if not found.overrides and not replaced:
        rule = "has no overrides: no word of the form section.key=value"
        raise bad_value("SCRIPT", str(script), rule, "the script that starts verl's program")
    base = _base(base, found)
    names = set(map(short, found.overrides))
    replaced += [f"{name}={value}" for name, value in answers.items() if name in names]
    meant = set(map(_meaning, replaced))
    kept = [word for word in found.overrides if _meaning(word) not in meant]
    found.overrides = [*kept, *replaced]
    typer.echo(_recipe(script, found, base, drop), nl=False)


def _meaning(override: str) -> str:
    """Return the key of millrace that an override sets, or its own key."""
    row = entry(short(override), is_native)
    return row.to if isinstance(row, Mapped) and "*" not in row.to else short(override)


def _environment(script: Path) -> dict[str, str]:
    """Return the variables of the caller's environment that scripts build paths from."""
    path = os.path.abspath(script)
    known = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    return {**known, "PWD": os.getcwd(), "0": path, "BASH_SOURCE": path}


def _text(script: Path) -> str:
    if str(script) == "-":
        return sys.stdin.read()
    try:
        return script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}"
        raise bad_value("SCRIPT", str(script), rule, "the path of a launch script") from None


def _variables(given: list[str]) -> dict[str, str]:
    for item in given:
        if not item.partition("=")[0].isidentifier() or "=" not in item:
            fix = f"--set {item if item.isidentifier() else 'GPUS'}=VALUE"
            raise bad_value("--set", item, "must be of the form NAME=VALUE", fix)
    return dict(item.split("=", 1) for item in given)


def _base(given: str, script: Script) -> str:
    """Return the recipe with verl's defaults. Raises ConfigError if the script's is not known."""
    if script.config:
        found = configuration(script.config)
        if not found and not given:
            rule = "the script has this --config-name, whose file millrace does not read"
            base = script.base or "verl/ppo_trainer"
            fix = f"--base {base}, with the file's settings as overrides in the script"
            raise bad_value("--config-name", script.config, rule, fix)
        base, added = found or ("", [])
        script.overrides[:0] = added
        return given or base
    return given or script.base or _guess(script)


def _guess(script: Script) -> str:
    """Return the recipe of the trainer whose keys the overrides have."""
    if script.program:
        rule = (
            "is none of verl's trainers that millrace has: main_ppo, one_step_off and fully_async"
        )
        fix = "--base verl/ppo_trainer, if it trains as verl's main_ppo does"
        raise bad_value("SCRIPT", script.program, rule, fix)
    keys = {override.lstrip("+").partition("=")[0] for override in script.overrides}
    if any(key.startswith("async_training.") for key in keys):
        return "verl/fully_async_ppo_trainer"
    return "verl/one_step_off_ppo_trainer" if "rollout.nnodes" in keys else "verl/ppo_trainer"


def _recipe(script: Path, found: Script, base: str, drop: bool) -> str:
    """Return the text of the recipe. Raises ConfigError for a setting that cannot be translated."""
    try:
        layer = import_layer(base, found.overrides, drop=drop)
    except ConfigError as error:
        if drop or not any(f"{words} " in str(error) for words in _DROPPED):
            raise
        raise ConfigError(f"{error}\nwith --drop, such settings are left out") from None
    lines = [
        f"# verl's settings of {script.name}, in millrace's words. Comments have verl's spelling.",
        *_listed("unknown to verl: decide about each", layer.unknown),
        *_listed("not read: --set NAME=VALUE for each variable that it sets", found.sourced),
        f"inherits: {base}",
        *_emit(layer.tree, layer.comments, ()),
    ]
    needless = list(layer.needless)
    if found.folder:
        needless.append(f"--config-path={found.folder}: the name alone says which of verl's it is")
    lines += [*_listed("needless here", needless), *_listed("left out", layer.absent)]
    return "\n".join(lines) + "\n"


_DROPPED = ("millrace does not have", "neither verl nor millrace has", "none can be removed")
"""Words of the errors for settings that --drop leaves out."""


def _listed(title: str, items: list[str]) -> list[str]:
    return [f"# {title}:", *(f"#   {_one_line(item)}" for item in items)] if items else []


def _one_line(text: str) -> str:
    """Return a comment's text without an end of a line, after which it would be a setting."""
    return " ".join(text.splitlines())


def _emit(tree: dict[str, Any], comments: dict[str, str], path: tuple[str, ...]) -> list[str]:
    lines = []
    for key, value in tree.items():
        indent, name = "  " * len(path), ".".join((*path, key))
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_emit(value, comments, (*path, key))]
            continue
        text = yaml.safe_dump(recipe.without_references(value), default_flow_style=True, width=1000)
        comment = f"  # {_one_line(comments[name])}" if name in comments else ""
        lines.append(f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}{comment}")
    return lines
