"""The configuration: every key is explained, derived numbers are true, contradictions refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from millrace.config import Config, recipe
from millrace.config.keys import ResumeProgress
from millrace.config.teacher_keys import TeacherConfig
from millrace.errors import ConfigError
from millrace.schedule.modes import MODES


def make(**sections: Any) -> Config:
    return recipe.parse(sections)


@pytest.mark.parametrize(
    ("key", "field"), list(recipe.all_keys()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_key_has_a_docstring_of_a_sentence(key: Any, field: Any) -> None:
    assert (
        field.description
        and field.description.strip().endswith(".")
        and len(field.description) >= 6
    )


def test_describe_has_every_key_with_type_and_default() -> None:
    described = {key: (kind, default) for key, kind, default, _ in recipe.describe()}
    named = {key for key in described if ".NAME." in key}
    assert [key for key in described if key not in named] == [key for key, _ in recipe.all_keys()]
    assert named == {f"teachers.NAME.{key}" for key in TeacherConfig.model_fields}

    def leaves(tree: Any, prefix: Any = "") -> Iterator[Any]:
        for key, value in tree.items():
            yield from (
                leaves(value, f"{prefix}{key}.")
                if isinstance(value, dict) and value
                else [f"{prefix}{key}"]
            )

    with_type = {key for key, (kind, _) in described.items() if kind}
    assert with_type - named == set(leaves(Config().model_dump(mode="json")))
    assert described["rollout.n"] == ("int", "8")
    assert described["data.train_files"] == ("list of str", "[]")
    assert described["async_training.on_sync"] == ("drain | interrupt | swap", "drain")
    assert described["model.trust_remote_code"] == ("bool", "false")
    assert described["actor.optim.betas"] == ("[float, float]", "[0.9, 0.999]")
    assert described["model.path"] == ("str", '""')


def test_the_defaults_are_a_configuration_and_survive_json() -> None:
    assert Config.model_validate(Config().model_dump(mode="json")) == Config()
    with pytest.raises(ValidationError):
        Config().name = "other"  # type: ignore[misc]  # frozen


counts = st.integers(1, 40)


@given(
    mini=counts,
    require=counts,
    trigger=counts,
    staleness=st.floats(0, 8),
    samples=st.integers(0, 5000),
    versions=st.integers(0, 40),
    epochs=st.integers(1, 4),
    passes=st.integers(0, 3),
    rows=st.integers(1, 1000),
    n=st.integers(2, 16),
)
def test_derived_numbers_follow_from_the_keys(
    mini: Any,
    require: Any,
    trigger: Any,
    staleness: Any,
    samples: Any,
    versions: Any,
    epochs: Any,
    passes: Any,
    rows: Any,
    n: Any,
) -> None:
    assume(samples or versions or passes)
    warmup = {"lr_warmup_steps_ratio": 0.25}
    config = make(
        actor={"ppo_mini_batch_size": mini, "ppo_epochs": epochs, "optim": warmup},
        async_training={
            "require_batches": require,
            "trigger_parameter_sync_step": trigger,
            "staleness_threshold": staleness,
        },
        rollout={"total_rollout_steps": samples, "n": n},
        trainer={"total_epochs": passes, "total_training_steps": versions},
    )
    derived = config.derived(rows)
    window = mini * require * trigger
    assert derived.window == window
    assert window <= derived.capacity <= (1 + staleness) * window + 1e-6
    assert derived.capacity > (1 + staleness) * window - 1
    limits = {
        "rollout.total_rollout_steps": samples,
        "trainer.total_epochs": passes * rows,
        "trainer.total_training_steps": versions * window,
    }
    key, samples_of_the_key = config.end(rows)
    assert derived.samples == samples_of_the_key == limits[key]
    assert derived.samples == min(limit for limit in limits.values() if limit)
    assert not versions or derived.versions <= versions
    assert derived.trajectories == derived.samples * n
    assert (derived.versions - 1) * window < derived.samples <= derived.versions * window
    assert derived.lr_horizon == derived.optimizer_steps
    assert derived.optimizer_steps % epochs == 0
    assert derived.optimizer_steps // epochs == derived.samples // mini + (
        derived.samples % mini > 0
    )
    assert derived.lookahead == (window if staleness else 1)
    assert derived.lag_bound == (derived.capacity + derived.lookahead - 2) // window
    assert derived.lr_warmup_steps == derived.lr_horizon // 4
    assert config.limits(rows) == {key: limit for key, limit in limits.items() if limit}
    endless = [limits[key] for key in limits if key != "trainer.total_epochs" and limits[key]]
    if endless:
        assert config.derived(None).samples == min(endless)
    else:
        with pytest.raises(ConfigError, match=r"rollout\.total_rollout_steps = 0: .*ends the run"):
            config.derived(None)
    assert set(asdict(derived)) == {
        "window", "capacity", "lag_bound", "lookahead", "versions",
        "optimizer_steps", "lr_horizon", "lr_warmup_steps", "samples", "trajectories", "nodes_needed",
    }  # fmt: skip


def test_100_samples_end_a_run_only_if_no_other_key_does() -> None:
    assert Config().end(50) == ("rollout.total_rollout_steps", 100)
    epochs, steps = {"total_epochs": 8}, {"total_training_steps": 500}
    assert make(trainer=epochs).end(50) == ("trainer.total_epochs", 400)
    assert make(trainer=steps).end(50) == ("trainer.total_training_steps", 500 * 32)
    assert make(trainer=steps, rollout={"total_rollout_steps": 100}).end(50)[1] == 100
    assert make(trainer=epochs | steps).end(50) == ("trainer.total_epochs", 400)


@given(
    versions=st.integers(0, 50),
    short=st.integers(0, 31),
    more=st.integers(0, 50),
    mini=counts,
    trigger=counts,
)
def test_a_resumed_run_ends_at_the_version_that_was_asked_for(
    versions: int, short: int, more: int, mini: int, trigger: int
) -> None:
    """Its checkpoint has versions of 32 samples, and a stop cut one of them short."""
    samples = max(0, 32 * versions - short)
    trained = ResumeProgress(version=versions, samples=samples, optimizer_steps=7 * versions)
    config = make(
        actor={"ppo_mini_batch_size": mini, "ppo_epochs": 2},
        async_training={"trigger_parameter_sync_step": trigger},
        trainer={"total_training_steps": versions + more or 1},
    )
    derived = config.derived(None, trained)
    assert derived.versions == (versions + more or 1)
    left = derived.versions - versions
    assert derived.samples == samples + left * mini * trigger
    assert derived.optimizer_steps == 7 * versions + left * trigger * 2


@pytest.mark.parametrize("given, word", [(True, "auto"), (False, "never"), ("auto", "auto")])
def test_resume_takes_yes_and_no(given: Any, word: str) -> None:
    assert make(trainer={"resume": given}).trainer.resume == word


def test_the_look_ahead_is_a_window_where_there_is_staleness_and_as_given_where_it_is_given() -> (
    None
):
    stale = {"staleness_threshold": 0.5}
    assert make(async_training=stale).schedule.lookahead == 32
    assert make(async_training=stale | {"lookahead": 3}).schedule.lookahead == 3
    assert make(async_training=stale, trainer={"deterministic": True}).schedule.lookahead == 1
    assert make().schedule.lookahead == 1


@pytest.mark.parametrize(
    ("train", "rollout", "in_node", "nodes"),
    [
        ((1, 4), (1, 4), 0, 1),  # the 8 devices fit the default of 8 per node
        ((1, 4), (1, 5), 0, 2),
        ((2, 4), (2, 4), 8, 2),
        ((2, 4), (1, 4), 8, 2),
        ((2, 3), (2, 2), 4, 4),
        ((1, 2), (3, 2), 4, 3),
    ],
)
def test_nodes_are_shared_where_both_sides_fit(
    train: Any, rollout: Any, in_node: Any, nodes: Any
) -> None:
    config = make(
        trainer={"nnodes": train[0], "n_gpus_per_node": train[1], "gpus_in_node": in_node},
        rollout={"nnodes": rollout[0], "n_gpus_per_node": rollout[1]},
    )
    assert config.sides.nodes_needed == config.derived().nodes_needed == nodes
    assert (
        config.trainer.ranks == train[0] * train[1]
        and config.rollout.replicas == rollout[0] * rollout[1]
    )


def test_colocated_sides_are_on_the_same_nodes() -> None:
    side = {"nnodes": 2, "n_gpus_per_node": 8}
    config = make(trainer=side, rollout=side, async_training={"placement": "colocated"})
    assert config.sides.nodes_needed == 2


def test_either_test_freq_counts() -> None:
    assert make(trainer={"test_freq": 5}).test_freq == make(rollout={"test_freq": 5}).test_freq == 5
    assert make(trainer={"test_freq": 5}, rollout={"test_freq": 5}).test_freq == 5


@given(prompt=st.integers(1, 4096), response=st.integers(1, 4096), room=st.integers(1, 9000))
def test_a_micro_batch_holds_the_longest_trajectory_or_is_refused(
    prompt: Any, response: Any, room: Any
) -> None:
    sections = {
        "rollout": {"max_prompt_length": prompt, "max_response_length": response},
        "actor": {"ppo_max_token_len_per_gpu": room},
    }
    if room >= prompt + response:
        make(**sections)
    else:
        with pytest.raises(
            ConfigError,
            match=rf"ppo_max_token_len_per_gpu = {room}: .* = {prompt + response} tokens",
        ):
            make(**sections)


@given(heads=st.integers(1, 12), groups=st.integers(1, 12), size=st.integers(1, 12))
def test_shapes_with_whole_even_heads_are_taken(heads: Any, groups: Any, size: Any) -> None:
    shape = {
        "hidden_size": heads * size,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }
    if size % 2 == 0 and heads % groups == 0:
        make(model={"shape": shape})
    else:
        with pytest.raises(ConfigError, match=r"model\.shape\."):
            make(model={"shape": shape})


@given(batch=st.integers(1, 300), mini=st.integers(1, 16), mode=st.sampled_from(sorted(MODES)))
def test_a_train_batch_is_the_window_or_refused(batch: Any, mini: Any, mode: str) -> None:
    tree = {
        "mode": mode,
        "data": {"train_batch_size": batch},
        "actor": {"ppo_mini_batch_size": mini},
    }
    if mode in ("colocate_sync", "one_step_off") and batch % mini == 0:
        assert recipe.parse(recipe.resolve([tree])).schedule.window == batch
    else:
        with pytest.raises(ConfigError, match=r"data\.train_batch_size = .*Fix: "):
            recipe.parse(recipe.resolve([tree]))


def test_one_rollout_is_allowed_where_nothing_is_divided_by_its_std() -> None:
    make(rollout={"n": 1}, algorithm={"norm_adv_by_std_in_grpo": False})
    with pytest.raises(ConfigError, match=r"rollout\.n = 1"):
        make(rollout={"n": 1})


@given(st.floats())
def test_only_finite_numbers_are_numbers(value: Any) -> None:
    assume(not 0 <= value < float("inf"))
    with pytest.raises(ConfigError):
        make(actor={"optim": {"lr": value}})
