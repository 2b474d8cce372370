"""Policy losses by their names in `actor.policy_loss.loss_mode`.

modes.py has facts about each name.

There is no `tpo`. T-PPO (arXiv 2506.15050) adds two parts to PPO: EGAE, an advantage for truncated
responses, and a selection of tokens. EGAE is `gae` with `bootstrap_truncated`. The paper's abstract
names no new loss, so the loss is `vanilla`.
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.algorithms.divergence_losses import dppo_kl, dppo_tv
from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss
from millrace.algorithms.losses import cispo, clip_cov, dro, kl_cov, reinforce, sapo, vanilla
from millrace.algorithms.sequence_losses import geo_mean, gspo, vespo

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
    "vespo": vespo,
    "reinforce": reinforce,
}
