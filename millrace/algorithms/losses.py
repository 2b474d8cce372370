"""The losses of the policy for each token, by name in POLICY_LOSSES, and the critic's loss.

Other parts are elsewhere:

correction.py     the weights W of a rollout correction, which the caller multiplies in
token_weights.py  the selection of tokens for clip_cov and kl_cov, and the aggregation
modes.py          facts about each name

Below, rho = exp(clamp(log pi - log pi_old, +-20)), A is the advantage, and sg is a stop gradient.

gspo, geo_mean and vespo use the ratio of a whole sequence. Means are over the sequence's trained
tokens. A sequence without trained tokens adds nothing. gspo and geo_mean are designed for the
aggregation seq-mean-token-mean, in which all sequences have equal weight. They also work with any
other aggregation. vespo is a sum over tokens.

dppo_tv and dppo_kl omit tokens whose probability has moved too far (DPPO, arXiv 2602.04879):

kept token   -A sg(min(rho, dppo_clip_c)) log pi
other token  0

The two differ in the rule for kept tokens. Each rule bounds a divergence, not a ratio. The
divergence is between two outcomes: the sampled token, and all other tokens together. A token that
moves back towards the old policy is always kept. verl's runs use 0.15 for TV and 0.05 for KL.

There is no `tpo`. T-PPO (arXiv 2506.15050) adds two parts to PPO: EGAE, an advantage for truncated
responses, and a selection of tokens. EGAE is `gae` with `bootstrap_truncated`. The paper's abstract
names no new loss, so the loss is `vanilla`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.algorithms.loss_input import (
    MAX_LOG_RATIO,
    LossInput,
    LossOptions,
    TokenLoss,
    clipped_surrogate,
    log_ratio,
    log_ratio_at_level,
    sequence_log_ratio,
    sequence_means,
    statistics,
)
from millrace.algorithms.ragged import sequence_sums


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


def gspo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute PPO's clip, without dual clip, on the sequence's ratio s.

    (GSPO-token, arXiv 2507.18071.)

    s     = exp(min(mean_t (log pi - log pi_old), 10))
    ratio = sg(s) pi / sg(pi): the value of s, with the gradient of the token's log-prob
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    If all tokens of a sequence have one advantage, seq-mean-token-mean gives the value and gradient
    of GSPO. `sequence_log_ratio` has the details. The log_ratio statistic is that of each token.
    For a dual clip, use `vanilla` with importance_sampling_level="sequence".
    """
    x = inputs.trained()
    loss, clipped = clipped_surrogate(
        sequence_log_ratio(x).exp(), x.advantages, options.clip_low, options.clip_high
    )
    return loss, statistics(
        x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs), clipped=clipped
    )


def geo_mean(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A exp(mean_t d) for each trained token of the sequence (GMPO, arXiv 2507.20673).

    d = min(log rho, clip_high) if A > 0, with log rho clamped to +-20
    d = max(log rho, -clip_low) if A < 0, with log rho clamped to +-20
    A = the mean of the sequence's advantages (the paper has one for all its tokens)

    The clip acts on each token's log-ratio and is pessimistic. A value on a bound is not clipped.
    `clipped` marks only tokens that the clip changed, for either sign of A. (verl also counts
    tokens beyond the opposite bound, which the clip leaves unchanged.)

    Every token has the sequence's loss. seq-mean-token-mean then gives the paper's mean over
    sequences, for any split of the mini-batch. verl takes a plain mean over the micro-batch for
    every aggregation mode, so its result depends on the split into micro-batches and ranks.
    Importance weights act here as their mean over the sequence, and in verl as their geometric
    mean.
    """
    x = inputs.trained()
    advantages = sequence_means(x.advantages, x)
    adv = advantages[x.sequence_ids]
    delta = log_ratio(x.log_probs, x.old_log_probs)
    bounded = torch.where(
        adv > 0, delta.clamp(max=options.clip_high), delta.clamp(min=-options.clip_low)
    )
    loss = -advantages * sequence_means(bounded, x).exp()
    clipped = torch.where(
        adv > 0, delta > options.clip_high, (delta < -options.clip_low) & (adv < 0)
    )
    stats = statistics(x.log_probs, log_ratio=delta, clipped=clipped)
    return loss[x.sequence_ids].masked_fill(~x.mask, 0.0), stats


def vespo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -sg(phi(W)) A log pi, phi(W) = e^lambda W^k e^(-lambda W).

    (VESPO, arXiv 2602.10693, section 3.4, where k is c_1 and lambda is c_2.)

    W         = exp(clamp(sum_t (log pi - log pi_old), +-20)): the product of the sequence's ratios
    k, lambda = vespo_k_pos, vespo_lambda_pos where A > 0, else vespo_k_neg, vespo_lambda_neg

    phi is 1 at W = 1, largest at W = k / lambda, and fades to 0 on both sides (below, if k > 0). It
    has no gradient. The `clipped` statistics are 0.

    TRL has these keys and its own bounds: the log-ratio of each token is clamped to +-20, log W to
    -18.4 to 20, and lambda is at least 1e-4. Here, only log W is clamped, so a long sequence has
    the product of its ratios. TRL multiplies importance weights into W. Here they multiply the
    loss, as in every other mode. For the paper's W, current / rollout, let old_log_probs be those
    of the rollout.
    """
    x = inputs.trained()
    far = (x.log_probs - x.old_log_probs).detach().double()
    log_w = sequence_sums(far, x.sequence_ids, x.num_sequences)
    log_w = log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[x.sequence_ids]
    rises = x.advantages > 0
    k, decay = (
        torch.where(rises, log_w.new_full((), positive), log_w.new_full((), other))
        for positive, other in (
            (options.vespo_k_pos, options.vespo_k_neg),
            (options.vespo_lambda_pos, options.vespo_lambda_neg),
        )
    )
    phi = (k * log_w - decay * log_w.expm1()).exp().to(x.log_probs.dtype)
    return -phi * x.advantages * x.log_probs, statistics(
        x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs)
    )


TINY = 1e-8
"""Lower bound of the total probability of the other tokens.

In float32, a nearly certain token has log-prob 0. Without this bound, the KL would be infinite.
"""


def dppo_tv(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Keep p - p_old <= clip_high if A > 0, p - p_old >= -clip_low if A < 0.

    The divergence is the binary total variation. Bounds are inclusive.
    """
    x = inputs.trained()
    shift = x.log_probs.detach().exp() - x.old_log_probs.exp()
    return _kept_gradient(
        x,
        torch.where(x.advantages > 0, shift <= options.clip_high, shift >= -options.clip_low),
        options,
    )


def dppo_kl(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Keep KL(p_old, p) <= clip_high if A > 0, <= clip_low if A < 0, or a token that moves back.

    The divergence is the binary KL. Bounds are inclusive.
    """
    x = inputs.trained()
    new, old = x.log_probs.detach(), x.old_log_probs
    kl = binary_kl(old, new)
    rises = (kl <= options.clip_high) | (new <= old)
    falls = (kl <= options.clip_low) | (new >= old)
    return _kept_gradient(x, torch.where(x.advantages > 0, rises, falls), options)


def binary_kl(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Compute p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).

    log(p_old / p) is clamped to +-20. 1 - p and 1 - p_old are at least 1e-8. The result has the
    shape and dtype of the arguments. This function preserves the digits of a small 1 - p. verl
    computes 1 - exp(log p) + 1e-8, which does not.
    """
    rest_old, rest = ((-x.expm1()).clamp(min=TINY) for x in (old_log_probs, log_probs))
    return rest_old * (rest_old.log() - rest.log()) - old_log_probs.exp() * log_ratio(
        log_probs, old_log_probs
    )


def _kept_gradient(x: LossInput, kept: Tensor, options: LossOptions) -> TokenLoss:
    delta = log_ratio(x.log_probs, x.old_log_probs).detach()
    ratio = delta.exp()
    weight = torch.where(kept, ratio.clamp(max=options.dppo_clip_c), 0.0)
    pushed = x.advantages != 0
    truncated = kept & pushed & (ratio > options.dppo_clip_c)
    stats = statistics(
        x.log_probs, log_ratio=delta, clipped=~kept & pushed, clipped_lower=truncated
    )
    return -x.advantages * weight * x.log_probs, stats


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    cliprange: float,
    huber_delta: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped value loss, with squared errors or with Huber's.

    loss = max(h(v - R), h(clip(v, v_old - cliprange, v_old + cliprange) - R))
    h(x) = x^2 / 2 where huber_delta is None or abs(x) <= huber_delta
    h(x) = huber_delta (abs(x) - huber_delta / 2) elsewhere

    All tensors are [T] and of one floating dtype. Only `values` has a gradient: v - R, bounded by
    +-huber_delta, or 0 where the clipped term is larger. A value on a bound is not clipped.
    Aggregate the result with `token_weights`, like the policy's loss. Raises ValueError unless
    cliprange and huber_delta are over 0.

    Returns the token losses [T] and {"clipped": [T]}, which is 1 where the clipped term is larger.
    It is detached, in the dtype of `values`. T = 0 gives empty tensors. (Sources: OpenAI's PPO
    code, because arXiv 1707.06347 has no such clip; verl's compute_value_loss, which has squared
    errors alone; AReaL's ppo_critic_loss_fn with loss_fn_type="huber", whose delta is always 10.)
    """
    if cliprange <= 0:
        raise ValueError(f"cliprange must be over 0, got {cliprange}")
    if huber_delta is not None and huber_delta <= 0:
        raise ValueError(f"huber_delta must be over 0, got {huber_delta}")
    old, target = old_values.detach(), returns.detach()
    plain = _double_huber(values - target, huber_delta)
    near = _double_huber(values.clamp(old - cliprange, old + cliprange) - target, huber_delta)
    clipped = near > plain
    return 0.5 * torch.where(clipped, near, plain), {"clipped": clipped.to(values.dtype)}


def _double_huber(error: Tensor, delta: float | None) -> Tensor:
    """Return 2 h(error)."""
    if delta is None:
        return error.square()
    size = error.abs()
    return torch.where(size <= delta, error.square(), delta * (2 * size - delta))


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
