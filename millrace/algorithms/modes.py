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
    "vespo",
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
        "vespo",
    }
)
"""Modes with a ratio against old log-probs. gpg and reinforce do not read old log-probs."""

SELECTS = frozenset({"clip_cov", "kl_cov"})
"""Modes that need `LossInput.selected`: tokens selected in the whole mini-batch."""

JOINS_TOKENS = frozenset({"gspo", "geo_mean", "vespo"})
"""Modes whose loss of a token always depends on the other tokens of its trajectory."""

SEQUENCE_LEVEL = frozenset({"vanilla", "cispo", "sapo", "gspo"})
"""Modes that can use the sequence's ratio. gspo always does."""

JOINT = {
    "geo_mean": "gives every token of a response a gradient through one ratio",
    "kl_cov": "penalises tokens of any entropy, and a mask would remove the penalty",
}
"""Modes whose token losses cannot be masked one by one, as `top_entropy_quantile` does, and why."""

# A trust region bounds a token's effect by its distance to old_log_probs:
# - vanilla, clip_cov, gspo, geo_mean: no gradient beyond the bound that the advantage pushes to.
# - dppo_tv, dppo_kl: the same, with a bound on a divergence.
# - sapo: the gradient fades with the distance.
# - vespo: the weight of a sequence fades with its distance on both sides.
# - dro: the squared log-ratio pulls a token back.
# - cispo: bounds only a token's weight, and the gradient never becomes 0. This limits one step, but
#   not the sum of many (arXiv 2602.04879 says that it has no trust region).
# - gpg and reinforce: have no trust region, because they read no old policy.
# - kl_cov: has none. It penalises a few tokens in ten thousand, and bounds no other ratio.
TRUST_REGION = USES_OLD - {"kl_cov"}
"""Modes in which the distance to old_log_probs bounds the effect of a token."""


def default_aggregation(mode: str, importance_sampling_level: str) -> AggMode:
    """Return the aggregation that a mode's paper uses. A ratio of sequences has that of gspo.

    In verl 0.9.1, only sapo always uses it. gspo has token-mean unless loss_agg_mode overrides it,
    and geo_mean is a plain mean over the micro-batch.
    """
    whole = mode in ("gspo", "sapo", "geo_mean") or importance_sampling_level == "sequence"
    return "seq-mean-token-mean" if whole else "token-mean"
