"""Estimates of the proximal policy that take no forward pass.

Decoupled PPO (AReaL, arXiv 2505.24298) takes its ratio against the proximal policy, from which
training started. It weighs each token by proximal / rollout. Any loss mode can do this: pass the
proximal log-probs as `old_log_probs`, and multiply by the weights of correction.py for proximal and
rollout.

Both functions mix the policy mu that drew a token and the policy theta under training:

mu      rollout_log_probs [T] floating
theta   log_probs [T] floating
d       ages [T] integers, at least 0: versions between the token's own and the live one
alpha   (v_prox - v_mu) / (v_theta - v_mu) = d / (d + 1): theta's share (A-3PO, arXiv 2512.06547)

The live version is v_prox, from which training started. The policy under training is published
next, so v_theta is v_prox + 1. alpha is 0 for a token of the live version, because the proximal
policy drew it. It is 1/2 for one version back, and then grows towards 1.

AReaL's documentation has this definition: v_prox = v_theta - 1 is the last published version.
AReaL's code differs: its v_theta is the live version, because the engine gets its new number only
after the update. Its alpha is (d - 1) / d. Tokens one version back get alpha 0, as if the policy
had not moved since.

Before the first optimizer step of a version, theta still is the proximal policy (true alpha 1). The
estimates are then too close to mu, as if a step had happened.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.algorithms.correction_plan import Proximal


def interpolate(rollout_log_probs: Tensor, log_probs: Tensor, ages: Tensor) -> Tensor:
    """Compute log mu + alpha (log theta - log mu), [T] in the dtype of log_probs, detached.

    (A-3PO, arXiv 2512.06547; AReaL's `loglinear`.) The ratio theta / prox is
    (theta / mu)^(1 / (d + 1)): one version's share of the way from mu to theta. The estimate
    assumes that log-probs move evenly from version to version. A log mu of -inf stays -inf, and
    T = 0 gives an empty tensor.
    """
    mu, theta, alpha = _parts(rollout_log_probs, log_probs, ages)
    return torch.where(mu.isneginf(), mu, mu + alpha * (theta - mu))


def interpolate_linear(rollout_log_probs: Tensor, log_probs: Tensor, ages: Tensor) -> Tensor:
    """Compute log((1 - alpha) mu + alpha theta), [T] in the dtype of log_probs, detached.

    (AReaL's `linear` approximation, areal/trainer/ppo/actor.py.) The estimate assumes that
    probabilities move evenly from version to version. It is never below `interpolate`, so
    theta / prox is at most 1 / alpha. AReaL adds 1e-10 to the probability, which changes tokens
    that are that unlikely. Here, the sum is taken in log space and nothing is added. T = 0 gives an
    empty tensor.
    """
    mu, theta, alpha = _parts(rollout_log_probs, log_probs, ages)
    # log(0) = -inf is the exact share of theta in a token of the live version.
    return torch.logaddexp(mu + (-alpha).log1p(), theta + alpha.log())


def _parts(
    rollout_log_probs: Tensor, log_probs: Tensor, ages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log mu, log theta and alpha, each [T]."""
    mu, theta = rollout_log_probs.detach().to(log_probs.dtype), log_probs.detach()
    age = ages.clamp(min=0).to(theta.dtype)
    return mu, theta, age / (age + 1)


ESTIMATES: dict[Proximal, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    Proximal.INTERPOLATED: interpolate,
    Proximal.LINEAR: interpolate_linear,
}
"""The proximal policies that are estimates."""
