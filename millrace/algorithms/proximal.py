"""Estimates of the proximal policy that take no forward pass."""

from __future__ import annotations

from torch import Tensor


def interpolate(
    rollout_log_probs: Tensor, log_probs: Tensor, token_versions: Tensor, version: int
) -> Tensor:
    """Compute log mu + alpha (log theta - log mu), [T] in the dtype of log_probs, detached.

    alpha = (v_prox - v_mu) / (v_theta - v_mu).

    The result estimates the proximal policy of decoupled PPO from versions, without a forward pass
    (A-3PO, arXiv 2512.06547). Decoupled PPO (AReaL, arXiv 2505.24298) takes its ratio against the
    proximal policy, from which training started. It weighs each token by proximal / rollout. Any
    loss mode can do this: pass the proximal log-probs as `old_log_probs`, and multiply by the
    weights of correction.py for proximal and rollout.

    mu       rollout_log_probs [T] floating
    theta    log_probs [T] floating, of the policy under training
    v_mu     token_versions [T] integers: the version that drew each token
    v_prox   `version`: the live version, from which training started
    v_theta  version + 1: the policy under training is published next

    With d = version - v_mu, alpha = d / (d + 1). It is 0 for a token of the live version, because
    the proximal policy drew it. It is 1/2 for one version back, and then grows towards 1. The ratio
    theta / prox is therefore (theta / mu)^(1 / (d + 1)): one version's share of the way from mu to
    theta. A version above the live one counts as the live one. T = 0 gives an empty tensor.

    AReaL's documentation has this definition: v_prox = v_theta - 1 is the last published version.
    AReaL's code differs: its v_theta is the live version, because the engine gets its new number
    only after the update. Its alpha is (d - 1) / d. Tokens one version back get alpha 0, as if the
    policy had not moved since.

    The estimate assumes that log-probs move evenly from version to version. Before the first
    optimizer step of a version, theta still is the proximal policy (true alpha 1). The result is
    then too close to mu, by 1 / (d + 1) of the way, as if a step had happened.
    """
    mu, theta = rollout_log_probs.detach().to(log_probs.dtype), log_probs.detach()
    age = (version - token_versions).clamp(min=0).to(theta.dtype)
    return mu + age / (age + 1) * (theta - mu)
