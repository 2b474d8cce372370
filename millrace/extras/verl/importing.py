"""A list of overrides in verl's words becomes the layer of a recipe, with verl's words beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.config.explain import unread
from millrace.config.layers import Setting, Tree, Updates, file_layers, is_native, nest, settings_of
from millrace.config.packaged import find
from millrace.config.recipe import parse, resolve
from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.kinds import PREFIX, Absent
from millrace.extras.verl.translate import Note, entry, is_unknown, text_of, translate
from millrace.extras.verl.translate import unknown as unknown_key
from millrace.extras.verl.values import updates

_CRITIC_WARM_UP = "critic.optim.lr_warmup_steps"
"""verl counts updates here. millrace has a key of this name, which counts optimizer steps."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The layer of a recipe, and what its author should know."""

    tree: Tree
    comments: dict[str, str]
    """verl's spelling, by the dotted key of millrace."""
    needless: list[str]
    absent: list[str]
    """Settings that were left out because millrace lacks their feature."""
    unknown: list[str]
    """Settings that were left out because verl has no such key: a fork reads them, or nobody."""


def import_layer(base: str, overrides: Sequence[str], *, drop: bool) -> Imported:
    """Translate `overrides` into a layer over the recipe `base`, and check the result.

    `drop` leaves out settings of features that millrace does not have, and keys that verl does not
    have. Without it, they raise ConfigError, and so does a result that is not a valid
    configuration.
    """
    settings: list[Setting] = []
    absent: list[Setting] = []
    unknown: list[Setting] = []
    errors: list[ConfigError] = []
    for item in overrides:
        if (refusal := _not_a_setting(item)) is not None:
            key, _, text = item.partition("=")
            absent.append((key, text))
            errors.append(refusal)
            continue
        for key, value in settings_of([item]):
            row = entry(key, is_native)
            if is_unknown(key, is_native):
                unknown.append((key, value))
                errors.append(unknown_key(key, value))
            elif drop and isinstance(row, Absent) and not row.allows(value):
                absent.append((key, value))
            else:
                settings.append((key, updates(value) if key == _CRITIC_WARM_UP else value))
    below = file_layers(find(Path(base), Path(), "--base"))
    errors = [] if drop else errors
    try:
        layers, notes = translate([*below, settings], is_native)
    except ConfigError as error:
        raise ConfigError("\n".join(map(str, [*errors, error]))) from None
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    trees = [nest(layer) for layer in layers]
    try:
        merged, tree = resolve(trees), trees[-1]
        config = parse({"name": "imported", **merged})
    except ConfigError as error:
        raise ConfigError(_in_words_of_verl(str(error), settings, notes)) from None
    comments: dict[str, str] = {}
    for note in notes:
        for key, _ in note.became:
            text = f"{note.theirs}; {note.why}" if note.why else note.theirs
            comments[key] = f"{comments[key]}, {text}" if key in comments else text
    needless = [f"{note.theirs}: {note.why}" for note in notes if not note.became]
    for key, why, _ in unread(
        config.value_of
    ):  # verl ignores such a key, and `millrace train` refuses it
        if _removed(tree, key):
            needless.append(f"{comments.pop(key, text_of(key, config.value_of(key)))}: {why}")
    for side in ("actor", "critic"):
        optim = tree.get(side, {}).get("optim", {})
        if isinstance(optim.get("lr_warmup_steps"), Updates):
            optim["lr_warmup_steps"] = merged[side]["optim"]["lr_warmup_steps"]
    return Imported(
        tree,
        comments,
        needless,
        [text_of(*setting) for setting in absent],
        [text_of(*setting) for setting in unknown],
    )


def _in_words_of_verl(text: str, settings: Sequence[Setting], notes: Sequence[Note]) -> str:
    """Return an error with the script's own spelling of each key that it sets."""
    spelled = {key.removeprefix(PREFIX): key for key, _ in settings}
    spelled |= {
        to: note.setting[0]
        for note in notes
        for to, value in note.became
        if len(note.became) == 1 and value == note.setting[1]
    }
    pattern = r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)+)(?=(?:\.\d+)?(?![\w.]))"
    return re.sub(pattern, lambda match: spelled.get(match[0], match[0]), text)


def _not_a_setting(item: str) -> ConfigError | None:
    """Return the error for a word of Hydra's that sets no key: ~KEY, or the choice of a group."""
    key, _, value = item.partition("=")
    if key.startswith("~"):
        rule = "every key has a default, so none can be removed"
        return bad_value(key, value, rule, "leave it out, as --drop does, or set the wanted value")
    if re.search(r"[/@:-]", key):
        rule = "millrace does not have the groups of verl's configuration"
        return bad_value(key, value, rule, "the group's keys as overrides, or leave it out")
    return None


def _removed(tree: Tree, key: str) -> bool:
    """Remove a dotted key from a tree, with sections that become empty. Return whether it was there."""
    first, _, rest = key.partition(".")
    if not rest:
        return tree.pop(first, tree) is not tree
    found = first in tree and _removed(tree[first], rest)
    if found and not tree[first]:
        del tree[first]
    return found
