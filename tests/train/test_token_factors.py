"""Keys that change the loss of single tokens, in the engine: entropy, KL, Huber and norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from millrace.algorithms.correction import off_policy_mask
from millrace.train.mini_batch import mini_batches, settle
from tests.train.algorithm_cases import (
    DECOUPLED,
    TEMPERATURE,
    VERSION,
    at_version,
    config_of,
    correction,
    engine_of,
    experience,
    samples_of,
    scores_of,
    step,
)


def test_tokens_of_low_entropy_have_no_policy_loss_and_still_count(folder: str) -> None:
    losses: dict[str, Any] = {"loss_mode": "vanilla", "top_entropy_quantile": 0.3}
    config = config_of(
        actor={"policy_loss": losses},
        async_training=DECOUPLED,
        algorithm=correction(rollout_is="token"),
    )
    engine, samples = engine_of(folder, config), samples_of()
    data = experience(engine, samples)
    members, _ = mini_batches(data, 4)
    for untouched in (True, False):
        mini = settle(data, members, engine.actor, engine.options, untouched=untouched)
        entropies = engine.actor.tokens(data.rows, members, temperature=TEMPERATURE)[1]
        bound = np.quantile(entropies[mini.mask].numpy(), 0.7)
        high = (entropies >= bound - 1e-12) & mini.mask
        assert 0.25 < int(high.sum()) / mini.tokens < 0.35
        assert data.correction is not None and mini.weights is not None
        torch.testing.assert_close(mini.weights, data.correction.weights * high * mini.mask)
        assert int((mini.factors > 0).sum()) == mini.tokens == int(mini.mask.sum())


def test_the_kl_in_the_loss_is_weighted_by_current_over_rollout(folder: str) -> None:
    """One step, before any update: the current policy is that of the batch's arrival."""
    keys = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
    engine = engine_of(
        folder, config_of(actor=keys | {"use_bias_correction_kl": True, "ppo_mini_batch_size": 7})
    )
    with torch.no_grad():
        for parameter in engine.reference.module.parameters():
            parameter.mul_(1.1)
    samples = samples_of()
    data = experience(engine, samples)
    pi = engine.actor.tokens(data.rows, temperature=TEMPERATURE)[0].numpy()
    x = data.reference.numpy() - pi  # type: ignore[union-attr]
    want = np.mean(np.exp(pi - data.rollout.numpy()) * (np.expm1(x) - x))
    assert step(engine, samples).metrics["actor/kl_loss"] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_the_critic_has_the_loss_that_its_key_names(folder: str, kind: str) -> None:
    config = config_of(
        actor={"ppo_mini_batch_size": 7},
        algorithm={"adv_estimator": "gae"},
        critic={"loss_fn_type": kind, "huber_delta": 0.4},
    )
    engine, samples = engine_of(folder, config), samples_of()
    data = experience(engine, samples)
    error = np.abs((data.values - data.returns).numpy())  # type: ignore[operator]
    linear = 0.4 * (error - 0.2)
    want = np.where((error > 0.4) & (kind == "huber"), linear, error**2 / 2).mean()
    assert (error > 0.4).any() and (error < 0.4).any()
    assert step(engine, samples).metrics["critic/vf_loss"] == pytest.approx(want, rel=1e-9)


def test_the_norms_of_scores_and_advantages_replace_whitening(folder: str) -> None:
    """AReaL's GRPO: a group's scores less the mean of the others, scaled by the batch's tokens."""
    config = config_of(
        algorithm={
            "adv_estimator": "reinforce_plus_plus",
            "reward_norm": {"mean_level": "group", "mean_leave1out": True},
            "adv_norm": {"std_level": "batch", "std_unbiased": False, "eps": 0.01},
        }
    )
    samples = tuple(at_version(one, VERSION) for one in samples_of())
    data = experience(engine_of(folder, config), samples)
    lengths = [t.num_policy_tokens for one in samples for t in one.trajectories]
    centred = [
        s - float(np.mean([*group[:i], *group[i + 1 :]])) if len(set(group)) > 1 else 0.0
        for group in scores_of(samples)
        for i, s in enumerate(group)
    ]
    tokens = np.repeat(np.array(centred), lengths)
    want = tokens / (np.sqrt(np.mean(tokens**2)) + 0.01)
    np.testing.assert_allclose(data.advantages.numpy(), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("own", [{}, DECOUPLED])
def test_whitening_counts_the_tokens_that_are_trained(folder: str, own: dict[str, Any]) -> None:
    """Old tokens are known before the advantages; rejected ones only in decoupled settings."""
    keys = {"max_token_age": 1, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.4_2.0"}
    algorithm = {"adv_estimator": "reinforce_plus_plus", **correction(**keys)}
    norm = {"adv_norm": {"mean_level": "batch", "std_level": "batch", "eps": 1e-8}}
    for more in ({}, norm):
        engine = engine_of(folder, config_of(async_training=own, algorithm=algorithm | more))
        data = experience(engine, samples_of())
        counted = data.include if data.correction is None else data.correction.keep
        assert (data.correction is None) == (not own) and not counted.all()
        trained = data.advantages[counted]
        assert float(trained.mean()) == pytest.approx(0, abs=1e-9)
        assert float(trained.std()) == pytest.approx(1, rel=1e-6)
        assert not data.advantages[~counted].any()


@pytest.mark.parametrize("proximal", ["interpolate", "linear"])
def test_an_estimated_proximal_policy_stays_one_if_the_baseline_takes_a_forward_pass(
    folder: str, proximal: str
) -> None:
    algorithm = {
        "adv_estimator": "optimal_token_baseline",
        **correction(rollout_is="token", proximal=proximal),
    }
    data = experience(
        engine_of(folder, config_of(async_training=DECOUPLED, algorithm=algorithm)), samples_of()
    )
    assert data.arrival is not None and data.old is None and data.correction is None


def test_the_share_of_off_policy_masked_tokens_is_of_trained_tokens(folder: str) -> None:
    """The mask sees what rejection leaves, and so does its metric."""
    keys = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.4_2.0"}
    algorithm = correction(**keys, off_policy_mask_threshold=0.01)
    engine = engine_of(folder, config_of(actor={"ppo_mini_batch_size": 7}, algorithm=algorithm))
    samples = samples_of()
    data = experience(engine, samples)
    (members,) = mini_batches(data, 7)
    mini = settle(data, members, engine.actor, engine.options, untouched=True)
    now = engine.actor.tokens(data.rows, temperature=TEMPERATURE)[0]
    policies = (now, data.rollout, data.ids, len(data.lengths))
    stays = off_policy_mask(*policies, data.advantages, threshold=0.01, include=mini.mask)
    want = float((~stays[mini.mask]).double().mean())
    assert 0 < want < 1 and mini.tokens < len(data.ids)
    found = step(engine, samples).metrics["rollout_corr/off_policy_masked_fraction"]
    assert found == pytest.approx(want, rel=1e-12)
