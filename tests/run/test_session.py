"""The end of a resumed run, against its checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from millrace.config import Config, recipe
from millrace.config.keys import ResumeProgress
from millrace.errors import ConfigError
from millrace.pipeline.checkpoint import Manifest
from millrace.run.evaluate import evaluate
from millrace.run.session import check_end, trained_by
from millrace.train.optim import lr_at
from tests.e2e.runs import progress

LIMITS = ("rollout.total_rollout_steps", "trainer.total_epochs", "trainer.total_training_steps")
SIZE = ["actor.ppo_mini_batch_size=4", "async_training.trigger_parameter_sync_step=2"]
MORE = [
    "rollout.total_rollout_steps=96",
    "trainer.total_epochs=6",
    "trainer.total_training_steps=12",
]


def checkpoint_of(folder: Path, **counts: float) -> Path:
    """Return a checkpoint that has trained 64 samples in 8 versions."""
    manifest = Manifest(1, 8, 16, 64, 64, {}, counts)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def config_of(*overrides: str) -> Config:
    return recipe.load("quickstart", ["mode=colocate_sync", *SIZE, *overrides])


@pytest.mark.parametrize("key", LIMITS)
def test_the_key_that_ends_a_run_before_its_checkpoint_is_named(tmp_path: Path, key: str) -> None:
    """64 samples are 4 passes over 16 rows, or 8 windows of 8 samples."""

    def check(value: int, *overrides: str) -> None:
        check_end(config_of(*MORE, f"{key}={value}", *overrides), 16, checkpoint_of(tmp_path))

    exact = {"rollout.total_rollout_steps": 64, "trainer.total_epochs": 4}.get(key, 8)
    check(exact)
    message = rf"{key} = {exact - 1}: the run would end after \d+ samples, .* has trained 64\."
    if key == "trainer.total_training_steps":
        check(exact, "async_training.trigger_parameter_sync_step=1")  # another window
        message = rf"{key} = 7: the run would end after version 7, .* has version 8\."
    with pytest.raises(ConfigError, match=message):
        check(exact - 1)


def test_a_longer_run_does_not_warm_up_again() -> None:
    """Its warm-up was 10 % of 100 steps. 10 % of 2000 steps would begin it again."""
    share = ["actor.optim.lr_warmup_steps=0", "actor.optim.lr_warmup_steps_ratio=0.1"]
    longer = config_of("actor.optim.lr_scheduler_type=constant", *share)
    assert longer.actor.optim.warmup_steps(2000) == 200
    counts = {"actor_warmup_steps": 10.0, "critic_warmup_steps": 3.0}
    kept = longer.with_warm_up_of(counts)
    assert kept.actor.optim.warmup_steps(2000) == 10
    assert [lr_at(kept.actor.optim, 2000, step) for step in (10, 100)] == [
        longer.actor.optim.lr
    ] * 2
    assert kept.critic == longer.critic and kept.actor.optim.betas == longer.actor.optim.betas
    asked = config_of("actor.optim.lr_warmup_steps=200")
    assert asked.with_warm_up_of(counts) == asked


def test_a_resume_counts_the_steps_that_were_taken(tmp_path: Path) -> None:
    """A checkpoint of an older millrace does not count them: 64 samples were 16 mini-batches."""
    config = config_of("trainer.total_training_steps=12")
    found = [trained_by(checkpoint_of(tmp_path, **n)) for n in ({"optimizer_steps": 9}, {})]
    assert found == [
        ResumeProgress(version=8, samples=64, optimizer_steps=9),
        ResumeProgress(version=8, samples=64),
    ]
    assert [config.derived(16, t).lr_horizon for t in found] == [9 + 8, 16 + 8]
    assert trained_by(None) == ResumeProgress()


def test_a_run_with_several_limits_says_which_one_ends_it() -> None:
    several = config_of("rollout.total_rollout_steps=96", "trainer.total_training_steps=20")
    assert several.end_note(16) == (
        "rollout.total_rollout_steps=96 ends the run after 96 samples, "
        "before trainer.total_training_steps=20 (160)"
    )
    assert config_of("rollout.total_rollout_steps=96").end_note(16) == ""


@pytest.mark.parametrize(("window", "noted"), [(0, False), (511, False), (512, True), (900, True)])
def test_a_window_that_cuts_no_response_is_noted(window: int, noted: bool) -> None:
    keys = "algorithm.adv_estimator=gae", "rollout.n=1", "rollout.max_response_length=512"
    note = config_of(*keys, f"algorithm.tppo.window={window}").window_note
    assert bool(note) == noted and (not noted or "max_response_length=512" in note)


@pytest.mark.parametrize("key", ["reward.function=no_file.py:f", "data.val_files=[no_file.jsonl]"])
def test_a_refused_evaluation_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no_file"):
        asyncio.run(evaluate(recipe.load("quickstart", [key]), progress()))
    assert not [*tmp_path.iterdir()]
