"""Removal of a recipe's supervised warm-up if the user replaces the recipe's model.

With another model, the user must ask for the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]


def dropped(merged: dict[str, Any], layers: Sequence[Tree]) -> str:
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
    return section if isinstance(section, Mapping) else {}


def _last(layers: Sequence[Tree], section: str, key: str) -> int:
    """Return the index of the last layer that sets the key, or -1."""
    return max((i for i, tree in enumerate(layers) if key in _section(tree, section)), default=-1)
