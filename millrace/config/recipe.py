"""Recipes and overrides become a Config.

Later layers win: the file that `inherits` names, then the recipe, then the command line. A `mode`
replaces the keys of the Schedule that the layers below it set. A key in the same layer as the mode,
or in a later one, overrides the mode.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from millrace.config.checks import check
from millrace.config.explain import all_keys, describe, explain, no_section, section_of
from millrace.config.keys import Config
from millrace.config.layers import Tree, file_layers, merge, override_layer
from millrace.config.packaged import find
from millrace.config.vllm_checks import check_unread
from millrace.config.warm_up import dropped
from millrace.errors import ConfigError, bad_value
from millrace.schedule.modes import MODES

__all__ = ["Tree", "all_keys", "describe", "dump", "load", "parse", "resolve"]


def load(recipe: str | Path, *overrides: Sequence[str], keep_warm_up: bool = False) -> Config:
    """Return the Config of a recipe and `key=value` overrides.

    `recipe` is a file or the name of a packaged recipe. Each sequence of overrides is a layer.
    `keep_warm_up` says that the warm-up is what the command is for, whatever sets the model.
    Raises ConfigError before anything is built.
    """
    path = find(Path(recipe), Path())
    layers = [*file_layers(path), *map(override_layer, overrides)]
    tree = resolve(layers)
    tree.setdefault("name", re.sub(r"[^\w.-]+", "-", path.stem))
    note = "" if keep_warm_up else dropped(tree, layers)
    config = parse(tree)
    check_unread(config.rollout)
    return config.with_notes(note) if note else config


def parse(tree: Tree) -> Config:
    """Validate; errors name the key, the value, the rule and the fix."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e) for e in error.errors())) from None
    check(config)
    return config


def resolve(layers: Sequence[Tree]) -> Tree:
    """Merge layers, later over earlier, with each layer's `mode` applied under its own keys."""
    merged: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            if not isinstance(value, dict) and (
                section := section_of(getattr(Config.model_fields.get(key), "annotation", None))
            ):
                raise no_section(key, value, section)
        own = layer.get("async_training") or {}
        if mode := layer.get("mode"):
            _apply_mode(merged, mode)
        merge(merged, layer)
        schedule = merged.setdefault("async_training", {})
        if "partial_rollout" in own and "on_sync" not in own:
            schedule["on_sync"] = "interrupt" if own["partial_rollout"] is True else "drain"
        elif "on_sync" in own and "partial_rollout" not in own:
            schedule.pop("partial_rollout", None)
    _train_batch(merged, layers)
    return merged


def _apply_mode(merged: Tree, mode: object) -> None:
    if not isinstance(mode, str) or mode not in MODES:
        near = difflib.get_close_matches(str(mode), MODES, 1, 0.5)
        raise bad_value(
            "mode",
            mode,
            "no such mode",
            f"mode={near[0] if near else '<name>'}, one of {', '.join(MODES)}",
        )
    merged["async_training"] = MODES[mode].over(merged.get("async_training", {}))
    merged["mode"] = mode


def _train_batch(merged: Tree, layers: Sequence[Tree]) -> None:
    """Set the trigger from data.train_batch_size, in modes whose window it is."""
    batch, mode = merged.get("data", {}).get("train_batch_size", 0), merged.get("mode")
    if not (batch and mode and MODES[mode].batch_is_window):
        return
    schedule, actor = merged["async_training"], merged.get("actor", {})
    mini = actor.get(
        "ppo_mini_batch_size", Config.model_fields["actor"].default.ppo_mini_batch_size
    )
    require = schedule.get("require_batches", 1)
    if not all(isinstance(n, int) and n > 0 for n in (batch, mini, require)):
        return  # `parse` says what is wrong with it
    step = mini * require
    if batch % step:
        raise bad_value(
            "data.train_batch_size",
            batch,
            f"must be a multiple of actor.ppo_mini_batch_size x async_training.require_batches = {step}",
            f"data.train_batch_size={max(step, batch // step * step)}",
        )
    said_batch = [
        i for i, layer in enumerate(layers) if "train_batch_size" in (layer.get("data") or {})
    ]
    said_trigger = [
        i
        for i, layer in enumerate(layers)
        if "trigger_parameter_sync_step" in (layer.get("async_training") or {})
    ]
    if max(said_batch) > max(
        said_trigger, default=-1
    ):  # said beside or after the batch, the two must agree: `parse` checks
        schedule["trigger_parameter_sync_step"] = batch // step


def dump(config: Config) -> str:
    """The resolved configuration as YAML: a recipe that makes the same run. ASCII: PyYAML does not
    read all else as it wrote it."""
    text: str = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]  # PyYAML has no types
    """Quotes what begins like a number: recipes are read by rules that know more numbers than
    PyYAML's own, such as 0E0."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="'" if text[:1] in "+-.0123456789" else None
    )


_Dumper.add_representer(str, _text)
