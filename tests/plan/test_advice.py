"""Advice on runs of the virtual clock, whose gain a second run shows, and on runs of real machines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.config import recipe
from millrace.extras.plan.advice import advise
from millrace.extras.plan.fit import WALL, steady
from millrace.persist.run_reader import RunReader
from tests.plan.simulated import COST, simulated
from tests.sweeps import sweep

H200 = Path(__file__).parent.parent / "report" / "h200"


def rate(run: RunReader) -> float:
    rows = steady(run)
    return sum(row["train/samples"] for row in rows) / sum(row[WALL] for row in rows)


SITUATIONS: dict[str, tuple[list[str], Any, str]] = {
    "a staleness of 0": (["mode=on_policy_pipeline"], COST, "mode"),
    "a drain with a long tail": (["mode=async_staleness", "rollout.max_num_seqs=32"], COST, "mode"),
    "few decode slots": (["rollout.max_num_seqs=12"], COST, "rollout.max_num_seqs"),
    "a small staleness": (
        ["async_training.staleness_threshold=0.5", "rollout.max_num_seqs=64"],
        COST,
        "async_training.staleness_threshold",
    ),
    "a trainer with too few devices": (
        ["rollout.n_gpus_per_node=3", "rollout.max_num_seqs=32"],
        replace(COST, train_token_s=1.2e-3),
        "trainer.n_gpus_per_node",
    ),
    "strict order": (
        ["async_training.lookahead=1", "rollout.max_num_seqs=64"],
        COST,
        "async_training",
    ),
}


@pytest.mark.parametrize("name", sweep(SITUATIONS, "a staleness of 0".__eq__))
def test_a_run_that_follows_its_advice_gains_what_the_interval_says(
    name: str, tmp_path: Path
) -> None:
    keys, cost, key = SITUATIONS[name]
    run = simulated(tmp_path / "run", keys, cost)
    first, *others = advise(run)
    assert key in str(first.overrides) and "Bound by " in first.text, first
    for one in (first, *others):
        assert one.gain is not None and 0 < one.low < one.gain < one.high, one
        recipe.load(str(run.path / "config.yaml"), [], one.overrides)
    after = simulated(tmp_path / "after", [*keys, *first.overrides], cost)
    assert first.low < rate(after) / rate(run) - 1 < first.high
    assert advise(RunReader(run.path).read()) == [first, *others]


NONE: dict[str, tuple[list[str], Any, str]] = {
    "a busy trainer": (
        ["rollout.max_num_seqs=32"],
        replace(COST, train_token_s=1.6e-3),
        "bound by the trainer: it is busy",
    ),
    "slow steps of many requests": (
        ["rollout.max_num_seqs=8"],
        replace(COST, token_s=1e-4, request_s=1.2e-3),
        "The run is bound by",
    ),
}


@pytest.mark.parametrize("name", sweep(NONE, "a busy trainer".__eq__))
def test_one_line_says_why_there_is_no_advice(name: str, tmp_path: Path) -> None:
    keys, cost, why = NONE[name]
    (one,) = advise(simulated(tmp_path / "run", keys, cost))
    assert not one.overrides and one.gain is None
    assert one.text.startswith("none: ") and why in one.text, one.text


def test_full_engines_that_lose_time_get_no_more_slots(tmp_path: Path) -> None:
    """A larger staleness would fill them, and they would be slower."""
    cost = replace(COST, token_s=0.0023, request_s=36.4e-6, queue=0.5)
    keys = ["actor.ppo_mini_batch_size=16", "rollout.n=8", "rollout.max_num_seqs=128"]
    assert "max_num_seqs" not in str(advise(simulated(tmp_path / "run", keys, cost)))


@pytest.mark.parametrize("name", sweep(["run-0", "run-1"], "run-0".__eq__))
def test_two_h200s_get_no_advice_that_was_measured_to_be_a_loss(name: str) -> None:
    """From run 0, a swap with staleness 3.2 was 20 % slower, though it filled the engines."""
    for one in advise(RunReader(H200 / name).read()):
        assert "staleness_threshold" not in str(one.overrides), one
        assert "max_num_seqs" not in str(one.overrides), one


SHARES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "validations": (["rollout.test_freq=2"], {"validation_s": 60.0}, "rollout.test_freq="),
    "checkpoints": (["trainer.save_freq=2"], {"save_s": 6.0}, "trainer.save_freq="),
    "reward workers": (
        ["reward.num_workers=1", "rollout.max_num_seqs=32"],
        {"cost": replace(COST, reward_s=0.4)},
        "reward.num_workers=",
    ),
}


@pytest.mark.parametrize("name", sweep(SHARES, "validations".__eq__))
def test_a_share_that_was_measured_needs_no_simulation(name: str, tmp_path: Path) -> None:
    keys, options, key = SHARES[name]
    run = simulated(tmp_path / "run", keys, **options)
    one = next(one for one in advise(run) if key in str(one.overrides))
    assert one.gain is None
    recipe.load(str(run.path / "config.yaml"), [], one.overrides)


def test_full_slots_whose_step_is_open_get_a_sentence_without_a_number(tmp_path: Path) -> None:
    """Tokens that scatter leave open how a step grows with its requests."""
    run = simulated(tmp_path / "run", ["rollout.max_num_seqs=2"])
    for version, row in run.rows.items():
        row["rollouter/tokens_per_s"] *= 1.6 if version % 2 else 0.6
    found = {str(one.overrides): one for one in advise(run)}
    one = found["('rollout.max_num_seqs=16',)"]
    assert one.gain is None and "Requests wait for a decode slot" in one.text


def test_a_run_that_its_accounts_do_not_explain_gets_none(tmp_path: Path) -> None:
    """Each version takes three times as long as its accounts say."""
    run = simulated(tmp_path / "run", ["rollout.max_num_seqs=64"])
    for row in run.rows.values():
        row[WALL] *= 3
    (one,) = advise(run)
    assert "in its simulation" in one.text


def test_few_versions_get_none(tmp_path: Path) -> None:
    (one,) = advise(simulated(tmp_path / "run", versions=8))
    assert "whole versions after its first 2" in one.text and not one.overrides


def test_a_folder_without_its_configuration_gets_none(tmp_path: Path) -> None:
    shutil.copytree(H200 / "run-0", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("no_such_key: 1\n")
    (one,) = advise(RunReader(tmp_path / "run").read())
    assert "no readable configuration" in one.text and not one.overrides


def test_windows_get_none(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", ["rollout.max_num_seqs=64"])
    path = run.path / "config.yaml"
    path.write_text(path.read_text().replace("window: 0", "window: 8"))
    (one,) = advise(RunReader(run.path).read())
    assert "algorithm.tppo.window" in one.text and not one.overrides
