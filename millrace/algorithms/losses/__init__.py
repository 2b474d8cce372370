"""The policy losses of the package by name. A loss is one file here, found by its presence.

Below, rho = exp(clamp(log pi - log pi_old, +-20)), A is the advantage, and sg is a stop gradient.

gspo, geo_mean and vespo use the ratio of a whole sequence. Means are over the sequence's trained
tokens. A sequence without trained tokens adds nothing. gspo and geo_mean are designed for the
aggregation seq-mean-token-mean, in which all sequences have equal weight. They also work with any
other aggregation. vespo is a sum over tokens.

Trust regions, `PolicyLoss.bounds_stale`, bound a token's effect by its distance to old_log_probs:

vanilla, clip_cov, gspo, geo_mean  no gradient beyond the bound that the advantage pushes to
dppo_tv, dppo_kl                   the same, with a bound on a divergence
sapo                               the gradient fades with the distance
vespo                              the weight of a sequence fades with its distance on both sides
dro                                the squared log-ratio pulls a token back
cispo                              bounds only a token's weight, and the gradient never becomes 0.
                                   This limits one step, but not the sum of many (arXiv 2602.04879
                                   says that it has no trust region)

There is no `tpo`. T-PPO (arXiv 2506.15050) adds two parts to PPO: EGAE, an advantage for truncated
responses, and a selection of tokens. EGAE is `gae` with `bootstrap_truncated`. The paper's abstract
names no new loss, so the loss is `vanilla`.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.algorithms.discovery import found_in
from millrace.algorithms.policy_loss import PolicyLoss

POLICY_LOSSES: dict[str, PolicyLoss] = {
    name: replace(loss, name=name)
    for loss in found_in(__name__, PolicyLoss)
    for name in (loss.name, *loss.aliases)
}
"""The losses by their names in actor.policy_loss.loss_mode."""
