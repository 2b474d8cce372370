"""Recipes and overrides into a Config: layers of plain data, names of modes, and errors that say what to change.

Later layers win: the file that `inherits` names, the recipe, the command line. A `mode` resets what the layers under it said
of the Schedule, as far as that contradicts the mode; keys beside or above it override it.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml import MarkedYAMLError, YAMLError

from millrace import warm_up
from millrace.config import MODES, Config
from millrace.config_vllm import check_unread
from millrace.errors import ConfigError, bad_value

PREFIX = "actor_rollout_ref."
ALIASES = {
    "data.max_prompt_length": "rollout.max_prompt_length",
    "data.max_response_length": "rollout.max_response_length",
    "custom_reward_function.path": "reward.function",
    "actor.fsdp_config.fsdp_size": "trainer.fsdp_size",
    "actor.fsdp_config.offload_policy": "trainer.offload_policy",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.resume_mode": "trainer.resume",
    "algorithm.rollout_correction.bypass_mode": "async_training.use_rollout_log_probs",
    "reward_model.overlong_buffer.enable": "reward.overlong_buffer.enable",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_buffer.penalty_factor",
}
"""Other systems' names of the same things."""

FOREIGN = {
    "actor.clip_ratio": "actor.clip_ratio_low and actor.clip_ratio_high",
    "trainer.total_training_steps": "rollout.total_rollout_steps, which counts samples",
    "trainer.experiment_name": "name",
}
"""What comes nearest to keys of other systems that mean something else."""

Tree = dict[str, Any]

_ALL_KEYS = "`millrace train --help-config` prints every key"


def load(recipe: str | Path, *overrides: Sequence[str], keep_warm_up: bool = False) -> Config:
    """The Config of a recipe file and `key=value` overrides, each sequence of them a layer of its own. Raises ConfigError before
    anything is built. `keep_warm_up`: the warm-up is what the command is for.
    """
    path = Path(recipe)
    layers = [*_file_layers(path, ()), *map(_override_layer, overrides)]
    tree = resolve(layers)
    tree.setdefault("name", re.sub(r"[^\w.-]+", "-", path.stem))
    note = "" if keep_warm_up else warm_up.dropped(tree, layers)
    config = parse(tree)
    check_unread(config)
    return config.with_notes(note) if note else config


def parse(tree: Tree) -> Config:
    """Validate; errors name the key, the value, the rule and the fix."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def resolve(layers: Sequence[Tree]) -> Tree:
    """Merge layers, later over earlier, with each layer's `mode` applied under its own keys."""
    merged: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            if not isinstance(value, dict) and (
                section := _section(getattr(Config.model_fields.get(key), "annotation", None))
            ):
                raise _no_section(key, value, section)
        own = layer.get("async_training") or {}
        if mode := layer.get("mode"):
            _apply_mode(merged, mode)
        _merge(merged, layer)
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
    schedule = merged.setdefault("async_training", {})
    for key in ("partial_rollout", "lookahead"):
        schedule.pop(key, None)
    schedule |= MODES[mode]
    if not schedule.get("staleness_threshold") and "staleness_threshold" not in MODES[mode]:
        schedule["staleness_threshold"] = 0.5
    if mode == "stream_off_policy" and schedule.get("trigger_parameter_sync_step", 1) == 1:
        schedule["trigger_parameter_sync_step"] = 4
    merged["mode"] = mode


def _train_batch(merged: Tree, layers: Sequence[Tree]) -> None:
    """In windowed modes data.train_batch_size sets the trigger."""
    batch = merged.get("data", {}).get("train_batch_size", 0)
    if not batch or merged.get("mode") not in ("colocate_sync", "one_step_off"):
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


def _merge(into: Tree, layer: Tree) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


# -- reading


def _file_layers(path: Path, seen: tuple[Path, ...]) -> list[Tree]:
    key, value = ("inherits", f"{path.name} of {seen[-1].name}") if seen else ("RECIPE", str(path))
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.yaml")], 1, 0.7
        )
        fix = (
            str(path.parent / near[0])
            if near
            else "the path of a YAML recipe, such as recipes/quickstart.yaml"
        )
        raise bad_value(key, value, "no such file", fix)
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise bad_value(key, value, f"the recipe inherits itself: {chain}", "remove one `inherits`")
    layer = _expand(_read_yaml(path))
    parent = layer.pop("inherits", None)
    if parent is None:
        return [layer]
    return [*_file_layers(path.parent / str(parent), (*seen, path.resolve())), layer]


def _read_yaml(path: Path) -> Tree:
    """The mapping in `path`, interpolated; sections with nothing under them are left out."""
    try:
        text = path.read_text()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode | None):
            shown = text[node.start_mark.index :].splitlines()[0].strip()
            fix = "write `section:` with `key: value` lines under it"
            raise _bad_recipe(str(path), shown, "a recipe is a mapping of keys", fix)
        tree: Any = OmegaConf.to_container(
            OmegaConf.create(text), resolve=True, throw_on_missing=True
        )
    except UnicodeDecodeError as error:
        raise _bad_recipe(
            str(path), f"byte {error.start}", "is not UTF-8", "save it as UTF-8"
        ) from None
    except MarkedYAMLError as error:
        line = (
            (error.problem_mark or error.context_mark).line
            if error.problem_mark or error.context_mark
            else 0
        )
        shown = (text.splitlines() or [""])[min(line, text.count("\n"))].strip()
        rule = f"is not readable as YAML: {error.problem or error.context}"
        raise _bad_recipe(
            f"{path} line {line + 1}", shown, rule, "correct this line, or the one before it"
        ) from None
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise _bad_recipe(
            str(path),
            path.name,
            f"cannot be read: {str(error).splitlines()[0]}",
            "correct the file",
        ) from None
    return {str(key): value for key, value in tree.items() if value is not None}


def _bad_recipe(where: str, value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(f"recipe {where}: {value!r}: {rule}. Fix: {fix}.")


def _override_layer(overrides: Sequence[str]) -> Tree:
    layer: Tree = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        key = key.strip().lstrip("+")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise bad_value(
                "override", item, "must be of the form key=value", f"for example {_example(key)}"
            )
        try:
            value = yaml.safe_load(text) if text.strip() else ""
        except YAMLError:
            value = text
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
            value = float(value)  # YAML 1.1 reads 1e-4 as a string
        _merge(layer, _expand({key: value}))
    return layer


def _expand(tree: Tree) -> Tree:
    """Dotted keys into nested ones, without the foreign prefix, by our own names."""
    expanded: Tree = {}
    for path, value in _leaves(tree, ""):
        path = path.removeprefix(PREFIX)
        path = ALIASES.get(path, path)
        if path == "trainer.resume" and value == "disable":
            value = "never"
        if path == "trainer.fsdp_size" and value == -1:
            value = 0
        nested: Any = value
        for part in reversed(path.split(".")):
            nested = {part: nested}
        _merge(expanded, nested)
    return expanded


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


# -- explaining


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, field) of every leaf and section, in order."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if section := _section(field.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    return (
        annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    )


def _no_section(key: str, value: object, section: type[BaseModel]) -> ConfigError:
    first = next(iter(section.model_fields))
    return bad_value(
        key, value, "is a section: a mapping of keys", f"keys under it, such as {key}.{first}"
    )


def _example(key: str) -> str:
    """An override that works: of the key that the user seems to mean, where there is one."""
    fields = {k: f for k, f in all_keys() if not _section(f.annotation)}
    begun = [k for k in fields if k.startswith(key)]
    name = key if key in fields else begun[0] if begun else _nearest(key, fields) or "rollout.n"
    return f"{name}={_shown(_default(name))}"


def _nearest(wrong: str, right: typing.Iterable[str]) -> str:
    """The closest name, or nothing; by its last part first: users forget sections more often than they misspell them."""
    names = list(right)
    last = wrong.rsplit(".", 1)[-1]
    section = wrong.split(".", 1)[0]
    same = sorted(
        (n for n in names if n.rsplit(".", 1)[-1] == last),
        key=lambda n: n.split(".", 1)[0] != section,
    )
    near = same[:1] or difflib.get_close_matches(wrong, names, 1, 0.75)
    if not near:
        tails = {n.rsplit(".", 1)[-1]: n for n in names}
        near = [tails[t] for t in difflib.get_close_matches(last, list(tails), 1, 0.6)]
    return near[0] if near else ""


def _explain(error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    fields, value = dict(all_keys()), error.get("input")
    if error["type"] == "extra_forbidden":
        known = [
            k for k, f in fields.items() if isinstance(value, dict) or not _section(f.annotation)
        ]
        near = FOREIGN.get(key.removeprefix(PREFIX)) or _nearest(key, known)
        return str(
            bad_value(key, value, "no such key", f"{near}; {_ALL_KEYS}" if near else _ALL_KEYS)
        )
    named = re.sub(r"\.\d+$", "", key)
    field = fields.get(named)
    if field is None:
        return str(bad_value(key, value, error["msg"], _ALL_KEYS))
    if section := _section(field.annotation):
        return str(_no_section(key, value, section))
    rule = re.sub(r"^\w+ should", "must", error["msg"]).replace("a valid tuple", "a list")
    meaning = " ".join((field.description or "").split()).rstrip(".")
    return str(bad_value(key, value, f"{rule} ({meaning})", _valid(named, value, field)))


def _valid(key: str, value: object, field: Any) -> str:
    """A setting of `key` that would be taken: the choice that `value` is nearest to, else the type and the default."""
    kind, default = _type_name(field.annotation), _shown(_default(key))
    if kind.startswith("list of"):
        return f"{key}=[...], a {kind}, in brackets"
    if " | " in kind or typing.get_origin(field.annotation) is typing.Literal:
        near = difflib.get_close_matches(str(value), kind.split(" | "), 1, 0.5)
        return f"{key}={near[0] if near else default}, one of {kind}"
    return f"{key}=<{kind}>, for example {default}"


def _type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in args)
    if origin is tuple:
        return (
            f"list of {_type_name(args[0])}"
            if args[-1] is ...
            else f"[{', '.join(map(_type_name, args))}]"
        )
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return " | ".join(m.value for m in annotation)  # type: ignore[attr-defined]
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def describe() -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, for --help-config; type and default are empty for sections."""
    for key, field in all_keys():
        meaning = " ".join((field.description or "").split())
        if _section(field.annotation):
            yield key, "", "", meaning
        else:
            yield key, _type_name(field.annotation), _shown(_default(key)), meaning


def _default(key: str) -> Any:
    """Where sections of one kind have defaults of their own (two optimizers), that of this one."""
    return functools.reduce(getattr, key.split("."), Config())


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if value else '""'
    return (
        str(list(value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def dump(config: Config) -> str:
    """The resolved configuration as YAML: a recipe that makes the same run. ASCII: PyYAML does not read all else as it wrote it."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes what begins like a number: recipes are read by rules that know more numbers than PyYAML's own, such as 0E0."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="'" if text[:1] in "+-.0123456789" else None
    )


_Dumper.add_representer(str, _text)
