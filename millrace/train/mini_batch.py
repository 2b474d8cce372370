"""The data of one optimizer step, computed for the whole mini-batch before its first micro-batch.

Rejections, denominators and selected tokens are the same on every rank. They do not depend on the
split into micro-batches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms.correction import correct
from millrace.algorithms.correction_plan import CorrectionStage
from millrace.algorithms.drift import drift
from millrace.algorithms.policy_loss import LossInput
from millrace.algorithms.proximal import ESTIMATES
from millrace.algorithms.token_weights import high_entropy, token_weights
from millrace.train.experience import Experience, Policy
from millrace.train.layout import Ints
from millrace.train.options import StepOptions


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Host tensors [K] over the trained tokens of the whole batch.

    Only the tokens of the rows `members` have meaningful values.
    """

    members: Ints
    """Rows of this mini-batch."""
    mask: Tensor
    """[K] bool: trained in this step."""
    factors: Tensor
    """[K] float64: factor of each token's loss in the aggregate, 0 where not trained."""
    weights: Tensor | None
    """[K] factors of the policy's token losses that are known before the step.

    Importance weights, and 0 for tokens of low entropy. The KL and the entropy bonus lack them.
    """
    selected: Tensor | None
    """[K] bool: tokens selected by covariance, for the losses that need them."""
    tokens: int
    """Number of trained tokens."""
    metrics: dict[str, float]
    """Metrics of this mini-batch's own correction. Empty if it has none."""


def mini_batches(data: Experience, num_samples: int) -> list[Ints]:
    """Return the rows of each mini-batch of `num_samples` samples. The last may be short."""
    first_row = data.rows.first_row
    edges = [*range(0, data.num_samples, num_samples), data.num_samples]
    return [np.arange(first_row[a], first_row[b]) for a, b in itertools.pairwise(edges)]


def settle(
    data: Experience, members: Ints, policy: Policy, options: StepOptions, *, untouched: bool
) -> MiniBatch:
    """Compute the data of the next optimizer step from the rows `members`.

    `untouched`: the policy's weights are those of the batch's arrival, so the log-probs at arrival
    are the current ones. Without them, a correction or a selection of tokens that needs the current
    log-probs takes a forward pass.
    """
    plan, loss = options.correction, options.actor.policy_loss
    select, by_entropy = options.policy_loss.select, loss.top_entropy_quantile < 1
    row = torch.zeros(len(data.lengths), dtype=torch.bool)
    row[torch.from_numpy(data.rows.trajectory[members])] = True
    mask = data.include & row[data.ids]
    now = entropies = None
    if select or by_entropy or plan.place is CorrectionStage.MINI_BATCH:
        now, entropies = (data.arrival, data.entropies) if untouched else (None, None)
        if now is None:
            now, entropies = policy.tokens(data.rows, members, temperature=options.temperature)[:2]
    interpolated = None
    if now is not None and plan.proximal in ESTIMATES:
        interpolated = ESTIMATES[plan.proximal](data.rollout, now, data.ages)
    correction, metrics = data.correction, dict[str, float]()
    if now is not None and plan.place is CorrectionStage.MINI_BATCH:
        proximal = now if interpolated is None else interpolated
        policies = (proximal, data.rollout, data.ids, len(data.lengths))
        correction = correct(*policies, plan.options, include=mask)
        metrics = correction.metrics | drift(*policies, mask)
    if correction is not None:
        mask = mask & correction.keep
    selected = None
    if select and now is not None:
        old = interpolated if data.old is None else data.old
        tokens_now = LossInput(
            log_probs=now,
            old_log_probs=now if old is None else old,
            advantages=data.advantages,
            sequence_ids=data.ids,
            num_sequences=len(data.lengths),
            mask=mask,
        )
        generator = torch.Generator().manual_seed(options.seed + policy.steps)
        selected = select(tokens_now, options.loss, generator)
    weights = correction.weights if correction is not None and plan.weighs else None
    if by_entropy and entropies is not None:
        high = high_entropy(entropies, mask, share=loss.top_entropy_quantile).double()
        weights = high if weights is None else weights * high
    kept = torch.bincount(data.ids, mask.double(), minlength=len(data.lengths))
    tokens = int(mask.sum())
    factors = token_weights(
        options.aggregation,
        sequence_ids=data.ids,
        sequence_lengths=kept,
        total_tokens=tokens,
        total_sequences=int((kept > 0).sum()),
        scale=options.loss_scale,
        dtype=torch.float64,
    )
    return MiniBatch(members, mask, factors * mask, weights, selected, tokens, metrics)
