"""Facts about each policy loss by its name.

The configuration checks use this module, so it needs no torch.
"""

from __future__ import annotations

from typing import Literal

AggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

LossMode = Literal[
    "vanilla",
    "gspo",
    "cispo",
    "gpg",
    "sapo",
    "geo_mean",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "reinforce",
]

USES_OLD = frozenset(
    {
        "vanilla",
        "gspo",
        "cispo",
        "sapo",
        "geo_mean",
        "clip_cov",
        "kl_cov",
        "dppo_tv",
        "dppo_kl",
        "dro",
    }
)
"""Modes with a ratio against old log-probs. gpg and reinforce read none."""

SELECTS = frozenset({"clip_cov", "kl_cov"})
"""Modes that need `LossInput.selected`: tokens chosen over the whole mini-batch."""

# A trust region bounds a token's effect by its distance to old_log_probs:
# - vanilla, clip_cov, gspo, geo_mean: no gradient beyond the edge that the advantage pushes to.
# - dppo_tv, dppo_kl: the same, with a divergence. sapo: the gate fades. dro: the square pulls back.
# - cispo bounds only a token's weight. Its gradient never ends, so it limits the size of one step,
#   not the sum of many (arXiv 2602.04879 says that it has no trust region).
# - gpg and reinforce read no old policy.
# - kl_cov penalises a few tokens in ten thousand. The ratio of the others is unbounded.
TRUST_REGION = USES_OLD - {"kl_cov"}
"""Modes in which the distance to old_log_probs bounds the effect of a token."""


def default_aggregation(mode: str) -> AggMode:
    """Return the aggregation in a mode's paper.

    verl 0.9.1 forces it only for sapo. In verl, gspo has token-mean unless loss_agg_mode overrides
    it, and geo_mean is a plain mean over the micro-batch.
    """
    return "seq-mean-token-mean" if mode in ("gspo", "sapo", "geo_mean") else "token-mean"
