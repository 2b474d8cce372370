"""The sums of a batch's optimizer steps, and the metrics computed from them.

The docstring of each function documents the metrics that it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from millrace.algorithms.correction import correct
from millrace.algorithms.correction_plan import CorrectionStage
from millrace.algorithms.drift import by_age, drift
from millrace.algorithms.kl import k3
from millrace.algorithms.proximal import ESTIMATES
from millrace.observe.metrics import GAP, GAP_TOKENS, joined
from millrace.train.experience import Experience
from millrace.train.options import StepOptions
from millrace.train.packing import MicroBatch

MAX_AGE_BINS = 8
"""Number of ages with metrics of their own. Older tokens share the last bin."""


class Meter:
    """The sums of one model's optimizer steps on a batch.

    Sums stay tensors until the end of a step, so the host waits for a GPU once in each step.
    `names` are the sums that each micro-batch reports, in order. The first one is the loss.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.sums = dict.fromkeys(names, 0.0)
        """Global sums of all finite steps."""
        self.finite = 0
        self.nonfinite = 0
        """Optimizer steps skipped because the loss or the gradient was not finite."""
        self.empty = 0
        """Optimizer steps skipped because there was no token to train."""
        self._norm = self._lr = 0.0
        self._pending: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._step_seen: list[tuple[Tensor, Tensor]] = []
        self._cells = self._padded_cells = 0

    @property
    def steps(self) -> int:
        return self.finite + self.nonfinite + self.empty

    def add(self, sums: Tensor, output: Tensor, micro: MicroBatch) -> None:
        """Add one micro-batch of this rank: its sums [S] and the module's first output [M]."""
        self._pending.append(sums)
        self._step_seen.append((micro.source, output))
        self._cells += micro.layout.num_cells
        self._padded_cells += micro.layout.num_padded_cells

    def take(self) -> Tensor:
        """Return this rank's sums [S] float64 of the step so far, and reset them."""
        if not self._pending:  # another rank counts the tokens of this one
            return torch.zeros(len(self.sums), dtype=torch.float64)
        sums = torch.stack(self._pending).sum(0)
        self._pending = []
        return sums

    def finish(self, sums: list[float], norm: float, lr: float, *, first_pass: bool) -> None:
        """Record an optimizer step that was taken, with its global sums."""
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
        """Return this rank's outputs and cells, [2, K + 2] float64, to be summed over ranks.

        Row 0: the module's output for each token in the finite steps of the first pass.
        Row 1: 1 for each token of those steps, else 0.
        The last two columns of row 0 are `cells`.
        """
        flat = torch.zeros(2, num_tokens + 2, dtype=torch.float64)
        for source, output in self._seen:
            flat[0, source], flat[1, source] = output.double().cpu(), 1.0
        flat[0, -2:] = self.cells()
        return flat

    def cells(self) -> Tensor:
        """Return [cells, padded cells] of this rank's attention batches, float64."""
        return torch.tensor([self._cells, self._padded_cells], dtype=torch.float64)

    def step_means(self, prefix: str) -> dict[str, float]:
        """Return the means of gradient norm and learning rate over the finite steps."""
        n = max(self.finite, 1)
        return {f"{prefix}grad_norm": self._norm / n, f"{prefix}lr": self._lr / n}


def left_out(unfiltered: Tensor, kept: int) -> dict[str, float]:
    """Return how many of a batch's response tokens the first pass did not train.

    `unfiltered` is BatchArrays.unfiltered. The first pass trained `kept` tokens.

    train/rejected_tokens  a correction rejected them
    train/filtered_tokens  overlong_filtering left them out
    """
    rest = int(unfiltered.sum())
    return {
        "train/rejected_tokens": float(rest - kept),
        "train/filtered_tokens": float(len(unfiltered) - rest),
    }


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
    sum_ranks     adds up a float64 tensor over all ranks; the result may be on another device

    algorithm.use_kl_in_reward adds:
    actor/reward_kl_penalty        mean KL in the rewards of this batch, before its coefficient
    actor/reward_kl_penalty_coeff  the coefficient of this batch
    """
    output = sum_ranks(policy.outputs(len(data.rollout))).cpu()
    own = _policy_metrics(policy, data, corrections, options)
    if critic is not None:
        own |= _critic_metrics(critic, data)
    # The metrics of a correction in `own` replace those of the same name in `drift`.
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
    """Return the metrics of all optimizer steps of the batch together.

    Means over tokens are over trained tokens. Without a finite step, there are no actor/* metrics.

    actor/pg_loss               policy loss without KL and entropy bonus; mean over steps
    actor/kl_loss               aggregated KL to the reference, with use_kl_loss; mean over steps
    actor/distillation_loss     divergence from the teachers, before its coefficient; mean over steps
    actor/entropy               entropy of the policy at the sampling temperature, nats
    actor/pg_clipfrac           share of tokens whose loss a bound of the loss mode changed
    actor/pg_clipfrac_lower     share of tokens whose loss the bound on large ratios changed
    actor/ppo_kl                old log-prob - current log-prob
    actor/grad_norm             2-norm of the gradient before clipping; mean over optimizer steps
    actor/lr                    learning rate; mean over optimizer steps
    train/zero_advantage_share  share of samples whose rewards are all equal
    train/trained_token_share   share of the batch's tokens trained in a pass
    rollout_corr/...            metrics of `correct` for the batch, or `joined` over mini-batches
    rollout_corr/off_policy_masked_fraction
                                share of tokens that `off_policy_mask` takes out of the policy loss

    actor/kl_loss is before its coefficient. The bound on large ratios is the dual clip, or the cap
    of dppo. train/trained_token_share is 1 unless some tokens are rejected or filtered, or an
    optimizer step is skipped.
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
        if options.actor.use_kl_loss:
            metrics["actor/kl_loss"] = meter.sums["kl_loss"] / steps
        if data.taught is not None:
            metrics |= data.taught.metrics
            metrics["actor/distillation_loss"] = meter.sums["distillation_loss"] / steps
        if options.correction.off_policy_mask_threshold is not None:
            masked = meter.sums["off_policy_masked"] / n
            metrics["rollout_corr/off_policy_masked_fraction"] = masked
    parts = [part for part in (data.metrics, *corrections) if part]
    for name in parts[0] if parts else ():
        metrics[name] = joined(name, [(part[name], 1.0) for part in parts])
    return metrics


def _sampler_metrics(
    output: Tensor, data: Experience, options: StepOptions, *, same_weights: Tensor | None
) -> dict[str, float]:
    """Return the distance of the policy under training from the policy that drew the tokens.

    The metrics are of the first pass over the batch. If that pass has no finite step, only
    train/pad_share exists. `output` is Meter.outputs, summed over ranks. `same_weights` is the
    argument of `batch_metrics`.

    actor/kl_to_sampler               KL(sampler || policy) by k1
    actor/k3_to_sampler               the same by k3
    actor/rollout_probs_diff_mean     mean of |p_rollout - p_current|
    actor/rollout_probs_diff_max      its maximum
    actor/log_prob_gap_same_version   mean gap between the two engines on the same weights
    actor/log_prob_gap_tokens         the number of tokens of that mean
    train/pad_share                   share of padding in the attention's batches
    staleness/...                     metrics of `by_age`
    rollout_corr/...                  metrics of `drift`; of `correct` for CorrectionStage.PASSING

    A token whose ratio is not finite counts only in staleness/token_*. k1 is the mean of
    rollout log-prob - current log-prob. k3 is never negative and has less noise.
    log_prob_gap_same_version is the mean of |rollout log-prob - current log-prob|. It covers the
    tokens that the live version drew before any step, on KV of its own alone. With R3, it covers
    those of trajectories that no older version began. Without such tokens it is missing. One
    log-prob that is not finite makes it infinite.
    """
    at = (output[1, :-2] > 0) & data.include
    current, rollout = output[0, :-2], data.rollout
    metrics = {"train/pad_share": pad_share(output[0, -2:])}
    if not bool(at.any()):
        return metrics
    plan, policies = options.correction, (current, rollout, data.ids, len(data.lengths))
    if plan.place is CorrectionStage.PASSING:
        if plan.proximal in ESTIMATES:
            estimate = ESTIMATES[plan.proximal](rollout, current, data.ages)
            policies = (estimate, *policies[1:])
        metrics |= correct(*policies, plan.options, include=at).metrics
    if plan.active and data.correction is None:
        metrics |= drift(*policies, at)
    bins = max(1, min(options.lag_bound, MAX_AGE_BINS))
    metrics |= by_age(current[at], rollout[at], data.ages[at], bins)
    if same_weights is not None:
        own = at & same_weights & (data.ages == 0)
        if data.rows.old_kv is not None:
            own &= ~torch.from_numpy(data.rows.old_kv)
        if options.router_replay == "R3":
            # After an interruption, the engine reads the response so far with other experts. The
            # replay has the experts of the versions that drew it.
            older = torch.bincount(data.ids[data.ages > 0], minlength=len(data.lengths)) > 0
            own &= ~older[data.ids]
        # Two engines that agree have no token that is possible in one of them alone.
        gap = (rollout - current)[own].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        metrics |= {GAP: gap.mean().item(), GAP_TOKENS: float(len(gap))} if len(gap) else {}
    at &= (rollout - current).isfinite()
    if not bool(at.any()):
        return metrics
    delta, diff = (rollout - current)[at], (rollout.exp() - current.exp())[at].abs()
    metrics |= {
        "actor/kl_to_sampler": delta.mean().item(),
        "actor/k3_to_sampler": k3(rollout[at], current[at]).mean().item(),
        "actor/rollout_probs_diff_mean": diff.mean().item(),
        "actor/rollout_probs_diff_max": diff.max().item(),
    }
    return metrics


def _critic_metrics(meter: Meter, data: Experience) -> dict[str, float]:
    """Return the metrics of the critic, with adv_estimator=gae.

    critic/vf_loss             aggregated value loss; mean over optimizer steps
    critic/vf_clipfrac         share of tokens whose value loss is the clipped one
    critic/explained_variance  1 - Var(return - value) / Var(return), before the batch's steps
    critic/values              mean value, before the batch's steps
    critic/returns             mean return
    critic/grad_norm           as actor/grad_norm
    critic/lr                  as actor/lr

    A perfect critic has an explained variance of 1.
    """
    values, returns = data.values, data.returns
    if data.responses is not None:
        values, returns = data.responses.values, data.responses.returns
    assert values is not None and returns is not None
    error = returns - values
    spread = returns.var(correction=0).item() if len(returns) else 0.0
    return {
        "critic/vf_loss": meter.sums["loss"] / max(meter.finite, 1),
        "critic/vf_clipfrac": meter.sums["clipped"] / max(meter.sums["tokens"], 1.0),
        "critic/explained_variance": 1 - error.var(correction=0).item() / spread if spread else 0.0,
        "critic/values": values.mean().item() if len(returns) else 0.0,
        "critic/returns": returns.mean().item() if len(returns) else 0.0,
        **meter.step_means("critic/"),
    }


def pad_share(cells: Tensor) -> float:
    """Return the share of padding, from [cells, padded cells]."""
    own, padded = cells.tolist()
    return (padded - own) / max(padded, 1.0)
