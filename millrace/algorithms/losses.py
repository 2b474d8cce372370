"""Policy losses for each token.

The file has the proximal policy, the losses, the selection of tokens by covariance, and the factors
that reduce token losses to one number. Other parts are elsewhere:

correction.py       the weights W of a rollout correction, which the caller multiplies in
sequence_losses.py  the losses on whole sequences
policy_losses.py    all modes by name

Below, rho = exp(clamp(log pi - log pi_old, +-20)), A is the advantage, and sg is a stop gradient.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.modes import AggMode

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios. The square of exp(20) = 4.9e8 is still finite in float32."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(pi / pi_old) clamped to +-20, in the shape of its arguments.

    There is no gradient where the clamp acts.
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def interpolate(
    rollout_log_probs: Tensor, log_probs: Tensor, token_versions: Tensor, version: int
) -> Tensor:
    """Compute log mu + alpha (log theta - log mu), [T] in the dtype of log_probs, detached.

    alpha = (v_prox - v_mu) / (v_theta - v_mu).

    The result estimates the proximal policy of decoupled PPO from versions, without a forward pass
    (A-3PO, arXiv 2512.06547). Decoupled PPO (AReaL, arXiv 2505.24298) takes its ratio against the
    proximal policy, from which training started. It weighs each token by proximal / rollout. Any
    loss mode can do this: pass the proximal log-probs as `old_log_probs`, and multiply by the
    weights of correction.py for proximal and rollout.

    mu       rollout_log_probs [T] floating
    theta    log_probs [T] floating, of the policy under training
    v_mu     token_versions [T] integers: the version that drew each token
    v_prox   `version`: the live version, from which training started
    v_theta  version + 1: the policy under training is published next

    With d = version - v_mu, alpha = d / (d + 1). It is 0 for a token of the live version, because
    the proximal policy drew it. It is 1/2 for one version back, and then grows towards 1. The ratio
    theta / prox is therefore (theta / mu)^(1 / (d + 1)): one version's share of the way from mu to
    theta. A version above the live one counts as the live one. T = 0 gives an empty tensor.

    AReaL's documentation has this definition: v_prox = v_theta - 1 is the last published version.
    AReaL's code differs: its v_theta is the live version, because the engine gets its new number
    only after the update. Its alpha is (d - 1) / d. Tokens one version back get alpha 0, as if the
    policy had not moved since.

    The estimate assumes that log-probs move evenly from version to version. Before the first
    optimizer step of a version, theta still is the proximal policy (true alpha 1). The result is
    then too close to mu, by 1 / (d + 1) of the way, as if a step had happened.
    """
    mu, theta = rollout_log_probs.detach().to(log_probs.dtype), log_probs.detach()
    age = (version - token_versions).clamp(min=0).to(theta.dtype)
    return mu + age / (age + 1) * (theta - mu)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and a mask.

    The bool mask is true where the clipped term is larger. Both results have the shape of `ratio`.
    A ratio on a bound is not clipped and has its full gradient.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


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
    pessimistic, clipped = clipped_surrogate(delta.exp(), adv, clip_low, clip_high)
    bound = torch.where(adv < 0, -adv * clip_c, torch.inf)
    over = pessimistic > bound
    loss = torch.where(over, bound, pessimistic)
    if weights is not None:
        loss = loss * weights.detach()
    return loss, statistics(log_probs, log_ratio=delta, clipped=clipped, clipped_lower=over)


def vanilla(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute `ppo_clip`: PPO with clip-higher and dual clip."""
    x = inputs.trained()
    return ppo_clip(
        x.log_probs,
        x.old_log_probs,
        x.advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        clip_c=options.clip_c,
    )


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
    upper bound, which is clip_low = 1.
    """
    x = inputs.trained()
    delta = log_ratio(x.log_probs, x.old_log_probs).detach()
    ratio = delta.exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped = (weight != ratio) & (x.advantages != 0)
    return -weight * x.advantages * x.log_probs, statistics(
        x.log_probs, log_ratio=delta, clipped=clipped
    )


def sapo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A (4 / tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg.

    (SAPO, arXiv 2511.20347.) This is a smooth clip. At rho = 1, the gradient is that of -A log pi,
    and it fades on both sides. The `clipped` statistics are 0.
    """
    x = inputs.trained()
    delta = log_ratio(x.log_probs, x.old_log_probs)
    tau = torch.where(
        x.advantages > 0, delta.new_full((), options.tau_pos), delta.new_full((), options.tau_neg)
    )
    gate = torch.sigmoid(tau * (delta.exp() - 1)) * (4 / tau)
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


# The selection of tokens for clip_cov and kl_cov ---------------------------------------------


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return cov_t = (A_t - mean A) (log pi_t - mean log pi), [T] float64, detached.

    (arXiv 2505.22617.) Both means are over all trained tokens. A token with a large covariance
    lowers the entropy. The result is NaN where mask is false. log_probs and advantages are [T]
    floating, mask is [T] bool. log_probs are those of the policy under training. At the first step
    on a batch, they equal the old ones.

    Pass the WHOLE mini-batch, of all ranks, because the selection is a share of its tokens. verl
    computes means, share and draw for each micro-batch. With a share of 2e-4, it then selects one
    token in every micro-batch of up to 9,999 tokens, whatever their covariances are. verl also
    draws from an unseeded permutation, so ranks disagree and runs cannot be repeated.
    """
    result = log_probs.new_full(log_probs.shape, torch.nan, dtype=torch.float64)
    a, logp = (x.detach()[mask].double() for x in (advantages, log_probs))
    result[mask] = (a - a.mean()) * (logp - logp.mean())
    return result


def kl_cov_tokens(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float) -> Tensor:
    """Mark the max(int(ratio * trained tokens), 1) trained tokens of largest covariance, [T] bool.

    Among equal covariances, earlier tokens of the batch come first. Without trained tokens, no
    token is marked. Raises ValueError unless 0 < ratio <= 1.
    """
    cov = covariances(log_probs, advantages, mask)
    at = mask.nonzero().squeeze(-1)
    order = cov[at].argsort(descending=True, stable=True)
    return _marked(mask, at[order[: _count(ratio, len(at))]])


def clip_cov_tokens(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: float,
    lower: float,
    upper: float,
    generator: torch.Generator,
    clipped: Tensor | None = None,
) -> Tensor:
    """Mark random tokens with lower < cov < upper, [T] bool.

    The number of tokens is max(int(ratio * trained tokens), 1), or all candidates if there are
    fewer. `clipped` [T] bool marks tokens that PPO's clip leaves without a gradient. They are never
    drawn, as in verl. While log_probs are the old ones, there are no such tokens. The draw depends
    on the generator's state alone, so equal seeds give equal tokens on every rank.

    Raises ValueError unless 0 < ratio <= 1 and lower < upper.
    """
    if not lower < upper:
        raise ValueError(f"lower must be below upper, got {lower} and {upper}")
    cov = covariances(log_probs, advantages, mask)
    candidate = (cov > lower) & (cov < upper)
    if clipped is not None:
        candidate &= ~clipped
    at = candidate.nonzero().squeeze(-1)
    count = _count(ratio, int(mask.sum()))
    drawn = torch.randperm(len(at), generator=generator, device=generator.device)[:count]
    return _marked(mask, at[drawn.to(at.device)])


def _count(ratio: float, tokens: int) -> int:
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be over 0 and at most 1, got {ratio}")
    return max(int(ratio * tokens), 1)


def _marked(mask: Tensor, positions: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=torch.bool).index_fill(0, positions, True)


# The sum of token losses -----------------------------------------------------------------------


def token_weights(
    mode: AggMode,
    *,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    total_tokens: int,
    total_sequences: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the factor of each token's loss, [T] in `dtype`, the dtype of the loss.

    Every mode is a weighted sum:

    mode                     factor
    token-mean               1 / total_tokens
    token-sum                1
    seq-mean-token-sum       1 / total_sequences
    seq-mean-token-sum-norm  1 / (total_sequences * scale), `scale` being Dr.GRPO's constant length
    seq-mean-token-mean      1 / (total_sequences * sequence_lengths[sequence])

    sequence_ids [T]      index into sequence_lengths of each token
    sequence_lengths [S]  trained tokens of each WHOLE sequence, even if this call has only some
    total_tokens          trained tokens of the global mini-batch
    total_sequences       its sequences with at least one trained token

    Factors are computed in float64, so every dtype of `sequence_lengths` gives full precision. The
    caller passes the counts, and they are global. The sums of micro-batches and ranks therefore add
    up to the result of one batch, for any split.

    Both totals are counted after rejection. A sequence whose tokens are all rejected therefore has
    no weight in a mean. (verl's trainers divide by the configured mini-batch size, which counts
    such a sequence. Without that size, verl's agg_loss omits the sequence too.) A total of 0 counts
    as 1, because there is nothing to add. (Source: verl's agg_loss, in
    verl/trainer/ppo/core_algos.py. Its 1e-8 in the divisor is omitted, because the sequence of a
    token has at least one token.)
    """
    if mode not in get_args(AggMode):
        raise ValueError(
            f"unknown loss aggregation {mode!r}; known: {', '.join(get_args(AggMode))}"
        )
    if scale <= 0:
        raise ValueError(f"scale must be over 0, got {scale}")
    sequences = max(total_sequences, 1)
    if mode == "seq-mean-token-mean":
        lengths = sequence_lengths.double().clamp(min=1)
        return (lengths * sequences).reciprocal().to(dtype)[sequence_ids]
    factor = {
        "token-mean": 1.0 / max(total_tokens, 1),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1.0 / sequences,
        "seq-mean-token-sum-norm": 1.0 / (sequences * scale),
    }[mode]
    return torch.full(sequence_ids.shape, factor, dtype=dtype, device=sequence_ids.device)
