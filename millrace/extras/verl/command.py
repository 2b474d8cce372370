"""`millrace import-verl`: a launch script of verl's becomes a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from millrace.config import recipe
from millrace.config.packaged import packaged
from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.importing import import_layer
from millrace.extras.verl.script import Script, read

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
        "--set", metavar="NAME=VALUE", help="Value of a variable that the script does not set."
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
    found = read(_text(script), _variables(set_ or []))
    if not found.overrides:
        rule = "has no overrides: no word of the form section.key=value"
        raise bad_value("SCRIPT", str(script), rule, "the script that starts verl's program")
    base = base or _of_config(found.config) or found.base or _guess(found)
    typer.echo(_recipe(script, found, base, drop), nl=False)


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
            raise bad_value("--set", item, "must be of the form NAME=VALUE", "--set GPUS=8")
    return dict(item.split("=", 1) for item in given)


def _of_config(name: str) -> str:
    """Return the recipe of a --config-name. Raises ConfigError if it is not one of verl's."""
    if not name:
        return ""
    recipe = f"verl/{name.removesuffix('.yaml')}"
    if recipe not in packaged():
        rule = "the script has this --config-name, whose file millrace does not read"
        fix = "--base verl/ppo_trainer, with the file's settings as overrides in the script"
        raise bad_value("--config-name", name, rule, fix)
    return recipe


def _guess(script: Script) -> str:
    """Return the recipe of the trainer whose keys the overrides have."""
    keys = {override.lstrip("+").partition("=")[0] for override in script.overrides}
    if any(key.startswith("async_training.") for key in keys):
        return "verl/fully_async_ppo_trainer"
    return "verl/one_step_off_ppo_trainer" if "rollout.nnodes" in keys else "verl/ppo_trainer"


def _recipe(script: Path, found: Script, base: str, drop: bool) -> str:
    """Return the text of the recipe. Raises ConfigError for a setting that cannot be translated."""
    try:
        layer = import_layer(base, found.overrides, drop=drop)
    except ConfigError as error:
        if drop or "millrace does not have" not in str(error):
            raise
        raise ConfigError(f"{error}\nwith --drop, absent features are left out") from None
    lines = [
        f"# verl's settings of {script.name}, in millrace's words. Comments have verl's spelling.",
        f"inherits: {base}",
        *_emit(layer.tree, layer.comments, ()),
    ]
    for title, items in (("needless here", layer.needless), ("left out", layer.absent)):
        lines += [f"# {title}:", *(f"#   {item}" for item in items)] if items else []
    return "\n".join(lines) + "\n"


def _emit(tree: dict[str, Any], comments: dict[str, str], path: tuple[str, ...]) -> list[str]:
    lines = []
    for key, value in tree.items():
        indent, name = "  " * len(path), ".".join((*path, key))
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_emit(value, comments, (*path, key))]
            continue
        text = yaml.safe_dump(recipe.without_references(value), default_flow_style=True, width=1000)
        comment = f"  # {comments[name]}" if name in comments else ""
        lines.append(f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}{comment}")
    return lines
