"""Names, types and meanings of all keys, the error for a wrong one, and keys that nobody reads."""

from __future__ import annotations

import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from millrace.config.keys import Config
from millrace.config.plugins import OWN, Named, load, names
from millrace.config.reward_keys import MixedReward
from millrace.config.section import (
    Choice,
    Choices,
    Compared,
    Fixed,
    FixedRows,
    Past,
    ReadWith,
    Switch,
)
from millrace.config.teacher_keys import TeacherConfig
from millrace.errors import ConfigError, bad_value

Fact = TypeVar("Fact")
_NAMED: dict[str, type[BaseModel]] = {"reward.mix": MixedReward, "teachers": TeacherConfig}
"""The sections in mappings whose names the user chooses."""
_ALL_KEYS = "`millrace train --help-config` prints every key"


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, field) of every section and every key, in order."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if section := section_of(field.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation names, or None if it is no section."""
    return (
        annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    )


def facts(kind: type[Fact]) -> Iterator[tuple[str, Fact]]:
    """Yield (dotted key, fact) of each fact of this kind in the metadata of a field."""
    for key, field in all_keys():
        yield from ((key, fact) for fact in field.metadata if isinstance(fact, kind))


def no_section(key: str, value: object, section: type[BaseModel]) -> ConfigError:
    """Return the error for a section that is set to a plain value."""
    fix = f"keys under it, such as {key}.{next(iter(section.model_fields))}"
    if pair := re.fullmatch(r"(\w+)[:=](\S+)", str(value)):
        fix = f"'{pair[1]}: {pair[2]}', with a space after the colon"
    return bad_value(key, value, "is a section: a mapping of keys", fix)


def example(key: str) -> str:
    """Return an override that works, for the key that is most similar to `key`."""
    fields = {k: f for k, f in all_keys() if not section_of(f.annotation)}
    longer = [k for k in fields if k.startswith(key)]
    name = key if key in fields else longer[0] if longer else _nearest(key, fields) or "rollout.n"
    default = default_of(name)
    return f"{name}={'VALUE' if default in (None, '') else shown(default)}"


def _nearest(wrong: str, right: typing.Iterable[str]) -> str:
    """Return the most similar name, or "" if none is similar.

    The last part of a key counts first, because users forget sections more often than they misspell
    them.
    """
    names = list(right)
    last = wrong.rsplit(".", 1)[-1]
    section = wrong.split(".", 1)[0]
    same_last = sorted(
        (n for n in names if n.rsplit(".", 1)[-1] == last),
        key=lambda n: n.split(".", 1)[0] != section,
    )
    near = same_last[:1] or difflib.get_close_matches(wrong, names, 1, 0.75)
    if not near:
        # A short name in another section is similar by chance.
        for within, similar in ((f"{section}.", 0.6), ("", 0.75)):
            tails = {n.rsplit(".", 1)[-1]: n for n in names if n.startswith(within)}
            near = near or [
                tails[t] for t in difflib.get_close_matches(last, list(tails), 1, similar)
            ]
    return near[0] if near else ""


def hint_of(name: str) -> tuple[str, str, str] | None:
    """Return the setting that another system's name means, the system, and the page of its names."""
    parts = (load("key", part, "hints") for part in names("hints"))
    return next(((p.HINTS[name], p.SYSTEM, p.PAGE) for p in parts if name in p.HINTS), None)


def explain(error: ErrorDetails) -> str:
    """Return the message for one error of pydantic: key, value, rule and fix."""
    key = ".".join(str(part) for part in error["loc"])
    fields, value = dict(all_keys()), error.get("input")
    if error["type"] == "extra_forbidden":
        for parent, of in _NAMED.items():
            if part := re.match(rf"{re.escape(parent)}\.[^.]+\.", key):
                fields |= dict(all_keys(of, part[0]))
        known = [
            k for k, f in fields.items() if isinstance(value, dict) or not section_of(f.annotation)
        ]
        tail = key.rsplit(".", 1)[-1]
        own = any(name.rsplit(".", 1)[-1] == tail for name in fields)
        if hint := hint_of(key if own else tail):
            setting, system, page = hint
            rule = f"no such key: it is a name of {system}'s"
            return str(bad_value(key, value, rule, f"{setting}; {page} has all names"))
        same = [k for k in known if k.rsplit(".", 1)[-1] == key]
        near = " or ".join(same[:3]) or _nearest(key, known)
        fix = f"{near}; {_ALL_KEYS}" if near else _ALL_KEYS
        if lacking := sorted(OWN["spellings"].keys() - names("spellings")):
            fix += (
                f"; for words of {' and '.join(lacking)}, install millrace with its folder extras"
            )
        return str(bad_value(key, value, "no such key", fix))
    name = re.sub(r"\.\d+$", "", key)  # without the index of a list's element
    field = fields.get(name)
    if inner := _NAMED.get(key.rpartition(".")[0]):
        return str(no_section(key, value, inner))
    if field is None:
        return str(bad_value(key, value, error["msg"], _ALL_KEYS))
    if section := section_of(field.annotation):
        return str(no_section(key, value, section))
    rule = re.sub(r"^\w+ should", "must", error["msg"]).replace("a valid tuple", "a list")
    meaning = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
    return str(bad_value(key, value, f"{rule} ({meaning})", _valid(name, value, field)))


def _valid(key: str, value: object, field: Any) -> str:
    """Return a setting of `key` that works, for the fix of an error.

    It names the choice that is most similar to `value`, or else the type and the default.
    """
    kind, default = _type_name(field.annotation, field.metadata), shown(default_of(key))
    if kind.startswith("list of"):
        unclear = value in (None, "") or isinstance(value, dict | list)
        example = "..." if unclear else str(value)
        return f"'{key}=[{example}]', a {kind}, in brackets" + (
            ", with a text such as 1.10 in quotes" if kind.endswith("str") else ""
        )
    if kind == "str" and isinstance(value, bool | int | float):
        return f'{key}: "{value}" in a recipe, with quotes around the text as it is written'
    if " | " in kind or typing.get_origin(field.annotation) is typing.Literal:
        names, given = kind.split(" | "), str(value)
        near = [n for n in names if n.lower() == given.lower()]
        near = near or difflib.get_close_matches(given, names, 1, 0.5)
        return f"{key}={near[0] if near else default}, one of {kind}"
    return f"{key}=<{kind}>" + (f", for example {default}" if default not in ("null", '""') else "")


def _type_name(annotation: Any, metadata: typing.Iterable[Any] = ()) -> str:
    for named in metadata:
        if isinstance(named, Named):
            return " | ".join(named.names)
        if isinstance(named, Choices):
            return " | ".join([*filter(None, named.names), "path.py:name"])
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0], args[1:])
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
    """Yield (key, type, default, meaning) of every key, for --help-config.

    The type and the default of a section are empty.
    """
    for key, field in all_keys():
        fates = (
            str(f) for f in field.metadata if isinstance(f, FixedRows | Fixed | Past | Compared)
        )
        meaning = " ".join([*(field.description or "").split(), *fates])
        if section_of(field.annotation):
            yield key, "", "", meaning
        else:
            kind = _type_name(field.annotation, field.metadata)
            yield key, kind, shown(default_of(key)), meaning
        if key == "teachers":  # the keys of a part of reward.mix are those of reward
            for inner, own in all_keys(TeacherConfig, "teachers.NAME."):
                text = " ".join((own.description or "").split())
                yield inner, _type_name(own.annotation, own.metadata), shown(own.default), text


def default_of(key: str) -> Any:
    """Return the default of a key.

    It depends on the section: the two optimizers have different defaults.
    """
    return functools.reduce(getattr, key.split("."), _defaults())


@functools.cache
def _defaults() -> Config:
    return Config()


def shown(value: Any) -> str:
    """Return a value as a recipe has it."""
    if value is None:
        return "null"
    if isinstance(value, str):  # An error takes one line, so a text of several is quoted.
        return json.dumps(value) if not value or "\n" in value else value
    return (
        str(list(value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


ENGINES = {"rollout.engine": "rollout_engines", "trainer.engine": "train_engines"}
"""The group of the names in each key."""


def check_unread(value_of: Callable[[str], Any]) -> None:
    """Raise ConfigError for keys that the run would ignore. `value_of` is that of a Config.

    The error names all such keys. Recipes and overrides are checked. Checkpoints are not, because
    those of earlier versions may have such a key.
    """
    errors = []
    for key, rule, (other, values) in unread(value_of):
        fix = f"{other}={' or '.join(map(shown, values))}, or {example(key)}"
        errors.append(str(bad_value(key, value_of(key), rule, fix)))
    agents = value_of("agents")
    for name, players in agents.unread().items():
        reads = " or ".join(f"agents.{player}" for player in players)
        who = f"agents.{agents.agent_kind}" if agents.agent_kind else "an episode without an agent"
        key = f"agents.{name}"
        fix = f"{reads}, or {example(key)}"
        errors.append(str(bad_value(key, value_of(key), f"{who} does not read it", fix)))
    if errors:
        raise ConfigError("\n".join(errors))


def unread(
    value_of: Callable[[str], Any],
) -> Iterator[tuple[str, str, tuple[str, tuple[Any, ...]]]]:
    """Yield each key that the run would ignore, the reason, and a choice that reads it."""
    for key, unmet in ignored(value_of):
        if not _switched(unmet[0], value_of):
            yield key, f"{unmet[0]}={shown(value_of(unmet[0]))} does not read it", unmet


def unread_note(value_of: Callable[[str], Any]) -> str:
    """Return a note on the keys that a switch leaves without effect, or "" if there are none."""
    switches: dict[str, list[str]] = {}
    for key, (other, _) in ignored(value_of):
        if _switched(other, value_of):
            switches.setdefault(f"{other}={shown(value_of(other))}", []).append(key)
    parts = (f"{', '.join(keys)} with {switch}" for switch, keys in switches.items())
    return f"no effect: {'; '.join(parts)}" if switches else ""


def ignored(value_of: Callable[[str], Any]) -> Iterator[tuple[str, tuple[str, tuple[Any, ...]]]]:
    """Yield each key that is set and not read, and a choice that would read it."""

    def unmet_of(choice: Choice) -> list[tuple[str, tuple[Any, ...]]]:
        unmet = [(key, values) for key, values in choice.items() if value_of(key) not in values]
        # An engine of another package may read each key.
        return [u for u in unmet if u[0] not in ENGINES or value_of(u[0]) in OWN[ENGINES[u[0]]]]

    for key, fact in facts(ReadWith):
        choices = fact.choices_in(key.rpartition(".")[0])
        unmet = min(map(unmet_of, choices), key=len)  # the choice that needs the fewest changes
        if unmet and value_of(key) != default_of(key):
            yield key, unmet[0]


def _switched(key: str, value_of: Callable[[str], Any]) -> bool:
    """Whether a layer sets the switch `key`: to false, or to the torch engine."""
    place, _, name = key.rpartition(".")
    return key in {k for k, _ in facts(Switch)} and name in value_of(place).model_fields_set
