"""Recipes and overrides become a Config.

Later layers win: first the file that `inherits` names, then the recipe, then the command line. A
`mode` replaces the keys of the Schedule that earlier layers set. A key in the layer of the mode, or
in a later layer, overrides the mode.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from millrace.config.checks import check
from millrace.config.explain import (
    all_keys,
    check_unread,
    describe,
    explain,
    no_section,
    section_of,
    unread_note,
)
from millrace.config.keys import Config
from millrace.config.layers import (
    Tree,
    Updates,
    check_secrets,
    expand,
    file_layers,
    merge,
    settings_of,
    tree_layers,
)
from millrace.config.packaged import find
from millrace.errors import ConfigError, bad_value
from millrace.schedule.modes import MODES, update_steps
from millrace.schedule.schedule import Placement

__all__ = ["Tree", "all_keys", "describe", "dump", "load", "parse", "resolve"]


def load(
    recipe: str | Path | Tree, *overrides: Sequence[str] | Tree, keep_warm_up: bool = False
) -> Config:
    """Return the Config of a recipe and of overrides: `key=value`, or a tree of keys and values.

    `recipe` is a file, the name of a packaged recipe, or a tree. Each sequence or tree of overrides
    is one layer. `keep_warm_up` keeps sft.steps for a command that needs the warm-up, even if a later
    layer sets model.path. Raises ConfigError before anything is built.
    """
    if isinstance(recipe, dict):
        base, name = tree_layers(recipe), "run"
    else:
        path = find(Path(recipe), Path())
        base, name = file_layers(path), re.sub(r"[^\w.-]+", "-", path.stem)
    layers, notes, translated = expand([*base, *map(settings_of, overrides)])
    tree = resolve(layers)
    tree.setdefault("name", name)
    check_secrets(tree)
    note = "" if keep_warm_up else _without_warm_up(tree, layers)
    config = parse(tree)
    check_unread(config.value_of)
    lines = [*filter(None, (note, unread_note(config.value_of))), *notes]
    return config.with_notes(*lines, translated=translated) if lines else config


def _without_warm_up(merged: Tree, layers: Sequence[Tree]) -> str:
    """Set sft.steps to 0 if a later layer sets model.path. Return a note, or "".

    A layer is a recipe file, or one set of overrides. A layer that sets both keys keeps both.
    """
    path = _section(merged, "model").get("path")
    steps = _section(merged, "sft").get("steps")
    if not path or not steps or _last(layers, "sft", "steps") >= _last(layers, "model", "path"):
        return ""
    merged["sft"] = {**merged["sft"], "steps": 0}
    return (
        f"the supervised warm-up is off: model.path = {path!r} replaces the model of the recipe, "
        f"which has sft.steps = {steps}. Add sft.steps={steps} to keep the warm-up"
    )


def _section(tree: Tree, name: str) -> Tree:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _last(layers: Sequence[Tree], section: str, key: str) -> int:
    """Return the index of the last layer that sets the key, or -1."""
    return max((i for i, tree in enumerate(layers) if key in _section(tree, section)), default=-1)


def parse(tree: Tree) -> Config:
    """Return the validated Config of a tree.

    Raises ConfigError, which names the key, the value, the rule and the fix.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e) for e in error.errors())) from None
    check(config)
    return config


def resolve(layers: Sequence[Tree]) -> Tree:
    """Merge layers, later over earlier. The `mode` of a layer is applied before its own keys."""
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
    _share_devices(merged)
    _count_updates(merged)
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
    """Set the trigger from data.train_batch_size, in modes where this is the window."""
    batch, mode = merged.get("data", {}).get("train_batch_size", 0), merged.get("mode")
    if not (batch and mode and MODES[mode].batch_is_window):
        return
    schedule, actor = merged["async_training"], merged.get("actor", {})
    mini = actor.get(
        "ppo_mini_batch_size", Config.model_fields["actor"].default.ppo_mini_batch_size
    )
    require = schedule.get("require_batches", 1)
    if not all(isinstance(n, int) and n > 0 for n in (batch, mini, require)):
        return  # `parse` reports the error
    step = mini * require
    if batch % step:
        raise bad_value(
            "data.train_batch_size",
            batch,
            "must be a multiple of actor.ppo_mini_batch_size x async_training.require_batches = "
            f"{step}",
            f"data.train_batch_size={batch // step * step}"
            if batch > step
            else f"actor.ppo_mini_batch_size={max(1, batch // require)}, the batch that there is",
        )
    # A trigger in the same layer, or in a later one, must agree with the batch: `parse` checks it.
    trigger = _last(layers, "async_training", "trigger_parameter_sync_step")
    if _last(layers, "data", "train_batch_size") > trigger:
        schedule["trigger_parameter_sync_step"] = batch // step


def _share_devices(merged: Tree) -> None:
    """Give the rollout side the trainer's devices if both share them and no layer sets its own."""
    rollout, trainer = merged.setdefault("rollout", {}), merged.get("trainer", {})
    names = ("nnodes", "n_gpus_per_node")
    colocated = merged["async_training"].get("placement") == Placement.COLOCATED
    if colocated and not any(name in rollout for name in names):
        rollout |= {name: trainer[name] for name in names if name in trainer}


def _count_updates(merged: Tree) -> None:
    """Turn warm-ups in updates of verl's into optimizer steps.

    verl's schedule takes one step for all optimizer steps on one batch. In modes with a train
    batch, that is a window. In the other modes, it is a local step.
    """
    sections = [merged.get(side, {}).get("optim") for side in ("actor", "critic")]
    optims = [
        optim
        for optim in sections
        if isinstance(optim, dict) and isinstance(optim.get("lr_warmup_steps"), Updates)
    ]
    if not optims:
        return
    schedule, actor = merged["async_training"], merged.get("actor", {})
    numbers = [schedule.get(key, 1) for key in ("trigger_parameter_sync_step", "require_batches")]
    numbers.append(actor.get("ppo_epochs", 1))
    if all(isinstance(n, int) and n > 0 for n in numbers):  # `parse` reports other values
        for optim in optims:
            optim["lr_warmup_steps"] *= update_steps(merged.get("mode"), *numbers)


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML: a recipe that makes the same run.

    The text is ASCII, because PyYAML cannot read back all non-ASCII characters that it writes.
    """
    text: str = yaml.dump(
        without_references(config.model_dump(mode="json")), Dumper=_Dumper, sort_keys=False
    )
    return text


def without_references(value: Any) -> Any:
    """Return a value with `${` in all texts, which OmegaConf would read as a reference to another key."""
    if isinstance(value, dict):
        return {key: without_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_references(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


class _Dumper(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]  # PyYAML has no types
    """A dumper that quotes strings that begin like a number.

    OmegaConf reads more strings as numbers than PyYAML does, such as 0E0.
    """


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Return the node of a string, in quotes if it begins like a number."""
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="'" if text[:1] in "+-.0123456789" else None
    )


_Dumper.add_representer(str, _text)
