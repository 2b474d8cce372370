"""A batch as training sees it: what each of its tokens was, is worth and is compared with. Made once, before its first step.

Everything is [K], over the trained tokens of the batch, on the host and the same on every rank; so all that is counted,
averaged, drawn or rejected over the batch is so over the whole of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms.advantages import equal_groups
from millrace.algorithms.correction import Correction, correct
from millrace.algorithms.estimators import AdvantageBatch, estimate
from millrace.algorithms.kl import KL
from millrace.algorithms.ragged import sequence_ids, sequence_sums
from millrace.config import Config
from millrace.engines.lora import StartPolicy
from millrace.engines.options import advantage_options, correction_options
from millrace.engines.packing import Rows, rows_of_samples
from millrace.engines.trainable import Trainable
from millrace.errors import MillraceError
from millrace.types import Sample, Score, Stop, Trajectory


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


@dataclass(frozen=True, slots=True)
class Models:
    """The policy, and what else takes part."""

    policy: Trainable
    critic: Trainable | None
    reference: Trainable | StartPolicy | None


def one_step(config: Config, num_samples: int) -> bool:
    """Whether a batch gets one optimizer step: then the policy at its arrival is the one that is trained."""
    return config.actor.ppo_epochs == 1 and num_samples <= config.actor.ppo_mini_batch_size


def corrects_whole_batch(config: Config) -> bool:
    """Whether weights and rejection are settled at the batch's arrival, by the policy of that moment."""
    correction = config.algorithm.rollout_correction
    recomputed = (
        not config.async_training.use_rollout_log_probs and correction.proximal == "recompute"
    )
    return correction.active and (recomputed or correction.reject_before_baseline)


def make_experience(
    samples: tuple[Sample, ...], version: int, models: Models, config: Config, kl_coef: float
) -> Experience:
    """All that is known before the first step. Up to one forward pass each of policy, critic and reference."""
    rows = rows_of_samples(samples)
    trajectories = [t for s in samples for t in s.trajectories]
    temperature, bypass = config.rollout.temperature, config.async_training.use_rollout_log_probs
    lengths = torch.from_numpy(rows.trained_tokens)
    ids = sequence_ids(lengths)
    ages = (version - torch.from_numpy(rows.versions)).clamp(min=0)
    rollout = torch.from_numpy(rows.rollout_log_probs).double()
    judged = _unfiltered(trajectories, ids, config)
    include = judged & _young(ages, config)

    arrival, squares = _arrival(models.policy, rows, config, len(samples))
    old = rollout if bypass else arrival
    correction = None
    if arrival is not None and corrects_whole_batch(config):
        correction = correct(arrival, rollout, lengths, correction_options(config), include=include)
    reference = (
        models.reference.tokens(rows, temperature=temperature)[0] if models.reference else None
    )
    values = models.critic.tokens(rows, temperature=temperature)[0] if models.critic else None

    scores, groups = _scores(samples)
    kl = None
    if config.algorithm.use_kl_in_reward and reference is not None:
        kl = KL[config.algorithm.kl_penalty](rollout if old is None else old, reference)
    batch = AdvantageBatch(
        scores=scores,
        groups=groups,
        lengths=lengths,
        token_rewards=None if kl is None else -kl_coef * kl,
        components=_components(trajectories, config)
        if config.algorithm.adv_estimator == "gdpo"
        else None,
        values=values,
        truncated=_truncated(trajectories),
        greedy_scores=_greedy_scores(samples)
        if config.algorithm.adv_estimator == "remax"
        else None,
        log_probs=arrival,
        sum_pi_squared=squares,
        weights=None if correction is None else correction.weights,
        keep=_in_baselines(correction, judged, ids, lengths, config),
    )
    found = estimate(config.algorithm.adv_estimator, batch, advantage_options(config))
    equal = equal_groups(scores, groups)
    return Experience(
        rows=rows,
        lengths=lengths,
        ids=ids,
        ages=ages,
        include=include,
        rollout=rollout,
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
    policy: Trainable, rows: Rows, config: Config, num_samples: int
) -> tuple[Tensor | None, Tensor | None]:
    """Log-probs and sums of squared probabilities at the batch's arrival, where something asks for them."""
    correction = config.algorithm.rollout_correction
    squares = config.algorithm.adv_estimator == "optimal_token_baseline"
    recomputed = (
        not config.async_training.use_rollout_log_probs and correction.proximal == "recompute"
    )
    needed = recomputed and (
        correction.active or config.algorithm.use_kl_in_reward or not one_step(config, num_samples)
    )
    if not (needed or squares or corrects_whole_batch(config)):
        return None, None
    log_probs, _, *rest = policy.tokens(
        rows, temperature=config.rollout.temperature, squares=squares
    )
    return log_probs, rest[0] if squares else None


def _in_baselines(
    correction: Correction | None, judged: Tensor, ids: Tensor, lengths: Tensor, config: Config
) -> Tensor | None:
    """[N] bool: not rejected whole; None where rejection comes after baselines."""
    if correction is None or not config.algorithm.rollout_correction.reject_before_baseline:
        return None
    kept, asked = (
        sequence_sums(at.double(), ids, len(lengths)) for at in (correction.keep, judged)
    )
    return (kept > 0) | (asked == 0)


def _unfiltered(trajectories: list[Trajectory], ids: Tensor, config: Config) -> Tensor:
    """[K] bool: not left out by overlong_filtering. What that leaves out was not rejected: it counts in baselines."""
    if not config.algorithm.overlong_filtering:
        return torch.ones_like(ids, dtype=torch.bool)
    return ~_truncated(trajectories)[ids]


def _young(ages: Tensor, config: Config) -> Tensor:
    limit = config.algorithm.rollout_correction.max_token_age
    return torch.ones_like(ages, dtype=torch.bool) if limit is None else ages <= limit


def _truncated(trajectories: list[Trajectory]) -> Tensor:
    """[N] bool: cut by the length limit."""
    return torch.tensor([t.stop is Stop.LENGTH for t in trajectories], dtype=torch.bool)


def _score(trajectory: Trajectory | None, sample: Sample) -> Score:
    if trajectory is None or trajectory.score is None:
        what = "greedy response" if trajectory is sample.greedy else "trajectory"
        raise MillraceError(
            f"a {what} of sample {sample.prompt.index} has no score: it cannot be trained"
        )
    return trajectory.score


def _scores(samples: tuple[Sample, ...]) -> tuple[Tensor, Tensor]:
    """Rewards [N] float64 and sample numbers [N] of all trajectories."""
    rewards = [_score(t, s).value for s in samples for t in s.trajectories]
    groups = np.repeat(np.arange(len(samples)), [len(s.trajectories) for s in samples])
    return torch.tensor(rewards, dtype=torch.float64), torch.from_numpy(groups)


def _greedy_scores(samples: tuple[Sample, ...]) -> Tensor:
    """[N] the score of the greedy response to each trajectory's prompt."""
    return torch.tensor(
        [_score(s.greedy, s).value for s in samples for _ in s.trajectories], dtype=torch.float64
    )


def _components(trajectories: list[Trajectory], config: Config) -> dict[str, Tensor]:
    """[N] each: the reward's named components."""
    extras = [t.score.extra for t in trajectories if t.score is not None]
    names = config.algorithm.gdpo_reward_keys or tuple(
        sorted({name for extra in extras for name in extra})
    )
    for name in names:
        if any(name not in extra for extra in extras):
            known = sorted({known for extra in extras for known in extra})
            raise MillraceError(
                f"algorithm.gdpo_reward_keys: a reward has no component {name!r} (it has {', '.join(known) or 'none'}). "
                "Fix: a reward function that returns a dict with score and every component, each time"
            )
    if not names and extras:
        raise MillraceError(
            "algorithm.adv_estimator=gdpo: the reward function returns no components. Fix: return a dict of score and components"
        )
    return {
        name: torch.tensor([extra[name] for extra in extras], dtype=torch.float64) for name in names
    }
