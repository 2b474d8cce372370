"""What is known of each policy loss by its name alone. Needs no torch: configurations are checked with it."""

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
"""Modes that take a ratio against old log-probs; gpg and reinforce read none."""

SELECTS = frozenset({"clip_cov", "kl_cov"})
"""Modes that need `LossInput.selected`: tokens chosen over the whole mini-batch."""

# What a token can push depends on how far it is from old_log_probs, and is bounded by that. vanilla, clip_cov, gspo and geo_mean
# give no gradient to a token or sequence that has passed the edge its advantage pushes it to; dppo_tv and dppo_kl the same by
# divergence; sapo's gate fades; dro's square pulls back. cispo only bounds a token's weight: its gradient never ends, so it limits
# one step's size and not where many steps lead (arXiv 2602.04879 counts it as having no trust region). gpg and reinforce know no
# old policy. kl_cov's ratio is unbounded on all but the few tokens in ten thousand that it penalises.
TRUST_REGION = USES_OLD - {"kl_cov"}
"""Modes in which old_log_probs bound what a token can push."""


def default_aggregation(mode: str) -> AggMode:
    """Return the aggregation of a mode's paper.

    verl 0.9.1 forces it for sapo alone. There gspo has token-mean unless loss_agg_mode says
    otherwise, and geo_mean is a plain mean over the micro-batch.
    """
    return "seq-mean-token-mean" if mode in ("gspo", "sapo", "geo_mean") else "token-mean"
