"""The warm-up belongs to models made on the spot: for a user's own model it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]


def dropped(merged: dict[str, Any], layers: Sequence[Tree]) -> str:
    """Set sft.steps to 0 where a later layer than its own named a model. Return a note, if any.

    A layer is a recipe file, or one set of overrides. One that sets both keys wants both.
    """
    path = _section(merged, "model").get("path")
    steps = _section(merged, "sft").get("steps")
    if not path or not steps or _last(layers, "sft", "steps") >= _last(layers, "model", "path"):
        return ""
    merged["sft"] = {**merged["sft"], "steps": 0}
    return (
        f"no supervised warm-up: model.path = {path!r} was set over the recipe's sft.steps = "
        f"{steps}. Add sft.steps={steps} to have it"
    )


def _section(tree: Tree, name: str) -> Tree:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _last(layers: Sequence[Tree], section: str, key: str) -> int:
    """The last layer that sets the key, or -1."""
    return max((i for i, tree in enumerate(layers) if key in _section(tree, section)), default=-1)
