"""Parts by name: the package has some, and other packages add theirs by entry points.

A part is imported when it is named, and a list of names imports none. The package's own parts stand
here, so they need no metadata of an installation. docs/plugins.md says what each group holds.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from millrace.errors import MillraceError, bad_value

OWN: dict[str, dict[str, str]] = {
    "advice": {"plan": "millrace.extras.plan.advice:advise"},
    "commands": {
        "bench": "millrace.extras.bench.command:bench",
        "calibrate": "millrace.extras.plan.command:calibrate",
        "import-verl": "millrace.extras.verl.command:import_verl",
        "plan": "millrace.extras.plan.command:plan",
        "simulate": "millrace.extras.faults.command:simulate",
    },
    "rollout_engines": {
        "torch": "millrace.decode.engine:build",
        "sglang": "millrace.extras.sglang.engine:build",
        "vllm": "millrace.serving.vllm.engine:build",
    },
    "train_engines": {
        "fsdp": "millrace.train.fsdp.engine:build",
        "megatron": "millrace.extras.megatron.engine:build",
    },
    "train_checks": {"megatron": "millrace.extras.megatron.checks"},
    "trackers": {
        "mlflow": "millrace.observe.trackers:MLflow",
        "prometheus": "millrace.observe.trackers:Prometheus",
        "trackio": "millrace.observe.trackers:Trackio",
        "wandb": "millrace.observe.trackers:Wandb",
    },
    "environments": {
        "gymnasium": "millrace.extras.environments.text_games",
        "mcp": "millrace.extras.environments.mcp",
        "mcp-shared": "millrace.extras.environments.mcp",
        "openenv": "millrace.extras.environments.openenv",
        "textarena": "millrace.extras.environments.text_games",
    },
    "tools": {"verl": "millrace.extras.environments.verl_tools"},
    "spellings": {"verl": "millrace.extras.verl.translate:spelling"},
    "algorithm_forms": {"verl": "millrace.extras.verl.algorithms"},
    "hints": {"trl": "millrace.extras.verl.trl"},
}
"""The parts of the package: `module:attribute` by group and name."""


def _takes(part: Any, *arguments: Any, **keywords: Any) -> bool:
    """Whether a part can be called with these arguments."""
    try:
        inspect.signature(part).bind(*arguments, **keywords)
    except TypeError:
        return False
    except ValueError:  # a function of C has no signature
        return True
    return True


def _has(part: Any, *methods: str) -> bool:
    return all(callable(getattr(part, method, None)) for method in methods)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "commands": (
        lambda part: callable(part) and not isinstance(part, type),
        "a function or a typer.Typer",
    ),
    "rollout_engines": (
        lambda part: _takes(part, None, None, ""),
        "a function build(sides, model, model_folder)",
    ),
    "train_engines": (
        lambda part: _takes(part, None, "", rank=0, world_size=1),
        "a function build(config, model_folder, *, rank, world_size)",
    ),
    "trackers": (
        lambda part: isinstance(part, type) and _has(part, "write", "close") and _takes(part, None),
        "a class that takes `about` and has write and close",
    ),
    "environments": (
        lambda part: _has(part, "reset" if isinstance(part, type) else "open_environments"),
        "a class with reset, or a module with open_environments(value, deadline_s)",
    ),
}
"""The form of a part of another package by group: a check of it, and its words."""


class Named(NamedTuple):
    """Marks a key, or an element of its list, that names a part of a group."""

    group: str
    others: tuple[str, ...] = ()
    """Further values of the key."""

    @property
    def names(self) -> list[str]:
        return sorted({*self.others, *names(self.group)})


def names(group: str) -> list[str]:
    """Return the names of a group, without those of a folder that is missing."""
    return sorted({part.name for part in _parts(group) if not _missing(part)})


def package_of(part: EntryPoint) -> str:
    """Return the name of the package that gives a part."""
    return (part.dist.name or part.value) if part.dist else "millrace"


def find(key: str, name: str, named: Named, form: str = "{}") -> EntryPoint | None:
    """Return the part of a name, or None for one of `named.others`. This imports nothing.

    Raises ConfigError if no package gives the name, if two do, if its folder is missing, or if its
    entry point is malformed. The fix writes names as `form`.
    """
    parts = [part for part in _parts(named.group) if part.name == name]
    givers = [*(["millrace"] if name in named.others else []), *map(package_of, parts)]
    if len(givers) > 1:
        rule = f"the packages {' and '.join(givers)} give this name"
        raise bad_value(key, name, rule, f"pip uninstall {givers[-1]}, or another name there")
    if parts and EntryPoint.pattern.match(parts[0].value) is None:
        rule = f"the package {givers[0]} gives {parts[0].value!r}, which is not module:attribute"
        raise bad_value(key, name, rule, "correct its entry point, and install it again")
    if givers and not (parts and _missing(parts[0])):
        return parts[0] if parts else None
    known = named.names
    near = [form.format(name) for name in difflib.get_close_matches(name, known, 1, 0.5)]
    fix = ", ".join([*near, f"one of {' | '.join(known)}"] if known else ["no package gives one"])
    if givers:
        rule = f"the folder of {parts[0].module} is missing in this installation of millrace"
        raise bad_value(
            key, name, rule, f"install millrace again, with its folder extras; or {fix}"
        )
    if part := elsewhere(name):
        rule = f"the package {package_of(part)} gives this name in the group {part.group}"
        raise bad_value(key, name, rule, f"the group millrace.{named.group} there; or {fix}")
    if "," in name and "[" in form:
        fix = f"'{form.format(name)}', a list, in brackets; {fix}"
    fix += "" if near else "; or pip install the package that gives it"
    raise bad_value(key, name, "no installed package gives this name", fix)


def elsewhere(name: str) -> EntryPoint | None:
    """Return the part of another package with this name, of any group, also a mistyped one."""
    given = installed().select(name=name)
    return next((part for part in given if part.group.startswith("millrace.")), None)


def load(key: str, name: str, group: str) -> Any:
    """Import and return the part of a name. Raises ConfigError, also if its package is broken."""
    part = find(key, name, Named(group), f"{key}={{}}")
    assert part is not None
    if part.dist is None:
        return part.load()
    try:
        found = part.load()
    except MillraceError:
        raise
    except (Exception, SystemExit) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        rule = f"the package {package_of(part)} gives {part.value}, and importing it raised {cause}"
        fix = f"correct it; try `python -c 'import {part.module}'`"
        raise bad_value(key, name, rule, fix) from error
    fits, needed = FORMS.get(group, (lambda _: True, ""))
    if not fits(found):
        rule = f"the package {package_of(part)} gives {part.value}, which is not {needed}"
        raise bad_value(key, name, rule, f"name {needed} there")
    return found


def load_if_given(key: str, name: str, group: str) -> Any:
    """Return the part of a name, or None if no package gives one."""
    return load(key, name, group) if name in names(group) else None


def _missing(part: EntryPoint) -> bool:
    """Whether the module of a part of the package is deleted."""
    if part.dist is not None:  # its value may be malformed
        return False
    path = Path(__file__).parents[2].joinpath(*part.module.split(".")).with_suffix(".py")
    return not path.is_file()


def _parts(group: str) -> list[EntryPoint]:
    """Return the parts of a group, of the package and of all others."""
    own = [EntryPoint(name, value, f"millrace.{group}") for name, value in OWN[group].items()]
    return [*own, *installed().select(group=f"millrace.{group}")]


@cache
def installed() -> Any:
    """Read the entry points of all packages, once in a process."""
    return entry_points()
