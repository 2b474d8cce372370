"""Policy losses by the names of `actor.policy_loss.loss_mode`; what is known of each by its name alone is in modes.py.

There is no `tpo`: what T-PPO (arXiv 2506.15050) adds to PPO is the advantage of truncated responses, EGAE, which is `gae` with
`bootstrap_truncated`, and a choice of tokens; its abstract names no loss of its own, so its loss is `vanilla`.
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.algorithms.divergence_losses import dppo_kl, dppo_tv
from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss
from millrace.algorithms.losses import cispo, clip_cov, dro, kl_cov, reinforce, sapo, vanilla
from millrace.algorithms.sequence_losses import geo_mean, gspo

PolicyLoss = Callable[[LossInput, LossOptions], TokenLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": reinforce,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "reinforce": reinforce,
}
