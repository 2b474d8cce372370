"""TRL's names in errors and on the page agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.config import recipe
from millrace.config.layers import is_native
from millrace.errors import ConfigError
from millrace.extras.verl.trl import HINTS

PAGE = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text()
ROWS = [
    (set(re.findall(r"`([a-z]\w*)", left)), right)
    for left, right in re.findall(r"^\| (.*?) \| (.*) \|$", PAGE.partition("## Arguments")[2], re.M)
]


def keys_of(text: str) -> set[str]:
    """Return the keys of millrace in a text."""
    words = re.findall(r"[a-z_]+(?:\.\w+)+", text)
    return {word for word in words if is_native(word)}


def test_the_page_has_a_row_for_each_name_and_no_other_name() -> None:
    assert set().union(*(names for names, _ in ROWS)) - {"GRPOConfig"} == set(HINTS)


@pytest.mark.parametrize("name", HINTS)
def test_a_name_has_the_keys_of_its_row(name: str) -> None:
    row = next(right for names, right in ROWS if name in names)
    assert keys_of(HINTS[name]) <= keys_of(row)
    assert keys_of(HINTS[name]) or HINTS[name].startswith("none") or "=" in HINTS[name]
    assert ("none" in HINTS[name][:4]) == row.startswith("none")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("num_generations=8", "rollout.n=VALUE"),
        ("rollout.num_generations=8", "rollout.n=VALUE"),
        ("per_device_train_batch_size=4", "actor.ppo_mini_batch_size=VALUE"),
        ("loss_type=dapo", "actor.loss_agg_mode=VALUE"),
        ("temperature=1.0", "rollout.temperature=VALUE"),
        ("vllm_mode=colocate", "mode=colocate_sync"),
    ],
)
def test_a_name_of_trl_is_refused_with_the_key_to_use(override: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="no such key: it is a name of TRL's") as caught:
        recipe.load("quickstart", [override])
    assert f"Fix: {fix}" in str(caught.value)
