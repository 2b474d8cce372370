"""The number of forward passes of a step, by configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millrace.train.fsdp.trainable import Trainable
from tests.train.algorithm_cases import (
    DECOUPLED,
    REINFORCE,
    config_of,
    correction,
    engine_of,
    samples_of,
    step,
)

RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.3}
OTB = {"adv_estimator": "optimal_token_baseline"}
COV = {"policy_loss": {"loss_mode": "clip_cov"}}
KL_REWARD = {"use_kl_in_reward": True}
PASSES: dict[str, tuple[dict[str, Any], int, int]] = {
    # configuration, forward passes of the policy for a batch of one step, and of two steps
    "bypass": ({}, 0, 0),
    "bypass, weights in passing": (
        {"actor": REINFORCE, "algorithm": correction(rollout_is="sequence")},
        0,
        0,
    ),
    "bypass, age": ({"algorithm": correction(max_token_age=1)}, 0, 0),
    "bypass, rejection": ({"algorithm": correction(**RS)}, 1, 2),
    "bypass, rejection before the baseline": (
        {"algorithm": correction(**RS, reject_before_baseline=True)},
        1,
        1,
    ),
    "bypass, normalised weights": (
        {
            "actor": REINFORCE,
            "algorithm": correction(rollout_is="token", rollout_is_batch_normalize=True),
        },
        1,
        2,
    ),
    "bypass, clip_cov": ({"actor": COV}, 1, 2),
    "bypass, optimal token baseline": ({"algorithm": OTB}, 1, 1),
    "bypass, entropy": ({"actor": {"policy_loss": {"top_entropy_quantile": 0.2}}}, 1, 2),
    "bypass, second moment": ({"algorithm": correction(m2_threshold=0.04)}, 1, 2),
    "bypass, off-policy mask": ({"algorithm": correction(off_policy_mask_threshold=0.1)}, 0, 0),
    "bypass, KL in the reward": ({"algorithm": KL_REWARD}, 0, 0),
    "decoupled": ({"async_training": DECOUPLED}, 0, 1),
    "decoupled, weights": (
        {"async_training": DECOUPLED, "algorithm": correction(rollout_is="token")},
        1,
        1,
    ),
    "decoupled, rejection": ({"async_training": DECOUPLED, "algorithm": correction(**RS)}, 1, 1),
    "decoupled, KL in the reward": ({"async_training": DECOUPLED, "algorithm": KL_REWARD}, 1, 1),
    "decoupled, clip_cov": ({"async_training": DECOUPLED, "actor": COV}, 1, 2),
    "decoupled, clip_cov and weights": (
        {"async_training": DECOUPLED, "actor": COV, "algorithm": correction(rollout_is="token")},
        1,
        2,
    ),
    "interpolated": (
        {"async_training": DECOUPLED, "algorithm": correction(proximal="interpolate")},
        0,
        0,
    ),
    "interpolated, weights in passing": (
        {
            "async_training": DECOUPLED,
            "algorithm": correction(rollout_is="token", proximal="interpolate"),
        },
        0,
        0,
    ),
    "interpolated, rejection": (
        {"async_training": DECOUPLED, "algorithm": correction(**RS, proximal="interpolate")},
        1,
        2,
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_forward_passes_are_made_only_where_something_asks_for_them(
    name: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, of_one, of_two = PASSES[name]
    calls: list[str] = []
    tokens = Trainable.tokens

    def counted(self: Trainable, *args: Any, **options: Any) -> list[torch.Tensor]:
        calls.append(self.name)
        return tokens(self, *args, **options)

    monkeypatch.setattr(Trainable, "tokens", counted)
    config = config_of(**keys)
    engine = engine_of(folder, config)
    for counts, want in (([2, 3], of_one), ([2, 3, 2, 2, 3], of_two)):
        calls.clear()
        step(engine, samples_of(5, counts))
        assert calls.count("actor") == want
        assert calls.count("reference") == config.needs_reference and calls.count("critic") == 0


def test_reference_and_critic_make_one_pass_each(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    tokens = Trainable.tokens
    monkeypatch.setattr(
        Trainable,
        "tokens",
        lambda self, *a, **o: [calls.append(self.name), tokens(self, *a, **o)][1],  # type: ignore[func-returns-value]
    )
    step(
        engine_of(
            folder, config_of(algorithm={"adv_estimator": "gae"}, actor={"use_kl_loss": True})
        ),
        samples_of(),
    )
    assert sorted(calls) == ["critic", "reference"]
