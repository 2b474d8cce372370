"""Policy losses, token by token: the proximal policy, the losses, the choice of tokens, the sums.

The weights W of a rollout correction are in correction.py; the caller multiplies them in. Losses on
whole sequences are in sequence_losses.py, and all modes by name in policy_losses.py.

Below rho = exp(clamp(log pi - log pi_old, +-20)), A the advantage, sg a constant (stop gradient).
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.modes import AggMode

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) = 4.9e8 still leaves a finite square in float32."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log(pi / pi_old) clamped to +-20, the shape of its arguments; no gradient where the clamp acts."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def interpolate(
    rollout_log_probs: Tensor, log_probs: Tensor, token_versions: Tensor, version: int
) -> Tensor:
    """log mu + alpha (log theta - log mu), alpha = (v_prox - v_mu) / (v_theta - v_mu), [T] in the dtype of log_probs, detached.

    This guesses the proximal policy of decoupled PPO from versions, without a forward pass (A-3PO,
    arXiv 2512.06547). Decoupled PPO (AReaL, arXiv 2505.24298) takes its ratio against the proximal
    policy: that of the weights that training started from. It weighs each token by proximal /
    rollout. No loss of its own is needed. Give the result as `old_log_probs` of any mode, and
    multiply by the weights that correction.py makes of proximal and rollout.

    rollout_log_probs (mu) and log_probs (theta, of the policy under training) [T] floating; token_versions (v_mu) [T] integers:
    the version of the weights that drew each token. `version` is the live one: that of the last sync, which training started
    from. It is v_prox, and the policy under training, which will be published next, is v_theta = version + 1. With
    d = version - v_mu:

    alpha = d / (d + 1): 0 for a token of the live version, whose proximal policy drew it; 1/2 one version back, then to 1

    So the ratio theta / prox is (theta / mu)^(1 / (d + 1)): a version's share of the way from mu to theta. A version above the
    live one counts as the live one. T = 0 gives an empty tensor.

    This is what AReaL's documentation defines: v_prox is the last published version and v_prox = v_theta - 1. Its code takes
    v_theta from an engine that learns its new number only after the update, so its v_theta is the live version and its alpha
    (d - 1) / d: tokens one version back get alpha 0, as if the policy had not moved since.

    It is a guess: that log-probs move evenly from version to version. Before the first optimizer step of a version theta still
    is the proximal policy (true alpha 1), and this takes 1 / (d + 1) of the way for a step already taken.
    """
    mu, theta = rollout_log_probs.detach().to(log_probs.dtype), log_probs.detach()
    age = (version - token_versions).clamp(min=0).to(theta.dtype)
    return mu + age / (age + 1) * (theta - mu)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)) and the bool mask of where the clip won; shapes of `ratio`.

    A ratio on an edge is inside: it is not clipped and has its whole gradient.
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
    """PPO's clipped surrogate (arXiv 1707.06347) with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729).

    ratio = exp(clamp(log_probs - old_log_probs, +-20))
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A clip_c; times `weights`.

    All tensors [T] and of one floating dtype; only `log_probs` has a gradient. `weights` are importance weights of the
    rollout correction, constants. clip_c must be over 1. Ratios on an edge are inside.

    Returns the token losses [T] and detached statistics, each [T] in the dtype of `log_probs`:
    clipped        1 where the clip changed the loss (verl's pg_clipfrac is its mean)
    clipped_lower  1 where the dual clip did (A < 0 and ratio over clip_c)
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
    """`ppo_clip`: PPO with clip-higher and dual clip."""
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
    """-A log pi: the policy gradient, with nothing that holds it near the old policy.

    Also the loss of GPG (arXiv 2504.02546), whose own part is in its advantages. With W = sg(rho) outside it is off-policy
    REINFORCE. The old log-probs are not read, so the log_ratio statistic is 0.
    """
    x = inputs.trained()
    return -x.advantages * x.log_probs, statistics(x.log_probs)


def cispo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585).

    The clip bounds a token's weight, never its gradient to 0. `clipped` marks weights that it changed where A is not 0. The
    paper bounds only above: give clip_low = 1 for that.
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
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347).

    A smooth clip: the gradient is that of -A log pi at rho = 1 and fades on both sides. Nothing is clipped in the statistics.
    """
    x = inputs.trained()
    delta = log_ratio(x.log_probs, x.old_log_probs)
    tau = torch.where(
        x.advantages > 0, delta.new_full((), options.tau_pos), delta.new_full((), options.tau_neg)
    )
    gate = torch.sigmoid(tau * (delta.exp() - 1)) * (4 / tau)
    return -gate * x.advantages, statistics(x.log_probs, log_ratio=delta)


def dro(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """-(A log pi - dro_beta / 2 (log pi - log pi_old)^2) (DRO, arXiv 2405.19107, token by token as in verl and Tinker).

    The log-ratio in the loss is not clamped: the square must go on pulling a token back that has gone far.
    """
    x = inputs.trained()
    distance = (x.log_probs - x.old_log_probs).square()
    loss = 0.5 * options.dro_beta * distance - x.advantages * x.log_probs
    return loss, statistics(x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs))


def clip_cov(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """PPO's clip without dual clip; 0, so without gradient, for selected tokens (Clip-Cov, arXiv 2505.22617).

    `clipped` marks both. Tokens come from clip_cov_tokens. Raises ValueError without `selected`.
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
    """-A rho, + ppo_kl_coef |log pi - log pi_old| for selected tokens (KL-Cov, arXiv 2505.22617). No clip.

    The penalty is not clamped, so it pulls back from any distance; at distance 0 its gradient is 0, so the first step on a
    batch is without it. Tokens come from kl_cov_tokens. Raises ValueError without `selected`.
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
            "this loss needs `selected`: the tokens that clip_cov_tokens or kl_cov_tokens chooses over the whole mini-batch"
        )
    return inputs.selected


# The choice of the tokens that clip_cov and kl_cov act on ----------------------------------------


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return cov_t = (A_t - mean A) (log pi_t - mean log pi), [T] float64, detached (arXiv 2505.22617).

    Both means are over all trained tokens. Tokens of large covariance make the entropy fall. The
    result is not a number where mask is false. log_probs, of the policy under training, and
    advantages are [T] floating; mask is [T] bool. At the first step on a batch, the old log-probs
    are the same.

    Give the WHOLE mini-batch, of all ranks: the choice is a share of its tokens. verl takes means,
    share and draw from each micro-batch. At 2e-4, every micro-batch of up to 9,999 tokens then
    gives one token, whatever its covariance is in the mini-batch. verl also draws from an unseeded
    permutation: ranks disagree, and no run can be repeated.
    """
    result = log_probs.new_full(log_probs.shape, torch.nan, dtype=torch.float64)
    a, logp = (x.detach()[mask].double() for x in (advantages, log_probs))
    result[mask] = (a - a.mean()) * (logp - logp.mean())
    return result


def kl_cov_tokens(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float) -> Tensor:
    """The max(int(ratio * trained tokens), 1) trained tokens of largest covariance, as a mask [T] bool.

    Of equal ones the first in the batch win. No trained tokens give none. Raises ValueError unless 0 < ratio <= 1.
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
    """max(int(ratio * trained tokens), 1) tokens drawn from those with lower < cov < upper, or all if fewer; a mask [T] bool.

    `clipped` [T] bool: tokens that PPO's clip leaves without a gradient, never drawn (verl's choice); there are none while
    log_probs are the old ones. The draw depends on the generator's state alone: a generator of the same seed on each rank gives
    each the same tokens. Raises ValueError unless 0 < ratio <= 1 and lower < upper.
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


# From token losses to one number ------------------------------------------------------------


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
    """Return the factor of each token's loss, [T] in `dtype`, which is that of the loss. Every mode is a weighted sum.

    mode                     factor
    token-mean               1 / total_tokens
    token-sum                1
    seq-mean-token-sum       1 / total_sequences
    seq-mean-token-sum-norm  1 / (total_sequences * scale)      (Dr.GRPO's constant length, given by the caller)
    seq-mean-token-mean      1 / (total_sequences * sequence_lengths[sequence])

    Factors are computed in float64, so that no dtype of `sequence_lengths` costs precision.

    The counts are given by the caller, never taken from the tensors at hand. The parts that
    micro-batches and ranks compute then add up to what one batch would give, however it is cut.

    sequence_ids [T] integers: index into sequence_lengths. sequence_lengths [S]: trained tokens of each WHOLE sequence, also
    if only some of its tokens are here. total_tokens: trained tokens of the global mini-batch; total_sequences: its
    sequences that have one. Both are counted after rejection, so a sequence that is masked whole
    weighs nothing in a mean. (verl's trainers divide by the configured size of the mini-batch, which
    counts such a sequence. Without that size, its agg_loss leaves the sequence out too.) A total of 0
    counts as 1: there is nothing to add then.
    (verl's agg_loss, verl/trainer/ppo/core_algos.py; its 1e-8 beside the length is left out, for a token's sequence has one.)
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
