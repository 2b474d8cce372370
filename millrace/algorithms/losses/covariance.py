"""Clip-Cov and KL-Cov: other losses for tokens of large covariance (arXiv 2505.22617)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from millrace.algorithms.policy_loss import (
    LossInput,
    LossOptions,
    TokenLoss,
    clipped_surrogate,
    log_ratio,
    policy_loss,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor


class ClipCovOptions(LossOptions):
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """clip_cov: share of the mini-batch's tokens that are detached."""
    clip_cov_lb: float = 1.0
    """clip_cov: a token may be detached only if its covariance is at least this."""
    clip_cov_ub: float = 5.0
    """clip_cov: a token may be detached only if its covariance is at most this."""


class KlCovOptions(LossOptions):
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """kl_cov: share of the mini-batch's tokens that get a KL penalty.

    The tokens with the largest covariance are chosen.
    """
    ppo_kl_coef: float = Field(0.1, ge=0)
    """kl_cov: weight of |log-ratio| on these tokens."""


def _detached(inputs: LossInput, options: ClipCovOptions, generator: Generator) -> Tensor:
    from millrace.algorithms.token_weights import clip_cov_tokens

    ratio = log_ratio(inputs.log_probs, inputs.old_log_probs).exp()
    _, clipped = clipped_surrogate(ratio, inputs.advantages, options)
    return clip_cov_tokens(
        inputs.log_probs,
        inputs.advantages,
        inputs.mask,
        ratio=options.clip_cov_ratio,
        lower=options.clip_cov_lb,
        upper=options.clip_cov_ub,
        generator=generator,
        clipped=clipped,
    )


def _penalised(inputs: LossInput, options: KlCovOptions, generator: Generator) -> Tensor:
    from millrace.algorithms.token_weights import kl_cov_tokens

    tokens = inputs.log_probs, inputs.advantages, inputs.mask
    return kl_cov_tokens(*tokens, ratio=options.kl_cov_ratio)


@policy_loss(options=ClipCovOptions, select=_detached)
def clip_cov(inputs: LossInput, options: ClipCovOptions) -> TokenLoss:
    """Compute PPO's clip without dual clip, and 0, without gradient, for selected tokens.

    `clip_cov_tokens` selects the tokens. `clipped` marks tokens that PPO's clip changed, and
    selected tokens. Raises ValueError without `selected`.
    """
    x = inputs.trained()
    selected, delta = _selected(x), x.log_ratio()
    loss, clipped = clipped_surrogate(delta.exp(), x.advantages, options)
    return loss.masked_fill(selected, 0.0), x.statistics(
        log_ratio=delta, clipped=clipped | selected
    )


@policy_loss(
    options=KlCovOptions,
    select=_penalised,
    # It penalises a few tokens in ten thousand, and bounds no other ratio.
    bounds_stale=False,
    joint="penalises tokens of any entropy, and a mask would remove the penalty",
)
def kl_cov(inputs: LossInput, options: KlCovOptions) -> TokenLoss:
    """Compute -A rho, plus ppo_kl_coef |log pi - log pi_old| for selected tokens, without a clip.

    The penalty is not clamped, so it pulls back from any distance. At distance 0 its gradient is
    0, so it has no effect on the first step of a batch. `kl_cov_tokens` selects the tokens. Raises
    ValueError without `selected`.
    """
    x = inputs.trained()
    selected, delta = _selected(x), x.log_ratio()
    penalty = options.ppo_kl_coef * (x.log_probs - x.old_log_probs).abs()
    loss = penalty.where(selected, 0.0) - x.advantages * delta.exp()
    return loss, x.statistics(log_ratio=delta)


def _selected(inputs: LossInput) -> Tensor:
    if inputs.selected is None:
        raise ValueError(
            "this loss needs `selected`: "
            "the tokens that clip_cov_tokens or kl_cov_tokens selects in the whole mini-batch"
        )
    return inputs.selected
