"""The metrics of a batch under training: each is named and documented here, where it is made."""

from __future__ import annotations

from torch import Tensor

from millrace.algorithms.by_age import by_age
from millrace.algorithms.correction import correct, drift
from millrace.algorithms.correction_plan import Place, Proximal
from millrace.algorithms.kl import k3
from millrace.train.experience import Experience
from millrace.train.meter import Meter
from millrace.train.options import StepOptions

MAX_AGE_BINS = 8
"""Ages that have metrics of their own; older tokens share the last bin."""


def policy_metrics(
    meter: Meter, data: Experience, corrections: list[dict[str, float]], options: StepOptions
) -> dict[str, float]:
    """Of all optimizer steps of the batch together; means of tokens are over trained ones. Without a step there is no actor/*.

    actor/pg_loss               aggregated policy loss, without KL and entropy bonus; mean over optimizer steps
    actor/kl_loss               aggregated KL to the reference before its coefficient, with use_kl_loss; the same mean
    actor/entropy               entropy of the policy at the sampling temperature, nats
    actor/pg_clipfrac           share of tokens whose loss a bound of the loss mode changed
    actor/pg_clipfrac_lower     share whose loss the bound on large ratios changed (dual clip; dppo's cap)
    actor/ppo_kl                old log-prob - current log-prob
    actor/grad_norm             2-norm of the gradient before clipping; mean over optimizer steps
    actor/lr                    learning rate; mean over optimizer steps
    train/zero_advantage_share  share of samples whose rewards are all equal
    train/trained_token_share   share of the batch's tokens that were trained in a pass: 1 unless some are rejected or filtered
    rollout_corr/...            `algorithms.correction.correct`, where the correction is made for the batch or mini-batches (means)
    """
    n, steps = max(meter.sums["tokens"], 1.0), max(meter.finite, 1)
    metrics = {
        "train/zero_advantage_share": data.zero_variance_share,
        "train/trained_token_share": meter.sums["tokens"]
        / max(len(data.rollout) * options.actor.ppo_epochs, 1),
    }
    if meter.finite:
        metrics |= {
            "actor/pg_loss": meter.sums["pg_loss"] / steps,
            "actor/entropy": meter.sums["entropy"] / n,
            "actor/pg_clipfrac": meter.sums["clipped"] / n,
            "actor/pg_clipfrac_lower": meter.sums["clipped_lower"] / n,
            "actor/ppo_kl": -meter.sums["log_ratio"] / n,
            **meter.step_means("actor/"),
        }
        metrics |= (
            {"actor/kl_loss": meter.sums["kl_loss"] / steps} if options.actor.use_kl_loss else {}
        )
    told = (
        [found for found in corrections if found]
        if data.correction is None
        else [data.correction.metrics]
    )
    for name in told[0] if told else ():
        metrics[name] = sum(found[name] for found in told) / len(told)
    return metrics


def sampler_metrics(
    seen: Tensor, data: Experience, options: StepOptions, *, same_weights: Tensor | None
) -> dict[str, float]:
    """How far the policy under training is from the one that drew the tokens, in the first pass over the batch; without a step
    in it there is train/pad_share alone.

    `seen` is Meter.seen of all ranks; `same_weights` [K] bool are the tokens of the first mini-batch if no step was taken since
    the last sync, else None.

    actor/kl_to_sampler               mean of rollout log-prob - current log-prob: KL(sampler || policy), k1
    actor/k3_to_sampler               the same by k3: never negative, less noise
    actor/rollout_probs_diff_mean     mean of |p_rollout - p_current|
    actor/rollout_probs_diff_max      its maximum
    actor/log_prob_gap_same_version   mean of |rollout log-prob - current log-prob| over tokens that the live version drew, before
                                      any step: the engines' disagreement on the same weights. Missing if there are none
    train/pad_share                   padding in the attention's batches, as a share of them
    staleness/...                     `algorithms.by_age.by_age`
    rollout_corr/...                  `algorithms.correction`: drift, with a correction; all of `correct`, where it is made in passing
    """
    at = (seen[1, :-2] > 0) & data.include
    current, rollout = seen[0, :-2], data.rollout
    delta, diff = (rollout - current)[at], (rollout.exp() - current.exp())[at].abs()
    metrics = {"train/pad_share": pad_share(seen[0, -2:])}
    if not len(delta):
        return metrics
    metrics |= {
        "actor/kl_to_sampler": delta.mean().item(),
        "actor/k3_to_sampler": k3(rollout[at], current[at]).mean().item(),
        "actor/rollout_probs_diff_mean": diff.mean().item(),
        "actor/rollout_probs_diff_max": diff.max().item(),
    }
    if same_weights is not None:
        gap = (rollout - current)[at & same_weights & (data.ages == 0)].abs()
        metrics |= {"actor/log_prob_gap_same_version": gap.mean().item()} if len(gap) else {}
    bins = max(1, min(options.lag_bound, MAX_AGE_BINS))
    metrics |= by_age(current[at], rollout[at], data.ages[at], bins)
    plan = options.correction
    if plan.place is Place.PASSING:
        interpolated = plan.proximal is Proximal.INTERPOLATED
        numerator = data.interpolated(current) if interpolated else current
        metrics |= correct(numerator, rollout, data.lengths, plan.options, include=at).metrics
    elif plan.active and data.correction is None:
        metrics |= drift(current, rollout, data.lengths, at)
    return metrics


def critic_metrics(meter: Meter, data: Experience) -> dict[str, float]:
    """Of the critic, with adv_estimator=gae.

    critic/vf_loss             aggregated value loss; mean over optimizer steps
    critic/vf_clipfrac         share of tokens whose value loss is the clipped one
    critic/explained_variance  1 - Var(return - value) / Var(return) of the batch, before its steps; 1 is a perfect critic
    critic/values, /returns    their means
    critic/grad_norm, /lr      as the actor's
    """
    assert data.values is not None and data.returns is not None
    error, returns = data.returns - data.values, data.returns
    spread = returns.var(correction=0).item() if len(returns) else 0.0
    return {
        "critic/vf_loss": meter.sums["loss"] / max(meter.finite, 1),
        "critic/vf_clipfrac": meter.sums["clipped"] / max(meter.sums["tokens"], 1.0),
        "critic/explained_variance": 1 - error.var(correction=0).item() / spread if spread else 0.0,
        "critic/values": data.values.mean().item() if len(returns) else 0.0,
        "critic/returns": returns.mean().item() if len(returns) else 0.0,
        **meter.step_means("critic/"),
    }


def pad_share(cells: Tensor) -> float:
    """Of [cells, padded cells]."""
    own, padded = cells.tolist()
    return (padded - own) / max(padded, 1.0)
