"""From functions, rows and keys of a Python program to a configuration, as the command has it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from millrace.config import Config
from millrace.config.layers import settings_of
from millrace.config.packaged import VARIABLE, cache_folder
from millrace.config.recipe import load
from millrace.data.row_store import encoded
from millrace.data.user_code import IN_DRIVER, spec_of
from millrace.errors import bad_value
from millrace.process.files import replace_file

Recipe = str | Path | Mapping[str, Any] | Config
RowsOrSources = str | Sequence[Any] | Iterable[Mapping[str, Any]]
"""Rows as mappings, a datasets.Dataset or a data frame, or sources as data.train_files takes them."""

_PROGRAM = "agents.program"
_OF_DRIVER = (_PROGRAM, "data.sampler", "observe.metrics")
"""The keys whose functions always run in this process."""
_REWARD = re.compile(r"reward(\.mix\.\w+)?\.function")
_FORM = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Setup:
    """A configuration, and the functions in it that exist only in this process, by their names."""

    config: Config
    functions: dict[str, Callable[..., Any]]

    @property
    def notes(self) -> list[str]:
        """Lines on where rewards of this process run."""
        rewards = {part.function for part in self.config.reward.parts.values()}
        return [
            f"{IN_DRIVER}:{name} exists only in this process, so it runs in a thread of it. If it "
            "computes for long, put it into a file: then it gets processes of its own"
            for name, function in self.functions.items()
            if f"{IN_DRIVER}:{name}" in rewards and not is_coroutine(function)
        ]


def setup(
    recipe: Recipe,
    keys: Mapping[str, Any],
    *,
    reward: Any = None,
    agent: Any = None,
    train: RowsOrSources | None = None,
    val: RowsOrSources | None = None,
    below: Mapping[str, Any] | None = None,
) -> Setup:
    """Return the configuration of a recipe, of keys, and of what has a parameter of its own.

    `below` is a layer between the recipe and the keys. Raises ConfigError, as the command does.
    """
    given = dict(keys)
    _add(given, "reward", "reward.function", reward)
    _add(given, "agent", _PROGRAM, agent)
    _add(given, "train", "data.train_files", train)
    _add(given, "val", "data.val_files", val)
    functions: dict[str, Callable[..., Any]] = {}
    layer: dict[str, Any] = {}
    for key, value in settings_of(given):
        if not isinstance(key, str) or not _FORM.fullmatch(key):
            rule = "a key is a section, or a dotted name such as rollout.n"
            raise bad_value("key", key, rule, 'rollout={"n": 8}, or **{"rollout.n": 8}')
        layer[key] = _named(key, value, functions) if callable(value) else value
    base: Any = recipe
    if isinstance(base, Config):
        base = base.model_dump(mode="json")
    elif isinstance(base, Mapping):
        base = dict(base)
    elif not isinstance(base, str | Path):
        rule = f"is a {type(base).__name__}, and no recipe"
        raise bad_value("recipe", base, rule, "a name, a YAML file, or a dict of keys")
    return Setup(load(base, *([dict(below)] if below else []), layer), functions)


def _add(given: dict[str, Any], parameter: str, key: str, value: Any) -> None:
    """Add the value of a parameter under its key. A mapping of `reward` has keys of its section."""
    if value is None:
        return
    if parameter == "reward" and isinstance(value, Mapping):
        given[parameter] = dict(value)
        return
    if parameter in ("reward", "agent") and not (callable(value) or isinstance(value, str)):
        rule = f"is a {type(value).__name__}, and no function"
        fix = "a function, or its name such as path.py:name"
        if parameter == "reward" and isinstance(value, Sequence):
            fix = 'reward={"mix": {"a": {"function": f}, "b": {"function": g, "weight": 0.5}}}'
        raise bad_value(parameter, value, rule, fix)
    section, _, name = key.partition(".")
    inner = given.get(section)
    if key in given or (isinstance(inner, Mapping) and name in inner):
        # Rows may be millions.
        brief = callable(value) or isinstance(value, str)
        shown = value if brief else f"a {type(value).__name__}"
        raise bad_value(parameter, shown, f"{key} is given too", "one of them")
    given[key] = _sources(key, value) if parameter in ("train", "val") else value


def _named(key: str, function: Callable[..., Any], functions: dict[str, Callable[..., Any]]) -> str:
    """Return the name of a function for its key, and note one that exists only in this process."""
    spec, module = spec_of(function), str(getattr(function, "__module__", ""))
    # This process must not import the module of a function a second time.
    twice = module == "__main__" or ("." in module and not spec.startswith(module))
    if spec and not (key in _OF_DRIVER and twice):
        return spec
    inner = getattr(function, "function", function)  # of a loss or an estimator with facts
    shown = str(getattr(inner, "__qualname__", type(function).__name__))
    if key not in _OF_DRIVER and not _REWARD.fullmatch(key):
        rule = "exists only in this process, and workers import it from a file"
        fix = "a function at the outermost level of a file, imported here, or path.py:name"
        raise bad_value(key, shown, rule, f"{fix}; a notebook writes a file with %%writefile")
    base = re.sub(r"\W+", "_", shown.rpartition("<locals>.")[2]).strip("_") or "function"
    name, number = base, 1
    while functions.get(name, function) is not function:
        number += 1
        name = f"{base}_{number}"
    functions[name] = function
    return f"{IN_DRIVER}:{name}"


def _sources(key: str, given: Any) -> list[str]:
    """Return sources as data.train_files takes them. Rows become a file in millrace's cache."""
    if isinstance(given, str | Path):
        return [str(given)]
    if isinstance(given, Sequence) and all(isinstance(one, str | Path) for one in given):
        return [str(one) for one in given]
    name = "val" if key == "data.val_files" else "train"
    lines = b"".join(encoded(row) + b"\n" for row in rows_of(name, given))
    path = cache_folder() / "given" / blake2b(lines, digest_size=8).hexdigest() / f"{name}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lines)
    except OSError as error:
        rule = f"{path} cannot be written: {error.strerror or error}"
        raise bad_value(name, "rows", rule, f"{VARIABLE}=FOLDER in the environment") from None
    return [str(path)]


def rows_of(name: str, given: Any) -> list[dict[str, Any]]:
    """Return rows as dicts. `name` is the parameter in errors."""
    kind = type(given).__name__
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # a data frame
        given = given.to_dict("records")
    if isinstance(given, Mapping):
        rule = f"is a {kind}, and rows are a list"
        raise bad_value(
            name, sorted(map(str, given)), rule, "one of its splits, such as X['train']"
        )
    if not hasattr(given, "__len__") or not hasattr(given, "__iter__"):
        rule = f"is a {kind} without a length"
        raise bad_value(name, kind, rule, f"list({name}), a datasets.Dataset, or a file")
    rows = []
    for number, row in enumerate(given, 1):
        if not isinstance(row, Mapping):
            rule = f"row {number} is a {type(row).__name__}"
            raise bad_value(name, row, rule, 'a dict for each row, such as {"prompt": "4 1 3"}')
        # As in a parquet file: JSON would make a text of bytes, and they are no prompt.
        rows.append({k: {"bytes": v} if isinstance(v, bytes) else v for k, v in row.items()})
    if not rows:
        raise bad_value(name, [], "has no rows", "at least one row")
    return rows


def is_coroutine(function: Callable[..., Any]) -> bool:
    call = vars(type(function)).get("__call__")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
