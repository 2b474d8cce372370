"""The input, the options and the result that all policy losses share, and ratios of two policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millrace.algorithms.ragged import sequence_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """The M tokens of a micro-batch. Floating tensors share one dtype.

    Trajectories may be cut, unless the mode or an option joins their tokens.
    """

    log_probs: Tensor
    """[M] floating, of the policy under training. Only this tensor has a gradient."""
    old_log_probs: Tensor
    """[M] of the policy in the denominator of ratios. Modes outside USES_OLD ignore the values."""
    advantages: Tensor
    """[M]."""
    sequence_ids: Tensor
    """[M] int64 below num_sequences."""
    num_sequences: int
    """Number of trajectories. Some may have no token."""
    mask: Tensor
    """[M] bool: tokens that are trained. Values of other tokens are never read and may be NaN."""
    selected: Tensor | None = None
    """[M] bool: tokens selected in the whole mini-batch, for modes in SELECTS."""

    def trained(self) -> LossInput:
        """Return a copy in which tokens outside the mask have log-probs 0 and advantage 0.

        They are also not selected. Such a token then has ratio 1, loss 0 and gradient 0, and adds
        nothing to a sum over its sequence. Only log_probs keeps its gradient. Raises ValueError if
        a tensor's shape differs from that of log_probs.
        """
        self._check_shapes()
        masked = ~self.mask
        return LossInput(
            log_probs=self.log_probs.masked_fill(masked, 0.0),
            old_log_probs=self.old_log_probs.detach().masked_fill(masked, 0.0),
            advantages=self.advantages.detach().masked_fill(masked, 0.0),
            sequence_ids=self.sequence_ids,
            num_sequences=self.num_sequences,
            mask=self.mask,
            selected=None if self.selected is None else self.selected & self.mask,
        )

    def _check_shapes(self) -> None:
        tensors = {
            "old_log_probs": self.old_log_probs,
            "advantages": self.advantages,
            "sequence_ids": self.sequence_ids,
            "mask": self.mask,
            "selected": self.mask if self.selected is None else self.selected,
        }
        for name, tensor in tensors.items():
            if tensor.shape != self.log_probs.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, "
                    f"log_probs {tuple(self.log_probs.shape)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Numbers of all modes. Each mode reads its own. Raises ValueError for a value out of range."""

    clip_low: float
    """Largest distance of a ratio below 1 (gspo's paper: 3e-4).

    dppo_tv   largest fall of the token's probability
    dppo_kl   largest binary KL where A < 0
    geo_mean  largest fall of the log-ratio (0.4 in its paper)
    """
    clip_high: float
    """Largest distance of a ratio above 1 (gspo's paper: 4e-4).

    dppo_tv   largest rise of the token's probability
    dppo_kl   largest binary KL where A > 0
    geo_mean  largest rise of the log-ratio (0.4 in its paper)
    """
    clip_c: float
    """vanilla: upper bound of the ratio where A < 0."""
    importance_sampling_level: Literal["token", "sequence"]
    """vanilla, cispo, sapo: the ratio is the token's own, or `sequence_log_ratio`'s."""
    tau_pos: float
    """sapo: temperature where A > 0."""
    tau_neg: float
    """sapo: temperature elsewhere."""
    vespo_k_pos: float
    """vespo: exponent of the ratio where A > 0."""
    vespo_lambda_pos: float
    """vespo: decay by the ratio where A > 0."""
    vespo_k_neg: float
    """vespo: exponent of the ratio elsewhere."""
    vespo_lambda_neg: float
    """vespo: decay by the ratio elsewhere."""
    dro_beta: float
    """dro: weight of the squared log-ratio, relative to the advantages.

    Tinker uses 0.05. verl has no default.
    """
    ppo_kl_coef: float
    """kl_cov: weight of |log-ratio| on selected tokens."""
    dppo_clip_c: float
    """dppo_tv, dppo_kl: upper bound of the ratio as a weight.

    verl intends 20, but its clip_ratio_c = 3 always overrides that.
    """

    def __post_init__(self) -> None:
        if self.clip_c <= 1:
            raise ValueError(f"clip_c must be over 1, got {self.clip_c}")
        at_least_0 = {
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "ppo_kl_coef": self.ppo_kl_coef,
            "vespo_k_pos": self.vespo_k_pos,
            "vespo_k_neg": self.vespo_k_neg,
        }
        for name, value in at_least_0.items():
            if value < 0:
                raise ValueError(f"{name} must not be below 0, got {value}")
        over_0 = {
            "tau_pos": self.tau_pos,
            "tau_neg": self.tau_neg,
            "vespo_lambda_pos": self.vespo_lambda_pos,
            "vespo_lambda_neg": self.vespo_lambda_neg,
            "dro_beta": self.dro_beta,
            "dppo_clip_c": self.dppo_clip_c,
        }
        for name, value in over_0.items():
            if value <= 0:
                raise ValueError(f"{name} must be over 0, got {value}")


TokenLoss = tuple[Tensor, dict[str, Tensor]]
"""Token losses [M] and statistics.

The losses have a gradient to log_probs and are 0 outside the mask. Each statistic is [M], of the
same dtype and detached. It is 0 outside the mask, and if the mode lacks it:

clipped        1 where a bound of the mode changed the token's contribution
clipped_lower  1 where the bound on a large ratio did this: dual clip (vanilla, A < 0), truncated
               weight (dppo)
log_ratio      log(pi / pi_old) clamped to +-20; -mean is verl's ppo_kl
"""


def statistics(
    log_probs: Tensor,
    *,
    log_ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    clipped_lower: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the three statistics of a TokenLoss, 0 if missing, in the dtype of `log_probs`."""
    given = {"clipped": clipped, "clipped_lower": clipped_lower, "log_ratio": log_ratio}
    zeros = torch.zeros_like(log_probs)
    return {
        name: zeros if value is None else value.detach().to(log_probs.dtype)
        for name, value in given.items()
    }


MAX_LOG_RATIO = 20.0
"""Bound of log-ratios. The square of exp(20) = 4.9e8 is still finite in float32."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper bound of a sequence's mean log-ratio, as in verl's gspo. A small ratio needs no bound."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(pi / pi_old) clamped to +-20, in the shape of its arguments.

    There is no gradient where the clamp acts.
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(values: Tensor, x: LossInput) -> Tensor:
    """Return means [num_sequences] over trained tokens, from values [M] that are 0 elsewhere.

    The sums are in float64.
    """
    total = sequence_sums(values.double(), x.sequence_ids, x.num_sequences)
    count = sequence_sums(x.mask.double(), x.sequence_ids, x.num_sequences)
    return (total / count.clamp(min=1)).to(values.dtype)


def sequence_log_ratio(x: LossInput) -> Tensor:
    """Return log s [M] of each token's sequence, with the gradient of the token's log-prob.

    (GSPO-token, arXiv 2507.18071.) `x` is the result of `LossInput.trained`.

    s = exp(min(mean_t (log pi - log pi_old), 10)); no gradient where the bound acts

    The log-ratios of tokens are not clamped, because that would bias the mean.
    """
    mean = sequence_means((x.log_probs - x.old_log_probs).detach(), x)[x.sequence_ids]
    # In this order, the difference is exactly 0 and the mean keeps its digits. A clip of 3e-4 needs
    # these digits.
    return (x.log_probs - x.log_probs.detach() + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO)


def log_ratio_at_level(x: LossInput, options: LossOptions) -> Tensor:
    """Return the log of the ratio that the loss uses, [M]: the token's, or its sequence's."""
    if options.importance_sampling_level == "sequence":
        return sequence_log_ratio(x)
    return log_ratio(x.log_probs, x.old_log_probs)


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
