"""Losses, corrections and metrics of log-probs that no test of one function would give them.

There are no models here: a stand-in returns the log-probs, so every combination is quick.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.policy_loss import AggMode
from millrace.config import Config
from millrace.train.experience import Models, make_experience
from millrace.train.metrics import Meter, batch_metrics
from millrace.train.mini_batch import mini_batches, settle
from millrace.train.options import step_options
from millrace.train.policy_loss import CRITIC_SUMS, POLICY_SUMS, CriticLoss, PolicyLoss
from millrace.train.rows import BatchArrays

OWN = {"use_rollout_log_probs": False}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token weights": {"rollout_is": "token"},
    "sequence weights": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    "geometric weights": {"rollout_is": "geometric", "rollout_is_threshold_lower": 0.1},
    "normalised": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "rules": {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": ("0.1_9.0", 1e4)},
    "veto": {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 9.0}
    | {"rollout_token_veto_threshold": 1e-4},
    "second moment": {"m2_threshold": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "interpolated": {"rollout_is": "token", "proximal": "interpolate"},
    "linear, sequence weights": {"rollout_is": "sequence", "proximal": "linear"},
    "interpolated, rules": {"proximal": "linear", "rollout_rs": "seq_mean_k3"}
    | {"rollout_rs_threshold": 100.0, "off_policy_mask_threshold": 0.1},
    "before the baseline": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.1_9.0"}
    | {"reject_before_baseline": True},
}
SHAPES = {
    "ragged": ([3, 1, 0, 5], [1, 4, 2]),
    "one token": ([1],),
    "empty": ([0, 0],),
    "groups of one": ([2], [0], [1]),
}
"""The trained tokens of each trajectory of each sample."""


def config_of(mode: str, agg: str, decoupled: bool, **keys: Any) -> Config:
    loss = {"loss_mode": mode, "clip_cov_lb": -100.0, "clip_cov_ub": 100.0}
    if not POLICY_LOSSES[mode].joint:
        loss["top_entropy_quantile"] = 0.6
    actor = {"policy_loss": loss, "loss_agg_mode": agg, "entropy_coeff": 0.1}
    return Config(
        actor=actor | {"use_kl_loss": True, "kl_loss_type": "k3"} | keys.pop("actor", {}),
        async_training=OWN if decoupled else {},
        **keys,
    )


@dataclass
class Given:
    """A batch and what each model says of its tokens."""

    arrays: BatchArrays
    current: Tensor
    reference: Tensor
    values: Tensor
    entropies: Tensor
    steps: int = 0

    def model(self, *outputs: Tensor) -> Any:
        return SimpleNamespace(steps=0, tokens=lambda *_, **__: list(outputs))


def given(shape: str, seed: int, size: float) -> Given:
    """Return random log-probs that differ by up to `size` nats. About a third of tokens are old."""
    draw = torch.Generator().manual_seed(seed)
    counts = [count for group in SHAPES[shape] for count in group]
    lengths = torch.tensor(counts)
    ids = torch.repeat_interleave(torch.arange(len(counts)), lengths)
    edges = np.cumsum([0, *map(len, SHAPES[shape])])
    groups = torch.from_numpy(np.repeat(np.arange(len(edges) - 1), np.diff(edges)))

    def log_probs() -> Tensor:
        return -size * torch.rand(len(ids), generator=draw, dtype=torch.float64) ** 4

    scores = torch.rand(len(counts), generator=draw, dtype=torch.float64)
    ages = torch.randint(0, 3, (len(ids),), generator=draw)
    arrays = BatchArrays(
        version=2,
        rows=SimpleNamespace(  # type: ignore[arg-type]
            first_row=edges,
            trajectory=np.arange(len(counts)),
            num_trajectories=len(counts),
            old_kv=(ids % 2 == 0).numpy(),
        ),
        lengths=lengths,
        ids=ids,
        ages=ages,
        rollout=log_probs(),
        scores=scores,
        turn_rewards=None,
        groups=groups,
        truncated=torch.zeros(len(counts), dtype=torch.bool),
        unfiltered=torch.ones(len(ids), dtype=torch.bool),
        components=None,
        equal_share=0.0,
        greedy_scores=None,
    )
    return Given(arrays, log_probs(), log_probs(), log_probs(), -log_probs())


def trained(given: Given, config: Config, cut: int, dtype: Any = torch.float64) -> dict[str, Any]:
    """Return sums, gradients and metrics of one step, with micro-batches of `cut` trajectories."""
    options = step_options(config)
    policy = given.model(given.current, given.entropies, given.current.exp())
    critic = given.model(given.values) if config.algorithm.needs_critic else None
    data = make_experience(
        given.arrays, Models(policy, critic, given.model(given.reference)), options, 0.1
    )
    members = np.concatenate(mini_batches(data, 100))
    mini = settle(data, members, policy, options, untouched=True)
    found: dict[str, Any] = {"mask": mini.mask, "factors": mini.factors, **mini.metrics}
    learners: list[tuple[str, Any, Any, tuple[Tensor, ...]]] = [
        ("policy", PolicyLoss, POLICY_SUMS, (given.current, given.entropies))
    ]
    if config.algorithm.needs_critic:
        learners.append(("critic", CriticLoss, CRITIC_SUMS, (given.values,)))
    for name, make, names, outputs in learners:
        loss_of, meter = make(data, mini, options), Meter(names)
        leaves = [output.detach().clone().to(dtype).requires_grad_() for output in outputs]
        for first in range(0, len(data.lengths), cut):
            source = ((data.ids >= first) & (data.ids < first + cut)).nonzero().squeeze(-1)
            micro: Any = SimpleNamespace(
                source=source,
                sequence=data.ids[source] - first,
                num_sequences=min(cut, len(data.lengths) - first),
                layout=SimpleNamespace(num_cells=1, num_padded_cells=1),
            )
            loss, sums = loss_of(tuple(leaf[source] for leaf in leaves), micro)
            loss.backward()
            meter.add(sums, leaves[0].detach()[source], micro)
        sums = meter.take()
        meter.finish(sums.tolist(), 1.0, 1.0, first_pass=True)
        found |= {f"{name} sums": sums} | {f"{name} {i}": x.grad for i, x in enumerate(leaves)}
        if name == "policy":
            own = batch_metrics(
                data, meter, None, [], options, same_weights=mini.mask, sum_ranks=lambda x: x
            )
            found |= {f"metric {key}": value for key, value in own.items()}
    return found


def check_finite(found: dict[str, Any]) -> None:
    for name, value in found.items():
        finite = torch.isfinite(value).all() if isinstance(value, Tensor) else math.isfinite(value)
        assert finite, (name, value)


def check_same(found: dict[str, Any], want: dict[str, Any], rtol: float = 1e-9) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, Tensor):
            largest = float(value.double().abs().max()) if len(value) else 0.0
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol * largest, msg=name)
        elif name != "metric train/pad_share":
            assert found[name] == pytest.approx(value, rel=rtol, abs=rtol), name


def possible(mode: str, name: str) -> bool:
    """Return whether the configuration allows the correction in bypass mode."""
    keys = CORRECTIONS[name]
    return "proximal" not in keys and not ("rollout_is" in keys and POLICY_LOSSES[mode].reads_old)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("mode", tuple(POLICY_LOSSES))
def test_extreme_ratios_are_finite_and_do_not_depend_on_the_cut(mode: str, name: str) -> None:
    """With a correction, a log-prob of the rollout that is not finite is rejected."""
    i = list(CORRECTIONS).index(name) + tuple(POLICY_LOSSES).index(mode)
    for shape, decoupled in (("ragged", i % 2 == 0), (list(SHAPES)[i % 4], i % 2 == 1)):
        decoupled |= not possible(mode, name)
        algorithm = {"rollout_correction": CORRECTIONS[name]}
        config = config_of(mode, get_args(AggMode)[i % 5], decoupled, algorithm=algorithm)
        batch = given(shape, len(shape), 700.0)
        weighs = bool(CORRECTIONS[name].keys() & {"rollout_is", "rollout_rs", "m2_threshold"})
        if weighs and len(batch.arrays.rollout) > 1:
            batch.arrays.rollout[1] = -math.inf
            batch.arrays.rollout[-1] = math.nan
        whole = trained(batch, config, 100)
        check_finite(whole)
        check_same(trained(batch, config, 1), whole)
        check_finite(trained(batch, config, 2, torch.float32))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_token_that_is_not_trained_is_never_read(name: str) -> None:
    """Values of tokens over the age limit change no loss, gradient or metric."""
    for (i, mode), decoupled in itertools.product(enumerate(tuple(POLICY_LOSSES)), (True, False)):
        if not (decoupled or possible(mode, name)):
            continue
        config = config_of(
            mode,
            get_args(AggMode)[i % 5],
            decoupled,
            algorithm={"rollout_correction": {"max_token_age": 1} | CORRECTIONS[name]},
            actor={"use_bias_correction_kl": i % 2 == 0},
        )
        found = []
        for value in (0.0, -math.inf, math.nan, -1e30):
            batch = given("ragged", i, 3.0)
            old = batch.arrays.ages > 1
            assert old.any()
            for x in (batch.arrays.rollout, batch.current, batch.reference, batch.entropies):
                x[old] = value
            found.append(trained(batch, config, 2))
        clean, *spoiled = found
        check_finite(clean)
        for each in spoiled:
            check_same(each, clean)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"adv_estimator": "gae", "lam": 0.9},
        {"adv_estimator": "optimal_token_baseline"},
        {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True},
    ],
    ids=lambda keys: keys["adv_estimator"],
)
def test_estimators_and_the_critic_stand_tokens_without_a_log_prob(
    algorithm: dict[str, Any],
) -> None:
    """Here old tokens still count, so that their values must only not spoil the others."""
    algorithm |= {"rollout_correction": {"max_token_age": 1}}
    batch = given("ragged", 3, 3.0)
    for x in (batch.arrays.rollout, batch.current, batch.reference):
        x[batch.arrays.ages > 1] = -math.inf
    config = config_of("vanilla", "token-mean", False, algorithm=algorithm)
    check_finite(trained(batch, config, 2))


def test_a_critics_value_of_a_token_that_is_not_trained_has_no_gradient() -> None:
    config = config_of(
        "vanilla",
        "token-mean",
        False,
        algorithm={"adv_estimator": "gae", "rollout_correction": {"max_token_age": 1}},
    )
    batch = given("ragged", 3, 3.0)
    options = step_options(config)
    policy = batch.model(batch.current, batch.entropies)
    models = Models(policy, batch.model(batch.values), None)
    data = make_experience(batch.arrays, models, replace(options), 0.1)
    mini = settle(data, np.arange(len(data.lengths)), policy, options, untouched=True)
    values = batch.values.clone()
    values[~mini.mask] = math.inf
    micro: Any = SimpleNamespace(source=torch.arange(len(data.ids)))
    values.requires_grad_()
    CriticLoss(data, mini, options)((values,), micro)[0].backward()
    assert values.grad is not None and not values.grad[~mini.mask].any()
    assert values.grad[mini.mask].any() and values.grad.isfinite().all()
