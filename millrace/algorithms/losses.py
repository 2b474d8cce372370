"""Policy losses for each token.

Other parts are elsewhere:

correction.py       the weights W of a rollout correction, which the caller multiplies in
selection.py        the selection of tokens for clip_cov and kl_cov
aggregate.py        the factors that reduce token losses to one number
sequence_losses.py  the losses on whole sequences
policy_losses.py    all modes by name

Below, rho = exp(clamp(log pi - log pi_old, +-20)), A is the advantage, and sg is a stop gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.ratio import clipped_surrogate, log_ratio, log_ratio_at_level


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    weights: Tensor | None = None,
) -> TokenLoss:
    """Compute PPO's clipped surrogate with clip-higher and dual clip.

    (arXiv 1707.06347; DAPO, arXiv 2503.14476; arXiv 1912.09729.)

    ratio = exp(clamp(log_probs - old_log_probs, +-20))
    clip  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))
    loss  = weights (min(clip, -A clip_c) if A < 0, else clip)

    All tensors are [T] and of one floating dtype. Only `log_probs` has a gradient. `weights` are
    the constant importance weights of the rollout correction. clip_c must be over 1. Ratios on a
    bound are not clipped.

    Returns the token losses [T] and detached statistics, each [T] in the dtype of `log_probs`:

    clipped        1 where the clip changed the loss (its mean is verl's pg_clipfrac)
    clipped_lower  1 where the dual clip changed it (A < 0 and ratio over clip_c)
    log_ratio      clamped log-ratio; -mean is verl's ppo_kl

    T = 0 gives empty tensors.
    """
    if clip_c <= 1:
        raise ValueError(f"clip_c must be over 1, got {clip_c}")
    old, adv = old_log_probs.detach(), advantages.detach()
    delta = log_ratio(log_probs, old)
    loss, clipped, over = _dual_clip(delta.exp(), adv, clip_low, clip_high, clip_c)
    if weights is not None:
        loss = loss * weights.detach()
    return loss, statistics(log_probs, log_ratio=delta, clipped=clipped, clipped_lower=over)


def _dual_clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, the mask of the clip and that of the dual clip, each [T]."""
    pessimistic, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    bound = torch.where(advantages < 0, -advantages * clip_c, torch.inf)
    over = pessimistic > bound
    return torch.where(over, bound, pessimistic), clipped, over


def vanilla(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute `ppo_clip`: PPO with clip-higher and dual clip.

    With importance_sampling_level="sequence", this is `gspo` with dual clip (AReaL has it by the
    same key and `c_clip`; verl's gspo has no dual clip).
    """
    x = inputs.trained()
    ratio = log_ratio_at_level(x, options).exp()
    loss, clipped, over = _dual_clip(
        ratio, x.advantages, options.clip_low, options.clip_high, options.clip_c
    )
    delta = log_ratio(x.log_probs, x.old_log_probs)
    return loss, statistics(x.log_probs, log_ratio=delta, clipped=clipped, clipped_lower=over)


def reinforce(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A log pi: the policy gradient, without a bound on the distance to the old policy.

    This is also the loss of GPG (arXiv 2504.02546), whose own part is in its advantages. With W =
    sg(rho) as a factor, it is off-policy REINFORCE. It does not read the old log-probs, so the
    log_ratio statistic is 0.
    """
    x = inputs.trained()
    return -x.advantages * x.log_probs, statistics(x.log_probs)


def cispo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi.

    (CISPO, MiniMax-M1, arXiv 2506.13585.) The clip bounds a token's weight and never sets its
    gradient to 0. `clipped` marks weights that it changed where A is not 0. The paper has only an
    upper bound, which is clip_low = 1. With importance_sampling_level="sequence", rho is the
    sequence's ratio (TRL's key of that name; TRL has only the upper bound, and it bounds the ratio
    itself).
    """
    x = inputs.trained()
    delta = log_ratio(x.log_probs, x.old_log_probs)
    ratio = log_ratio_at_level(x, options).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped = (weight != ratio) & (x.advantages != 0)
    return -weight * x.advantages * x.log_probs, statistics(
        x.log_probs, log_ratio=delta, clipped=clipped
    )


def sapo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A (4 / tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg.

    (SAPO, arXiv 2511.20347.) This is a smooth clip. At rho = 1, the gradient is that of -A log pi,
    and it fades on both sides. The `clipped` statistics are 0. With
    importance_sampling_level="sequence", rho is the sequence's ratio (as in TRL). The aggregation
    seq-mean-token-mean then has the value and the gradient of one gate for each sequence.
    """
    x = inputs.trained()
    delta = log_ratio(x.log_probs, x.old_log_probs)
    tau = torch.where(
        x.advantages > 0, delta.new_full((), options.tau_pos), delta.new_full((), options.tau_neg)
    )
    gate = torch.sigmoid(tau * (log_ratio_at_level(x, options).exp() - 1)) * (4 / tau)
    return -gate * x.advantages, statistics(x.log_probs, log_ratio=delta)


def dro(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -(A log pi - dro_beta / 2 (log pi - log pi_old)^2).

    (DRO, arXiv 2405.19107, for each token as in verl and Tinker.) The log-ratio in the loss is not
    clamped, so the square also pulls back a token that has moved far.
    """
    x = inputs.trained()
    distance = (x.log_probs - x.old_log_probs).square()
    loss = 0.5 * options.dro_beta * distance - x.advantages * x.log_probs
    return loss, statistics(x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs))


def clip_cov(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute PPO's clip without dual clip, and 0, without gradient, for selected tokens.

    (Clip-Cov, arXiv 2505.22617.) `clip_cov_tokens` selects the tokens. `clipped` marks tokens that
    PPO's clip changed, and selected tokens. Raises ValueError without `selected`.
    """
    x = inputs.trained()
    selected = _selected(x)
    delta = log_ratio(x.log_probs, x.old_log_probs)
    loss, clipped = clipped_surrogate(
        delta.exp(), x.advantages, options.clip_low, options.clip_high
    )
    return loss.masked_fill(selected, 0.0), statistics(
        x.log_probs, log_ratio=delta, clipped=clipped | selected
    )


def kl_cov(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A rho, plus ppo_kl_coef |log pi - log pi_old| for selected tokens, without a clip.

    (KL-Cov, arXiv 2505.22617.) The penalty is not clamped, so it pulls back from any distance. At
    distance 0 its gradient is 0, so it has no effect on the first step of a batch.
    `kl_cov_tokens` selects the tokens. Raises ValueError without `selected`.
    """
    x = inputs.trained()
    selected = _selected(x)
    delta = log_ratio(x.log_probs, x.old_log_probs)
    penalty = options.ppo_kl_coef * (x.log_probs - x.old_log_probs).abs()
    loss = torch.where(selected, penalty, 0.0) - x.advantages * delta.exp()
    return loss, statistics(x.log_probs, log_ratio=delta)


def _selected(inputs: LossInput) -> Tensor:
    if inputs.selected is None:
        raise ValueError(
            "this loss needs `selected`: "
            "the tokens that clip_cov_tokens or kl_cov_tokens selects in the whole mini-batch"
        )
    return inputs.selected
