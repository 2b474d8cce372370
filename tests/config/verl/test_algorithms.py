"""Losses and estimators in verl's form give what the package's own give."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.algorithms.advantage import AdvantageBatch, estimate
from millrace.algorithms.conformance import findings, gradient, rewards, tokens
from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.losses import POLICY_LOSSES
from millrace.config import ActorConfig, AlgorithmConfig
from tests.algorithms.options import advantage_options
from tests.e2e import runs

FILE = """
from typing import Any, Optional

import torch
import verl.utils.torch_functional as verl_F
from millrace.algorithms.policy_loss import policy_loss
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.utils import as_torch_index, group_mean_std
from verl.workers.config import ActorConfig


@register_policy_loss("clip")
def clip(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
         config: Optional[ActorConfig] = None, rollout_is_weights=None):
    assert isinstance(config, ActorConfig) and not isinstance(config, AlgoConfig)
    delta = torch.clamp(log_prob - old_log_prob, min=-20, max=20)
    ratio = torch.exp(delta)
    bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * bounded)
    bound = -advantages * config.get("clip_ratio_c", 3.0)
    losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    kl = verl_F.masked_mean(-delta, response_mask)
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode,
                    **config.global_batch_info)
    return loss, {"actor/ppo_kl": kl.detach().item()}


@policy_loss(bounds_stale=True)
@register_policy_loss("marked")
def marked(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
           config=None, **kwargs):
    tau = config.policy_loss.tau
    gate = torch.sigmoid(tau * (torch.exp((log_prob - old_log_prob).clamp(-20, 20)) - 1)) * 4 / tau
    return agg_loss(-advantages * gate, response_mask, loss_agg_mode), 0.0, 0.0, 0.0


@register_policy_loss("plus")
def plus(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode) + 0.1, {}


@register_policy_loss("twice")
def twice(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}


@register_adv_est("grpo")
def grpo(token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True,
         config: Optional[AlgoConfig] = None, **kwargs: Any):
    scores = token_level_rewards.sum(-1)
    g = as_torch_index(index)
    mean, std, count = group_mean_std(scores, g, eps=0.0)
    scores = torch.where(count[g] > 1, (scores - mean[g]) / (std[g] + epsilon), 0.0)
    return scores.unsqueeze(-1) * response_mask, scores.unsqueeze(-1) * response_mask


@register_adv_est("gae")
def gae(token_level_rewards, values, response_mask, gamma, lam):
    advantages, last, after = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[-1])):
        delta = token_level_rewards[:, t] + gamma * after - values[:, t]
        on = response_mask[:, t]
        last = torch.where(on > 0, delta + gamma * lam * last, 0.0)
        after = torch.where(on > 0, values[:, t], 0.0)
        advantages[:, t] = last
    return advantages, advantages + values


@register_adv_est("remax")
def remax(token_level_rewards, reward_baselines, response_mask):
    to_go = (token_level_rewards * response_mask).flip(-1).cumsum(-1).flip(-1)
    return (to_go - reward_baselines.unsqueeze(-1)) * response_mask, to_go


@register_adv_est("more")
def more(token_level_rewards, response_mask, teacher):
    return token_level_rewards, token_level_rewards
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / f"verl_form_{len(sys.modules)}.py"
    path.write_text(FILE)
    return path


def loss_of(file: Path, name: str, **options: Any) -> Any:
    keys = {"loss_mode": f"{file}:{name}", "options": options}
    actor = ActorConfig.model_validate({"policy_loss": keys})
    return actor.policy_loss.loss, actor.loss_options()


def test_ppo_in_verls_form_is_vanilla(file: Path) -> None:
    loss, options = loss_of(file, "clip")
    own = POLICY_LOSSES["vanilla"]
    for seed in range(5):
        x = tokens(seed, spread=1.5)
        got, want = gradient(loss, x, options), gradient(own, x, own.options())
        assert torch.allclose(got[0], want[0], atol=1e-12)
        assert torch.allclose(got[1], want[1], atol=1e-12)
    assert findings(loss, options) == []
    assert loss.joins_tokens and not loss.bounds_stale


def test_options_and_facts_of_a_loss_in_verls_form(file: Path) -> None:
    loss, options = loss_of(file, "marked", tau=1.0)
    assert loss.bounds_stale and findings(loss, options) == []
    (found,) = findings(*loss_of(file, "marked"))
    assert "tau" in found.seen and "actor.policy_loss.options.tau=VALUE" in found.fix


@pytest.mark.parametrize("name", ["plus", "twice"])
def test_a_loss_that_aggregates_otherwise_is_refused(name: str, file: Path) -> None:
    (found,) = findings(*loss_of(file, name))
    assert found.name == "the function fails" and "agg_loss" in found.fix


@pytest.mark.parametrize(
    ("name", "needs"), [("grpo", set()), ("gae", {"values"}), ("remax", {"greedy_scores"})]
)
def test_estimators_in_verls_form_are_those_of_the_package(
    name: str, needs: set[str], file: Path
) -> None:
    found = AlgorithmConfig(adv_estimator=f"{file}:{name}").estimator
    options = advantage_options(whiten=False, gamma=0.9, lam=0.8)
    assert found.needs == needs
    for seed in range(5):
        batch: AdvantageBatch = rewards(seed)
        got = estimate(found, batch, options).tokens
        want = estimate(ESTIMATORS[name], batch, options).tokens
        assert torch.allclose(got, want, atol=1e-9), name
    assert findings(found, options) == []


def test_an_estimator_that_needs_more_says_what_there_is(file: Path) -> None:
    found = findings(AlgorithmConfig(adv_estimator=f"{file}:more").estimator, advantage_options())
    assert "teacher" in found[0].seen and "default" in found[0].fix


def test_a_run_trains_with_both(tmp_path: Path, file: Path) -> None:
    keys = [
        f"actor.policy_loss.loss_mode={file}:clip",
        f"algorithm.adv_estimator={file}:grpo",
        "mode=colocate_sync",
    ]

    async def main() -> Any:
        async with runs.session(tmp_path, *keys) as s:
            return await runs.run(s, tmp_path / "run", *keys)

    assert asyncio.run(main()).complete
    rows = [row for row in runs.rows(tmp_path / "run") if "actor/grad_norm" in row]
    assert rows and all(row["actor/grad_norm"] > 0 for row in rows)
