"""The experience of a batch: log-probs, advantages and correction, made before the first step.

Tensors are on the host and the same on every rank. [K] tensors cover the trained tokens of the
whole batch. Counts, means, draws and rejections therefore also cover the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from millrace.algorithms.advantage import AdvantageBatch, estimate, weighed
from millrace.algorithms.correction import Correction, correct
from millrace.algorithms.correction_plan import CorrectionPlan, CorrectionStage, Proximal
from millrace.algorithms.drift import drift
from millrace.algorithms.kl import KL
from millrace.algorithms.ragged import sequence_sums
from millrace.train.layout import Ints
from millrace.train.options import StepOptions
from millrace.train.responses import Responses
from millrace.train.routing import Routed
from millrace.train.rows import BatchArrays, Rows
from millrace.train.teachers import Taught, ask


@dataclass(frozen=True, slots=True)
class Experience:
    """N trajectories with K trained tokens. Log-probs are float64, at the training temperature."""

    rows: Rows
    lengths: Tensor
    """[N] int64 trained tokens of each trajectory."""
    ids: Tensor
    """[K] int64 trajectory of each token."""
    ages: Tensor
    """[K] int64 number of versions between the token's own and the live one."""
    include: Tensor
    """[K] bool: true unless overlong_filtering or max_token_age leaves the token out.

    In passing, tokens whose ratio cannot be finite are left out too.
    """
    rollout: Tensor
    """[K] log-probs of the policy that drew each token."""
    arrival: Tensor | None
    """[K] log-probs of the policy at the batch's arrival; None if nothing needs them."""
    entropies: Tensor | None
    """[K] entropies of the same policy; None if `arrival` is."""
    old: Tensor | None
    """[K] log-probs in the denominator of the loss's ratios.

    If None, `PolicyLoss` derives them from the current log-probs.
    """
    reference: Tensor | None
    """[K] log-probs of the frozen reference policy."""
    advantages: Tensor
    """[K] float64."""
    values: Tensor | None
    """[K] values of the critic at the batch's arrival."""
    returns: Tensor | None
    """[K] targets of the critic."""
    correction: Correction | None
    """Correction of the whole batch. None if the correction happens at another place."""
    metrics: dict[str, float]
    """Metrics of that correction. Empty without it."""
    zero_variance_share: float
    """Share of samples whose rewards are all equal."""
    kl_to_reference: float
    """Mean of the KL in the rewards, before its coefficient."""
    kl_coef: float
    """The coefficient of the KL in the rewards."""
    taught: Taught | None = None
    """What the teachers say of the tokens."""
    responses: Responses | None = None
    """What the critic trains on. None if that is `rows`."""

    @property
    def num_samples(self) -> int:
        return len(self.rows.first_row) - 1


class Forward(Protocol):
    """A forward pass without gradients, of a critic, a reference or a teacher."""

    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float
    ) -> list[Tensor]:
        """Return the outputs for the trained tokens of the rows `members`, each [K] float64."""
        ...


class Policy(Protocol):
    """The part of the policy under training that an experience and a mini-batch need."""

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        ...

    @property
    def routed(self) -> Routed | None:
        """Return the experts of all tokens in the last pass with the option `record`."""
        ...

    def tokens(
        self, rows: Rows, members: Ints | None = None, *, temperature: float, **options: bool
    ) -> list[Tensor]:
        """Return log-probs and entropies, and with `squares` the sums of squared probabilities.

        With `record`, `routed` then has the experts of all tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Models:
    """The models that take part in a step."""

    policy: Policy
    critic: Forward | None
    reference: Forward | None
    teachers: Mapping[str, Forward] = field(default_factory=dict)


def make_experience(
    batch: BatchArrays, models: Models, options: StepOptions, kl_coef: float
) -> Experience:
    """Compute the experience of `batch`. Each model takes at most one forward pass."""
    plan, include = options.correction, _included(batch, options.correction)
    arrival, entropies, squares = _arrival(models.policy, batch.rows, options)
    rows = batch.rows
    if arrival is not None and options.router_replay == "R2":
        # Without this pass there is one optimizer step, and its experts are those at arrival.
        rows = replace(rows, experts=models.policy.routed)
    correction, metrics = _corrected(batch, arrival, include, plan)
    trained, in_baselines = include if correction is None else correction.keep, None
    if correction is not None and plan.before_baseline:
        # The baselines exclude a sequence whose tokens are all rejected, but no filtered one.
        in_baselines = batch.sequences_of(trained) | ~batch.sequences_of(batch.unfiltered)
    # An estimate of the proximal policy needs the current policy, so PolicyLoss makes it.
    old = {Proximal.ROLLOUT: batch.rollout, Proximal.RECOMPUTED: arrival}.get(plan.proximal)
    reference, values = (
        None if model is None else model.tokens(rows, temperature=options.temperature)[0]
        for model in (models.reference, models.critic)
    )
    kl = None
    if options.algorithm.use_kl_in_reward and reference is not None:
        kl = KL[options.algorithm.kl_penalty](batch.rollout if old is None else old, reference)
        # A token that is not trained may have a log-prob that is not finite.
        kl = torch.where(trained | kl.isfinite(), kl, 0.0)
    scores, token_rewards = _rewards(
        batch, kl, kl_coef, by_component=options.algorithm.needs_components
    )
    outcomes = AdvantageBatch(
        scores=scores,
        groups=batch.groups,
        lengths=batch.lengths,
        token_rewards=token_rewards,
        components=batch.components,
        values=values,
        truncated=batch.truncated,
        goes_on=batch.goes_on,
        response_lengths=batch.response_lengths,
        greedy_scores=batch.greedy_scores,
        log_probs=arrival,
        sum_pi_squared=squares,
        weights=None if correction is None else correction.weights,
        keep=in_baselines,
        trained=trained,
    )
    advantages = estimate(options.estimator, outcomes, options.advantages)
    if weights := options.token_weights:
        ids = torch.zeros(len(batch.ids), dtype=torch.int64)
        drawn = torch.from_numpy(rows.tokens[rows.trained])
        ids[torch.from_numpy(rows.order[rows.trained])] = drawn.long()
        named = options.algorithm.token_weights
        tokens = weighed(named, weights, outcomes, ids, advantages.tokens)
        advantages = replace(advantages, tokens=tokens)
    taught = None
    if batch.taught:
        taught, rows = ask(models.teachers, batch, rows, options)
        factor = options.distillation.task_loss_coef * options.distillation.use_task_rewards
        advantages = replace(advantages, tokens=advantages.tokens * factor)
    return Experience(
        rows=rows,
        lengths=batch.lengths,
        ids=batch.ids,
        ages=batch.ages,
        include=include,
        rollout=batch.rollout,
        arrival=arrival,
        entropies=entropies,
        old=old,
        reference=reference,
        advantages=advantages.tokens,
        values=values,
        returns=advantages.returns,
        correction=correction,
        metrics=metrics,
        zero_variance_share=batch.equal_share,
        kl_to_reference=kl.mean().item() if kl is not None and len(kl) else 0.0,
        kl_coef=kl_coef,
        taught=taught,
    )


def _rewards(
    batch: BatchArrays, kl: Tensor | None, kl_coef: float, *, by_component: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the rewards of trajectories [N], and those of tokens [K].

    The rewards of single turns are in a trajectory's score. They move to their tokens here, except
    for gdpo, which reads no token's reward.
    """
    penalty = None if kl is None else -kl_coef * kl
    turns = None if by_component else batch.turn_rewards
    if turns is None:
        return batch.scores, penalty
    rest = batch.scores - sequence_sums(turns, batch.ids, len(batch.lengths))
    return rest, turns if penalty is None else turns + penalty


def _arrival(
    policy: Policy, rows: Rows, options: StepOptions
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return log-probs, entropies and sums of squared probabilities at the batch's arrival.

    Each is [K], or None if the options do not need it. If all are None, there is no forward pass.
    """
    plan, actor = options.correction, options.actor
    squares = bool({"log_probs", "sum_pi_squared"} & options.estimator.needs)
    # In a single step on a batch, the policy under training is that of the batch's arrival.
    one_step = actor.ppo_epochs == 1 and len(rows.first_row) - 1 <= actor.ppo_mini_batch_size
    recomputed = plan.proximal is Proximal.RECOMPUTED and (
        plan.active or options.algorithm.use_kl_in_reward or not one_step
    )
    if not (recomputed or squares or plan.place is CorrectionStage.ARRIVAL):
        return None, None, None
    log_probs, entropies, *rest = policy.tokens(
        rows,
        temperature=options.temperature,
        squares=squares,
        record=options.router_replay == "R2",
    )
    return log_probs, entropies, rest[0] if squares else None


def _included(batch: BatchArrays, plan: CorrectionPlan) -> Tensor:
    """Return `Experience.include`, [K] bool."""
    include = batch.unfiltered
    if plan.max_token_age is not None:
        include = include & (batch.ages <= plan.max_token_age)
    if plan.place is not CorrectionStage.PASSING:
        return include
    # In passing, a weight of 0 does not remove a ratio that is not finite: 0 x infinity is NaN.
    infinite = include & ~batch.rollout.isfinite()
    by_token = plan.options.rollout_is == "token"
    return include & ~(infinite if by_token else batch.sequences_of(infinite)[batch.ids])


def _corrected(
    batch: BatchArrays, arrival: Tensor | None, include: Tensor, plan: CorrectionPlan
) -> tuple[Correction | None, dict[str, float]]:
    """Return the correction of the whole batch, and its metrics: none if it is elsewhere."""
    if arrival is None or plan.place is not CorrectionStage.ARRIVAL:
        return None, {}
    policies = (arrival, batch.rollout, batch.ids, len(batch.lengths))
    correction = correct(*policies, plan.options, include=include)
    return correction, correction.metrics | drift(*policies, include)
