"""A batch as training sees it: what each of its tokens was, is worth and is compared with. Made once, before its first step.

Everything is [K], over the trained tokens of the batch, on the host and the same on every rank; so all that is counted,
averaged, drawn or rejected over the batch is so over the whole of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.advantages import equal_groups
from millrace.algorithms.correction import Correction, correct
from millrace.algorithms.correction_plan import Place, Proximal
from millrace.algorithms.estimators import AdvantageBatch, estimate
from millrace.algorithms.kl import KL
from millrace.algorithms.proximal import interpolate
from millrace.algorithms.ragged import sequence_sums
from millrace.train.arrived import Arrived
from millrace.train.fsdp.lora import StartPolicy
from millrace.train.fsdp.trainable import Trainable
from millrace.train.options import StepOptions
from millrace.train.packing import Rows


@dataclass(frozen=True, slots=True)
class Experience:
    """N trajectories with K trained tokens. Log-probs are float64, at the training temperature."""

    rows: Rows
    lengths: Tensor
    """[N] int64 trained tokens of each trajectory."""
    ids: Tensor
    """[K] int64 trajectory of each token."""
    ages: Tensor
    """[K] int64 versions between the one that drew the token and the live one."""
    include: Tensor
    """[K] bool: not left out by overlong_filtering or max_token_age."""
    rollout: Tensor
    """[K] log-probs of the policy that drew each token."""
    arrival: Tensor | None
    """[K] of the policy as it was when the batch arrived, where something asks for it."""
    old: Tensor | None
    """[K] what the loss takes ratios against. None: what `PolicyLoss` makes of the current ones."""
    reference: Tensor | None
    """[K] of the frozen reference policy."""
    advantages: Tensor
    """[K] float64."""
    values: Tensor | None
    """[K] the critic's, at the batch's arrival."""
    returns: Tensor | None
    """[K] its targets."""
    correction: Correction | None
    """Of the whole batch, where the proximal policy is known at its arrival."""
    zero_variance_share: float
    """Share of samples whose rewards are all equal."""
    kl_to_reference: float
    """Mean of the KL in the rewards, before its coefficient."""

    @property
    def num_samples(self) -> int:
        return len(self.rows.first_row) - 1

    def interpolated(self, current: Tensor) -> Tensor:
        """Return the interpolated proximal log-probs [K], from the current ones and each token's age."""
        return interpolate(self.rollout, current, -self.ages, 0)


@dataclass(frozen=True, slots=True)
class Models:
    """The policy, and what else takes part."""

    policy: Trainable
    critic: Trainable | None
    reference: Trainable | StartPolicy | None


def make_experience(
    batch: Arrived, models: Models, options: StepOptions, kl_coef: float
) -> Experience:
    """Return all that is known before the first step. Up to one forward pass each of policy, critic and reference."""
    plan, rows = options.correction, batch.rows
    judged = _unfiltered(batch, options)
    include = judged & _young(batch.ages, plan.max_token_age)
    arrival, squares = _arrival(models.policy, rows, options)
    correction = None
    if arrival is not None and plan.place is Place.ARRIVAL:
        correction = correct(arrival, batch.rollout, batch.lengths, plan.options, include=include)
    old = batch.rollout if plan.proximal is Proximal.ROLLOUT else arrival
    reference, values = (
        None if model is None else model.tokens(rows, temperature=options.temperature)[0]
        for model in (models.reference, models.critic)
    )
    kl = None
    if options.algorithm.use_kl_in_reward and reference is not None:
        penalised = batch.rollout if old is None else old
        kl = KL[options.algorithm.kl_penalty](penalised, reference)
    outcomes = AdvantageBatch(
        scores=batch.scores,
        groups=batch.groups,
        lengths=batch.lengths,
        token_rewards=None if kl is None else -kl_coef * kl,
        components=batch.components,
        values=values,
        truncated=batch.truncated,
        greedy_scores=batch.greedy_scores,
        log_probs=arrival,
        sum_pi_squared=squares,
        weights=None if correction is None else correction.weights,
        keep=_in_baselines(correction, judged, batch) if plan.before_baseline else None,
    )
    found = estimate(options.algorithm.adv_estimator, outcomes, options.advantages)
    equal = equal_groups(batch.scores, batch.groups)
    return Experience(
        rows=rows,
        lengths=batch.lengths,
        ids=batch.ids,
        ages=batch.ages,
        include=include,
        rollout=batch.rollout,
        arrival=arrival,
        old=old,
        reference=reference,
        advantages=found.tokens,
        values=values,
        returns=found.returns,
        correction=correction,
        zero_variance_share=equal.double().mean().item() if len(equal) else 0.0,
        kl_to_reference=kl.mean().item() if kl is not None and len(kl) else 0.0,
    )


def _arrival(
    policy: Trainable, rows: Rows, options: StepOptions
) -> tuple[Tensor | None, Tensor | None]:
    """Log-probs and sums of squared probabilities at the batch's arrival, where something asks for them."""
    plan, actor = options.correction, options.actor
    squares = options.algorithm.adv_estimator == "optimal_token_baseline"
    # In the only step on a batch, the policy under training is that of the arrival.
    one_step = actor.ppo_epochs == 1 and len(rows.first_row) - 1 <= actor.ppo_mini_batch_size
    recomputed = plan.proximal is Proximal.RECOMPUTED and (
        plan.active or options.algorithm.use_kl_in_reward or not one_step
    )
    if not (recomputed or squares or plan.place is Place.ARRIVAL):
        return None, None
    log_probs, _, *rest = policy.tokens(rows, temperature=options.temperature, squares=squares)
    return log_probs, rest[0] if squares else None


def _in_baselines(correction: Correction | None, judged: Tensor, batch: Arrived) -> Tensor | None:
    """[N] bool: not rejected whole."""
    if correction is None:
        return None
    kept, asked = (
        sequence_sums(at.double(), batch.ids, len(batch.lengths))
        for at in (correction.keep, judged)
    )
    return (kept > 0) | (asked == 0)


def _unfiltered(batch: Arrived, options: StepOptions) -> Tensor:
    """[K] bool: not left out by overlong_filtering. What that leaves out was not rejected: it counts in baselines."""
    if not options.algorithm.overlong_filtering:
        return torch.ones_like(batch.ids, dtype=torch.bool)
    return ~batch.truncated[batch.ids]


def _young(ages: Tensor, limit: int | None) -> Tensor:
    return torch.ones_like(ages, dtype=torch.bool) if limit is None else ages <= limit
