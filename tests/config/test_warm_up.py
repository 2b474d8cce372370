"""The warm-up of a recipe: it is for new models. For their own models, users must ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config import Config, recipe
from millrace.errors import ConfigError

QUICKSTART = "quickstart"


def load(*overrides: str, keep: bool = False) -> Config:
    return recipe.load(QUICKSTART, list(overrides), keep_warm_up=keep)


def test_a_model_of_the_users_own_is_not_warmed_up_unasked() -> None:
    config = load("model.path=mine")
    assert config.sft.steps == 0
    (note,) = config.notes
    assert "model.path = 'mine'" in note and "sft.steps=200" in note


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 200),
        (["model.path=''"], 200),
        (["model.path=mine", "sft.steps=50"], 50),
        (["model.path=mine", "sft.steps=0"], 0),
    ],
)
def test_a_warm_up_that_is_asked_for_is_made(overrides: list[str], steps: int) -> None:
    config = load(*overrides)
    assert config.sft.steps == steps and config.notes == ()


def test_sft_alone_asks_for_it() -> None:
    config = load("model.path=mine", keep=True)
    assert config.sft.steps == 200 and config.notes == ()


def test_a_recipe_that_sets_both_keys_wants_both(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("model: {path: mine}\nsft: {steps: 3}\n")
    (tmp_path / "child.yaml").write_text("inherits: both.yaml\nname: child\n")
    (tmp_path / "other.yaml").write_text("inherits: both.yaml\nmodel: {path: other}\n")
    steps = {p.stem: recipe.load(p).sft.steps for p in tmp_path.glob("*.yaml")}
    assert steps == {"both": 3, "child": 3, "other": 0}
    assert recipe.load(tmp_path / "both.yaml", ["model.path=third"]).sft.steps == 0


def test_a_later_layer_may_take_the_steps_away_without_a_note() -> None:
    config = recipe.load(QUICKSTART, ["model.path=mine"], ["sft.steps=0"])
    assert config.sft.steps == 0 and config.notes == ()


@pytest.mark.parametrize("tree", ["sft: 3", "sft: {steps: many}", "model: {path: 3}", "model: []"])
def test_what_is_wrong_is_still_said(tmp_path: Path, tree: str) -> None:
    (tmp_path / "wrong.yaml").write_text(tree)
    with pytest.raises(ConfigError):
        recipe.load(tmp_path / "wrong.yaml", ["rollout.n=4"])


VLLM = [
    "gpu_memory_utilization=0.5",
    "enforce_eager=true",
    "enable_prefix_caching=false",
    "max_num_batched_tokens=4096",
    "free_cache_engine=false",
]


@pytest.mark.parametrize("key", VLLM)
def test_keys_of_vllm_are_refused_with_the_torch_engine(key: str) -> None:
    name = f"rollout.{key.partition('=')[0]}"
    with pytest.raises(ConfigError, match=rf"{name} = .*engine=torch.*Fix: rollout.engine=vllm"):
        load(f"rollout.{key}")
    assert load(f"rollout.{key}", "rollout.engine=vllm").rollout.engine == "vllm"


def test_a_checkpoint_of_an_earlier_millrace_may_have_them() -> None:
    """Earlier releases ignored these keys, so such a checkpoint can be resumed and exported."""
    tree = load().model_dump(mode="json")
    tree["rollout"]["enforce_eager"] = True
    assert recipe.parse(tree).rollout.enforce_eager
