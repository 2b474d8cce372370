"""The proximal policy of decoupled PPO, estimated from versions without a forward pass.

(A-3PO, arXiv 2512.06547.) Decoupled PPO (AReaL, arXiv 2505.24298) takes its ratio against the
proximal policy, from which training started. It weighs each token by proximal / rollout. This needs
no loss of its own. Pass the proximal log-probs as `old_log_probs` of any mode. Multiply by the
weights of correction.py for proximal and rollout.
"""

from __future__ import annotations

from torch import Tensor


def interpolate(
    rollout_log_probs: Tensor, log_probs: Tensor, token_versions: Tensor, version: int
) -> Tensor:
    """Compute log mu + alpha (log theta - log mu), [T] in the dtype of log_probs, detached.

    alpha = (v_prox - v_mu) / (v_theta - v_mu). rollout_log_probs (mu) and log_probs (theta, of the
    policy under training) are [T] floating. token_versions (v_mu) are [T] integers: the version
    that drew each token. `version` is the live version, of the last sync, from which training
    started. It is v_prox. The policy under training is published next, so v_theta = version + 1.
    With d = version - v_mu:

    alpha = d / (d + 1): 0 for a token of the live version, whose proximal policy drew it, 1/2 for
    one version back, then towards 1

    The ratio theta / prox is therefore (theta / mu)^(1 / (d + 1)): one version's share of the way
    from mu to theta. A version above the live one counts as the live one. T = 0 gives an empty
    tensor.

    AReaL's documentation has this definition: v_prox is the last published version, and v_prox =
    v_theta - 1. AReaL's code differs. It reads v_theta from an engine that gets its new number only
    after the update. There, v_theta is the live version and alpha is (d - 1) / d. Tokens one
    version back get alpha 0, as if the policy had not moved since.

    This is an estimate: it assumes that log-probs move evenly from version to version. Before the
    first optimizer step of a version, theta still is the proximal policy (true alpha 1). This
    function subtracts 1 / (d + 1) of the way there, as if a step had happened.
    """
    mu, theta = rollout_log_probs.detach().to(log_probs.dtype), log_probs.detach()
    age = (version - token_versions).clamp(min=0).to(theta.dtype)
    return mu + age / (age + 1) * (theta - mu)
