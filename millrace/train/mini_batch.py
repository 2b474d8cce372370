"""What one optimizer step trains on, settled for the whole mini-batch before any micro-batch of it is computed.

Rejection, denominators and choices over the mini-batch are the same on every rank and however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.aggregate import token_weights
from millrace.algorithms.correction import correct
from millrace.algorithms.correction_plan import Place, Proximal
from millrace.algorithms.covariance import clip_cov_tokens, kl_cov_tokens
from millrace.algorithms.losses import ppo_clip
from millrace.algorithms.modes import SELECTS
from millrace.algorithms.ragged import sequence_sums
from millrace.train.experience import Experience
from millrace.train.fsdp.packed_attention import Ints
from millrace.train.options import StepOptions


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Host tensors [K] over the trained tokens of the whole batch; of meaning for the rows `members` alone."""

    members: Ints
    """Rows of this mini-batch."""
    mask: Tensor
    """[K] bool: trained in this step."""
    factors: Tensor
    """[K] float64: factor of each token's loss in the aggregate, 0 where not trained."""
    weights: Tensor | None
    """[K] importance weights, where they are known before the step."""
    selected: Tensor | None
    """[K] bool: chosen by covariance, for the losses that need it."""
    tokens: int
    """Trained tokens."""
    metrics: dict[str, float]
    """Of the correction, where it is this mini-batch's own."""


def settle(
    data: Experience,
    members: Ints,
    options: StepOptions,
    *,
    current: Callable[[], Tensor],
    generator: torch.Generator,
) -> MiniBatch:
    """`current` gives the log-probs [K] of the policy as it is now; a forward pass, so it is called only where needed."""
    plan, selects = options.correction, options.actor.policy_loss.loss_mode in SELECTS
    row = torch.zeros(len(data.lengths), dtype=torch.bool)
    row[torch.from_numpy(members)] = True
    mask = data.include & row[data.ids]
    now = current() if selects or plan.place is Place.MINI_BATCH else None
    found, metrics = data.correction, dict[str, float]()
    if now is not None and plan.place is Place.MINI_BATCH:
        proximal = data.interpolated(now) if plan.proximal is Proximal.INTERPOLATED else now
        found = correct(proximal, data.rollout, data.lengths, plan.options, include=mask)
        metrics = found.metrics
    if found is not None:
        mask = mask & found.keep
    selected = _select(data, now, mask, options, generator) if selects and now is not None else None
    kept = sequence_sums(mask.double(), data.ids, len(data.lengths))
    tokens = int(mask.sum())
    factors = token_weights(
        options.aggregation,
        sequence_ids=data.ids,
        sequence_lengths=kept,
        total_tokens=tokens,
        total_sequences=int((kept > 0).sum()),
        scale=options.loss_scale,
        dtype=kept.dtype,
    )
    weights = found.weights if found is not None and plan.weighs else None
    return MiniBatch(members, mask, factors * mask, weights, selected, tokens, metrics)


def _select(
    data: Experience, now: Tensor, mask: Tensor, options: StepOptions, generator: torch.Generator
) -> Tensor:
    """The tokens that covariance chooses, [K] bool."""
    actor, loss = options.actor, options.actor.policy_loss
    if loss.loss_mode == "kl_cov":
        return kl_cov_tokens(now, data.advantages, mask, ratio=loss.kl_cov_ratio)
    old, clipped = data.old, None
    if old is None and options.correction.proximal is Proximal.INTERPOLATED:
        old = data.interpolated(now)
    if old is not None:
        _, stats = ppo_clip(
            now,
            old,
            data.advantages,
            clip_low=actor.clip_ratio_low,
            clip_high=actor.clip_ratio_high,
            clip_c=actor.clip_ratio_c,
        )
        clipped = stats["clipped"] > 0
    return clip_cov_tokens(
        now,
        data.advantages,
        mask,
        ratio=loss.clip_cov_ratio,
        lower=loss.clip_cov_lb,
        upper=loss.clip_cov_ub,
        generator=generator,
        clipped=clipped,
    )
