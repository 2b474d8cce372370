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
from millrace.algorithms.covariance import clip_cov_tokens, kl_cov_tokens
from millrace.algorithms.losses import ppo_clip
from millrace.algorithms.modes import SELECTS
from millrace.algorithms.proximal import interpolate
from millrace.algorithms.ragged import sequence_sums
from millrace.config import Config
from millrace.engines.attention import Ints
from millrace.engines.experience import Experience, corrects_whole_batch
from millrace.engines.options import aggregation, correction_options, loss_scale


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
    config: Config,
    *,
    current: Callable[[], Tensor],
    generator: torch.Generator,
) -> MiniBatch:
    """`current` gives the log-probs [K] of the policy as it is now; a forward pass, so it is called only where needed."""
    mode = config.actor.policy_loss.loss_mode
    row = torch.zeros(len(data.lengths), dtype=torch.bool)
    row[torch.from_numpy(members)] = True
    mask = data.include & row[data.ids]
    weights, metrics = None, dict[str, float]()
    if data.correction is not None:
        mask = mask & data.correction.keep
        weights = (
            data.correction.weights if config.algorithm.rollout_correction.rollout_is else None
        )
    now = current() if mode in SELECTS or _corrects_here(config) else None
    if now is not None and _corrects_here(config):
        proximal = now if config.async_training.use_rollout_log_probs else proximal_of(data, now)
        found = correct(
            proximal, data.rollout, data.lengths, correction_options(config), include=mask
        )
        mask, metrics = found.keep, found.metrics
        weights = found.weights if config.algorithm.rollout_correction.rollout_is else None
    selected = (
        None if now is None or mode not in SELECTS else _select(data, now, mask, config, generator)
    )
    kept = sequence_sums(mask.double(), data.ids, len(data.lengths))
    tokens = int(mask.sum())
    factors = token_weights(
        aggregation(config),
        sequence_ids=data.ids,
        sequence_lengths=kept,
        total_tokens=tokens,
        total_sequences=int((kept > 0).sum()),
        scale=loss_scale(config),
        dtype=kept.dtype,
    )
    return MiniBatch(members, mask, factors * mask, weights, selected, tokens, metrics)


def corrects_in_passing(config: Config) -> bool:
    """Whether weights can be made of the very pass that is trained: nothing about them is of the whole mini-batch."""
    correction = config.algorithm.rollout_correction
    of_all = (
        correction.rollout_rs
        or correction.rollout_token_veto_threshold
        or correction.rollout_is_batch_normalize
    )
    return bool(correction.rollout_is) and not corrects_whole_batch(config) and not of_all


def proximal_of(data: Experience, current: Tensor) -> Tensor:
    """[K] interpolated proximal log-probs, from the current ones and each token's age."""
    return interpolate(data.rollout, current, -data.ages, 0)


def _corrects_here(config: Config) -> bool:
    correction = config.algorithm.rollout_correction
    wanted = (
        correction.rollout_is or correction.rollout_rs or correction.rollout_token_veto_threshold
    )
    return bool(wanted) and not corrects_whole_batch(config) and not corrects_in_passing(config)


def _select(
    data: Experience, now: Tensor, mask: Tensor, config: Config, generator: torch.Generator
) -> Tensor:
    loss = config.actor.policy_loss
    if loss.loss_mode == "kl_cov":
        return kl_cov_tokens(now, data.advantages, mask, ratio=loss.kl_cov_ratio)
    actor, old, clipped = config.actor, data.old, None
    if old is None and config.algorithm.rollout_correction.proximal == "interpolate":
        old = proximal_of(data, now)
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
