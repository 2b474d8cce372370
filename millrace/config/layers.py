"""Layers of plain data: recipe files with the files that they inherit, and overrides. None has a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from millrace.config.explain import all_keys, example, section_of
from millrace.config.packaged import find, hides, resolved
from millrace.config.plugins import load, names
from millrace.errors import ConfigError, bad_value, forms_of, secrets_of_user

Tree = dict[str, Any]
Setting = tuple[str, Any]
"""A dotted key and its value."""


class Updates(int):
    """A number of updates in verl's sense: all optimizer steps on one batch are one update."""


def file_layers(path: Path, seen: tuple[Path, ...] = ()) -> list[list[Setting]]:
    """Return the settings of a recipe file, a list for each layer. Inherited layers come first."""
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise bad_value(
            "inherits",
            f"{path.name} of {seen[-1].name}",
            f"the recipe inherits itself: {chain}",
            "remove one `inherits`",
        )
    tree = _read_yaml(path)
    parent = tree.pop("inherits", None)
    layer = list(_leaves(tree, ""))
    if parent is None:
        return [layer]
    inherited = find(Path(str(parent)), path.parent, "inherits", f" of {path.name}")
    return [*file_layers(inherited, (*seen, path.resolve())), layer]


def tree_layers(tree: Tree) -> list[list[Setting]]:
    """Return the settings of a recipe that is a tree, a list for each layer."""
    rest = {key: value for key, value in tree.items() if key != "inherits"}
    parent = tree.get("inherits")
    inherited = file_layers(find(Path(str(parent)), Path(), "inherits")) if parent else []
    return [*inherited, settings_of(rest)]


def _read_yaml(path: Path) -> Tree:
    """Return the mapping in `path`, interpolated. Empty sections are removed."""
    where = f"{path}{hides(path)}"
    try:
        text = path.read_text()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode | None):
            shown = text[node.start_mark.index :].splitlines()[0].strip()
            fix = "write `section:` with `key: value` lines under it"
            raise _bad_recipe(where, shown, "a recipe is a mapping of keys", fix)
        _check_numbers(path, node)
        tree: Any = OmegaConf.to_container(
            OmegaConf.create(text), resolve=True, throw_on_missing=True
        )
    except UnicodeDecodeError as error:
        raise _bad_recipe(
            where, f"byte {error.start}", "is not UTF-8", "save it as UTF-8"
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
            f"{path} line {line + 1}{hides(path)}",
            shown,
            rule,
            _TABS if "'\\t'" in rule else "correct this line, or the line before it",
        ) from None
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise _bad_recipe(
            where,
            path.name,
            f"cannot be read: {str(error).splitlines()[0]}",
            "correct the file",
        ) from None
    return {str(key): value for key, value in tree.items() if value is not None}


def _check_numbers(path: Path, node: yaml.Node | None) -> None:
    """Raise ConfigError for 010 or 1:30 without quotes, which YAML 1.1 reads as 8 and 90."""
    if isinstance(node, yaml.ScalarNode):
        number = node.style is None and node.tag.rpartition(":")[2] in ("int", "float")
        if number and re.match(r"[-+]?0[\d_]|.*:", node.value):
            read = yaml.safe_load(node.value)
            rule = f"YAML reads it as {read}"
            fix = f'"{node.value}", in quotes, for the text; {read} for the number'
            where = f"{path} line {node.start_mark.line + 1}{hides(path)}"
            raise _bad_recipe(where, node.value, rule, fix)
    elif node is not None:
        for child in node.value:
            for each in child if isinstance(child, tuple) else (child,):
                _check_numbers(path, each)


_TABS = "spaces in place of tabs, in this line and in all others"


def _bad_recipe(where: str, value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(f"recipe {where}: {value!r}: {rule}. Fix: {fix}.")


def settings_of(overrides: Sequence[str] | Tree) -> list[Setting]:
    """Return the settings of `key=value` overrides, or of a tree.

    Hydra's `+key=value` and `++key=value` mean the same. In a tree, a text is a text, apart from
    `${model:NAME}`. Raises ConfigError for another form.
    """
    settings: list[Setting] = []
    if isinstance(overrides, dict):
        for key, value in _leaves(overrides, ""):
            value = str(value) if isinstance(value, Path) else value
            settings.append((key, resolved(value) if isinstance(value, str) else value))
        return settings
    for item in overrides:
        key, equals, text = item.partition("=")
        key = key.strip()
        if key.startswith("~"):
            rule = "every key has a default, so none can be removed"
            raise bad_value("override", item, rule, f"{key[1:]}=VALUE with the value that you want")
        key = key.lstrip("+")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            rule = "must be of the form key=value, without spaces"
            raise bad_value("override", item, rule, f"for example {example(key)}")
        text = resolved(text)
        kind = _annotations().get(key)
        lists = text[:1] == "[" and get_args(kind) == (str, ...)
        reader = yaml.BaseLoader if lists else _Loader  # BaseLoader reads every scalar as a text
        value = text if kind is str and text[:1] not in ("'", '"') else _value(text, reader)
        settings += _leaves({key: _interpolated(item, value)}, "")
    return settings


def _interpolated(item: str, value: Any) -> Any:
    """Return a value with what its `${...}` mean. Raise ConfigError if one names a key."""
    if "${" not in item:
        return value
    try:
        return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)["value"]  # type: ignore[call-overload, index]
    except OmegaConfBaseException as error:
        rule = f"cannot be resolved: {str(error).splitlines()[0]}"
        fix = "the value itself, or \\${ for the text; only a recipe file can name its own keys"
        raise bad_value("override", item, rule, fix) from None


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F]+|0o[0-7]+|0b[01]+)",
    "float": r"[-+]?(?:(?:0|[1-9][\d_]*)?\.\d+|(?:0|[1-9][\d_]*)\.?)(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan",
    "timestamp": "",
}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads YAML with the numbers of YAML 1.2: dates, 1:30 and 010 are texts, and 1e-4 is a number."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, one) for tag, one in known if tag.rpartition(":")[2] not in _NUMBERS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag in ("int", "float"):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_NUMBERS[_tag]})$"), list("-+0123456789.")
    )


def _value(text: str, reader: Any = _Loader) -> Any:
    """Return the value of an override, as YAML reads it.

    As in Hydra, `{a:1}` is a mapping, and nothing is a comment.
    """
    if re.search(r"(?:^|\s)#", text) and text[:1] not in "{['\"":
        return text
    spaced = re.sub(r"([{,]\s*[\w.]+):(?=[^\s:/])", r"\1: ", text) if text[:1] == "{" else text
    try:
        return reader(spaced).get_single_data() if text.strip() else ""  # one of the safe readers
    except YAMLError:
        # In a list, YAML reads a `?` only in quotes, and a shell removes those. Sources have a `?`.
        if re.fullmatch(r"\[[^][{}\"']*\]", text.strip()):
            return [
                _value(part.strip(), reader)
                for part in text.strip()[1:-1].split(",")
                if part.strip()
            ]
        return text


def expand(layers: Iterable[Iterable[Setting]]) -> tuple[list[Tree], list[str], list[str]]:
    """Return each layer as a tree, with other systems' words as millrace's. Later settings win.

    Return also the notes of a run on such words, and a line for each.
    """
    notes: list[str] = []
    lines: list[str] = []
    for name in names("spellings"):
        layers, new_notes, new_lines = load("recipe", name, "spellings")(layers, is_native)
        notes, lines = [*notes, *new_notes], [*lines, *new_lines]
    return [nest(layer) for layer in layers], notes, lines


class Fresh(dict[str, Any]):
    """A mapping with free names, such as reward.mix, that replaces that of earlier layers."""


def nest(settings: Iterable[Setting]) -> Tree:
    """Return settings as a tree. Later settings win. `{}` empties a mapping with free names."""
    expanded: Tree = {}
    for path, value in settings:
        nested: Any = Fresh() if value == {} and _has_free_names(path) else value
        for part in reversed(path.split(".")):
            nested = {part: nested}
        merge(expanded, nested)
    return expanded


@cache
def _annotations() -> dict[str, Any]:
    """Return every section and key of millrace, with its type."""
    return {key: field.annotation for key, field in all_keys()}


def _has_free_names(key: str) -> bool:
    kind = _annotations().get(key)
    return section_of(kind) is None and "dict" in str(kind)


def is_native(key: str) -> bool:
    """Return whether `key` is millrace's own: a section, a key, or a name inside a free mapping."""
    parents = (key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1))
    return key in _annotations() or any(map(_has_free_names, parents))


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf. An empty mapping is a leaf."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def merge(into: Tree, layer: Tree) -> None:
    """Merge `layer` into `into`, in place. Keys of `layer` win."""
    for key, value in layer.items():
        mapping = isinstance(value, dict) and not isinstance(value, Fresh)
        if mapping and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = _copy(value)


def _copy(value: Any) -> Any:
    return (
        type(value)({k: _copy(v) for k, v in value.items()}) if isinstance(value, dict) else value
    )


_NAME = re.compile(
    r"(?:api|access|auth|bearer|hf|private|secret)[_-]?(?:key|token)$"
    r"|^(?:authorization|credentials?|passwd|password|secret)$",
    re.IGNORECASE,
)
"""The names of a mapping with free keys, such as reward.judge.extra_body."""
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_PARAMETER = re.compile(
    r"(?:[?&]|--)[\w-]*(?:api[_-]?key|(?:access|api|auth)[_-]?token|passwd|password|secret|signature)"
    r"[= ]\S",
    re.IGNORECASE,
)


def check_secrets(tree: dict[str, Any]) -> None:
    """Raise ConfigError if a key has a secret. The error does not show it."""
    known = secrets_of_user()
    for key, value in _texts_in("", tree):
        names = [n for n, secret in known.items() if any(f in value for f in forms_of(secret))]
        if names:
            raise _refusal(key, f"has the value of {names[0]}")
        if _NAME.search(key.rpartition(".")[2]) and value:
            raise _refusal(key, "has the name of a secret")
        if _PASSWORD.search(value):
            raise _refusal(key, "is an address with a password")
        if _PARAMETER.search(value):
            raise _refusal(key, "has a parameter with the name of a secret")


def _refusal(key: str, found: str) -> ConfigError:
    rule = f"it {found}, and config.yaml, logs and trackers show every key"
    fix = "the secret in the environment, where its library reads it, and none in the configuration"
    if key.endswith("judge.base_url"):
        variable = key.removesuffix("base_url") + "api_key_env"
        fix = f"an address alone, with the key in the variable of {variable}"
    return bad_value(key, "***", rule, fix)


def _texts_in(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each text and number of a tree with its dotted key. A name is a text of its parent."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from _texts_in(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(key, inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield key, str(value)
