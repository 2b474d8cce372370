"""The proximal policy of decoupled PPO, guessed from versions without a forward pass (A-3PO, arXiv 2512.06547).

Decoupled PPO (AReaL, arXiv 2505.24298) takes its ratio against the proximal policy, that of the weights that training started
from, and weighs each token by proximal / rollout. No loss of its own is needed: give proximal log-probs as `old_log_probs` of
any mode, and multiply by the weights that correction.py makes of proximal and rollout.
"""

from __future__ import annotations

from torch import Tensor


def interpolate(
    rollout_log_probs: Tensor, log_probs: Tensor, token_versions: Tensor, version: int
) -> Tensor:
    """log mu + alpha (log theta - log mu), alpha = (v_prox - v_mu) / (v_theta - v_mu), [T] in the dtype of log_probs, detached.

    rollout_log_probs (mu) and log_probs (theta, of the policy under training) [T] floating; token_versions (v_mu) [T] integers:
    the version of the weights that drew each token. `version` is the live one: that of the last sync, which training started
    from. It is v_prox, and the policy under training, which will be published next, is v_theta = version + 1. With
    d = version - v_mu:

    alpha = d / (d + 1): 0 for a token of the live version, whose proximal policy drew it; 1/2 one version back, then to 1

    So the ratio theta / prox is (theta / mu)^(1 / (d + 1)): a version's share of the way from mu to theta. A version above the
    live one counts as the live one. T = 0 gives an empty tensor.

    This is what AReaL's documentation defines: v_prox is the last published version and v_prox = v_theta - 1. Its code takes
    v_theta from an engine that learns its new number only after the update, so its v_theta is the live version and its alpha
    (d - 1) / d: tokens one version back get alpha 0, as if the policy had not moved since.

    It is a guess: that log-probs move evenly from version to version. Before the first optimizer step of a version theta still
    is the proximal policy (true alpha 1), and this takes 1 / (d + 1) of the way for a step already taken.
    """
    mu, theta = rollout_log_probs.detach().to(log_probs.dtype), log_probs.detach()
    age = (version - token_versions).clamp(min=0).to(theta.dtype)
    return mu + age / (age + 1) * (theta - mu)
