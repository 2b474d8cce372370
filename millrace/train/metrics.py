"""The sums of a batch's optimizer steps, and the metrics that are made of them, each documented here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.algorithms.correction import correct, drift
from millrace.algorithms.correction_plan import Place, Proximal
from millrace.algorithms.kl import k3
from millrace.algorithms.losses import interpolate, log_ratio
from millrace.algorithms.ragged import sequence_sums
from millrace.train.experience import Experience
from millrace.train.options import StepOptions
from millrace.train.packing import MicroBatch

MAX_AGE_BINS = 8
"""Ages that have metrics of their own; older tokens share the last bin."""


class Meter:
    """Tensors until a step's end, so that a GPU is waited for once in each step; numbers from there.

    `names` are those of the sums that each micro-batch reports, in their order; the first is the loss.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.sums = dict.fromkeys(names, 0.0)
        """Of all finite steps, global."""
        self.finite = 0
        self.nonfinite = 0
        """Optimizer steps left out for a loss or gradient that is not finite."""
        self.empty = 0
        """Optimizer steps left out because there was nothing to train."""
        self._norm = self._lr = 0.0
        self._pending: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._step_seen: list[tuple[Tensor, Tensor]] = []
        self._cells = self._padded_cells = 0

    @property
    def steps(self) -> int:
        return self.finite + self.nonfinite + self.empty

    def add(self, sums: Tensor, output: Tensor, micro: MicroBatch) -> None:
        """One micro-batch of this rank: its sums [S], and what the module said of its tokens [M]."""
        self._pending.append(sums)
        self._step_seen.append((micro.source, output))
        self._cells += micro.layout.num_cells
        self._padded_cells += micro.layout.num_padded_cells

    def take(self) -> Tensor:
        """This rank's sums [S] float64 of the step so far."""
        sums = torch.stack(self._pending).sum(0)
        self._pending = []
        return sums

    def finish(self, sums: list[float], norm: float, lr: float, *, first_pass: bool) -> None:
        """An optimizer step was taken: its global sums."""
        self.finite += 1
        self._norm += norm
        self._lr += lr
        for name, value in zip(self.sums, sums, strict=True):
            self.sums[name] += value
        if first_pass:
            self._seen += self._step_seen
        self._step_seen = []

    def skip_nonfinite(self) -> None:
        self.nonfinite += 1
        self._step_seen = []

    def outputs(self, num_tokens: int) -> Tensor:
        """[2, K + 2] float64: what the module said of each token in the finite steps of the first pass, and whether it was
        among them; the last two columns of the first row are cells and padded cells. This rank's: to be summed.
        """
        flat = torch.zeros(2, num_tokens + 2, dtype=torch.float64)
        for source, output in self._seen:
            flat[0, source], flat[1, source] = output.double().cpu(), 1.0
        flat[0, -2:] = self.cells()
        return flat

    def cells(self) -> Tensor:
        """[cells, padded cells] of this rank's attention batches, float64."""
        return torch.tensor([self._cells, self._padded_cells], dtype=torch.float64)

    def step_means(self, prefix: str) -> dict[str, float]:
        """Means over the finite steps."""
        n = max(self.finite, 1)
        return {f"{prefix}grad_norm": self._norm / n, f"{prefix}lr": self._lr / n}


def batch_metrics(
    data: Experience,
    policy: Meter,
    critic: Meter | None,
    corrections: list[dict[str, float]],
    options: StepOptions,
    *,
    same_weights: Tensor | None,
    sum_ranks: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return the metrics of a batch after its last optimizer step, the same on every rank.

    corrections   metrics of each mini-batch's own correction
    same_weights  [K] bool: tokens of the first mini-batch if no step was taken since the last sync,
                  else None
    sum_ranks     adds up a float64 tensor of every rank; it may return another device's tensor

    With algorithm.use_kl_in_reward there are also:
    actor/reward_kl_penalty        mean KL in the rewards of this batch, before its coefficient
    actor/reward_kl_penalty_coeff  the coefficient of this batch
    """
    output = sum_ranks(policy.outputs(len(data.rollout))).cpu()
    own = _policy_metrics(policy, data, corrections, options)
    if critic is not None:
        own |= _critic_metrics(critic, data)
    # A correction of the batch or of its mini-batches replaces the drift of the whole.
    metrics = _sampler_metrics(output, data, options, same_weights=same_weights) | own
    if options.algorithm.use_kl_in_reward:
        metrics |= {
            "actor/reward_kl_penalty": data.kl_to_reference,
            "actor/reward_kl_penalty_coeff": data.kl_coef,
        }
    return metrics


def _policy_metrics(
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
    parts = (
        [part for part in corrections if part]
        if data.correction is None
        else [data.correction.metrics]
    )
    for name in parts[0] if parts else ():
        metrics[name] = sum(part[name] for part in parts) / len(parts)
    return metrics


def _sampler_metrics(
    output: Tensor, data: Experience, options: StepOptions, *, same_weights: Tensor | None
) -> dict[str, float]:
    """How far the policy under training is from the one that drew the tokens, in the first pass over the batch; without a step
    in it there is train/pad_share alone.

    `output` is Meter.outputs of all ranks; `same_weights` [K] bool are the tokens of the first mini-batch if no step was taken since
    the last sync, else None.

    actor/kl_to_sampler               mean of rollout log-prob - current log-prob: KL(sampler || policy), k1
    actor/k3_to_sampler               the same by k3: never negative, less noise
    actor/rollout_probs_diff_mean     mean of |p_rollout - p_current|
    actor/rollout_probs_diff_max      its maximum
    actor/log_prob_gap_same_version   mean of |rollout log-prob - current log-prob| over tokens that the live version drew, before
                                      any step: the engines' disagreement on the same weights. Missing if there are none
    train/pad_share                   padding in the attention's batches, as a share of them
    staleness/...                     `by_age`
    rollout_corr/...                  `algorithms.correction`: drift, with a correction; all of `correct`, where it is made in passing
    """
    at = (output[1, :-2] > 0) & data.include
    current, rollout = output[0, :-2], data.rollout
    metrics = {"train/pad_share": pad_share(output[0, -2:])}
    if not bool(at.any()):
        return metrics
    bins = max(1, min(options.lag_bound, MAX_AGE_BINS))
    metrics |= by_age(current[at], rollout[at], data.ages[at], bins)
    plan = options.correction
    if plan.place is Place.PASSING:
        numerator = current
        if plan.proximal is Proximal.INTERPOLATED:
            numerator = interpolate(rollout, current, -data.ages, 0)
        metrics |= correct(numerator, rollout, data.lengths, plan.options, include=at).metrics
    elif plan.active and data.correction is None:
        metrics |= drift(current, rollout, data.lengths, at)
    delta, diff = (rollout - current)[at], (rollout.exp() - current.exp())[at].abs()
    metrics |= {
        "actor/kl_to_sampler": delta.mean().item(),
        "actor/k3_to_sampler": k3(rollout[at], current[at]).mean().item(),
        "actor/rollout_probs_diff_mean": diff.mean().item(),
        "actor/rollout_probs_diff_max": diff.max().item(),
    }
    if same_weights is not None:
        gap = (rollout - current)[at & same_weights & (data.ages == 0)].abs()
        metrics |= {"actor/log_prob_gap_same_version": gap.mean().item()} if len(gap) else {}
    return metrics


def by_age(
    log_probs_a: Tensor, log_probs_b: Tensor, ages: Tensor, max_age: int
) -> dict[str, float]:
    """Metrics of the tokens of each age: 0 to max_age - 1, and `{max_age}+` for max_age and over.

    log_probs_a, log_probs_b [T]: the trainer's and the rollout's. ages [T] integers, at least 0: versions between the one that
    drew the token and the live one. With l = log_probs_a - log_probs_b clamped to +-20 and w = e^l:
    staleness/token_share/AGE  share of all tokens that have this age
    staleness/log_ratio/AGE    mean of l
    staleness/ess/AGE          (sum w)^2 / (n sum w^2): the share of n tokens that is left, 1 if all ratios are equal
    staleness/token_mean, staleness/token_max   age of the tokens

    The last bin has its name whether or not older tokens occur: so it is one curve of a run. An age that does not occur has a
    share of 0 and nothing else; no tokens give a mean and a max of 0. Tokens whose log-ratio is not finite count in the share alone; where an age
    has no others, its mean and its effective sample size are 0. Computed in float64.

    Raises ValueError if shapes differ, max_age is under 0 or an age is.
    """
    if log_probs_a.ndim != 1 or not log_probs_a.shape == log_probs_b.shape == ages.shape:
        shapes = [tuple(x.shape) for x in (log_probs_a, log_probs_b, ages)]
        raise ValueError(f"log-probs and ages must all be [T], got {shapes}")
    if max_age < 0 or bool((ages < 0).any()):
        raise ValueError(f"max_age, {max_age}, and every age must be at least 0")
    if not len(ages):
        return {"staleness/token_mean": 0.0, "staleness/token_max": 0.0}
    metrics = {
        "staleness/token_mean": ages.double().mean().item(),
        "staleness/token_max": float(ages.max()),
    }
    for age, (tokens, count, total, weight, squares) in enumerate(
        _sums(log_probs_a, log_probs_b, ages, max_age)
    ):
        name = f"{age}+" if age == max_age else str(age)
        metrics[f"staleness/token_share/{name}"] = tokens / len(ages)
        if tokens:
            metrics[f"staleness/log_ratio/{name}"] = total / max(count, 1)
            metrics[f"staleness/ess/{name}"] = weight**2 / (count * squares) if count else 0.0
    return metrics


def _sums(
    log_probs_a: Tensor, log_probs_b: Tensor, ages: Tensor, max_age: int
) -> list[list[float]]:
    """Of each bin: tokens, those with a finite log-ratio, and their sums of l, w and w^2."""
    delta = log_probs_a.detach().double() - log_probs_b.detach().double()
    finite = delta.isfinite()
    logs = torch.where(finite, log_ratio(delta, torch.zeros_like(delta)), 0.0)
    weights = torch.where(finite, logs.exp(), 0.0)
    bins = ages.clamp(max=max_age).long()
    columns = (torch.ones_like(delta), finite.double(), logs, weights, weights.square())
    sums: list[list[float]] = torch.stack(
        [sequence_sums(x, bins, max_age + 1) for x in columns], 1
    ).tolist()
    return sums


def _critic_metrics(meter: Meter, data: Experience) -> dict[str, float]:
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
