"""The loss of one micro-batch of a policy, and the sums from which a step's metrics are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.aggregate import token_weights
from millrace.algorithms.kl import k3
from millrace.algorithms.losses import ppo_clip
from millrace.config import ActorConfig, Config
from millrace.engines.packing import MicroBatch, Rows

SUMS = ("loss", "tokens", "entropy", "clipped", "clipped_lower", "log_ratio", "to_sampler", "k3", "probs_diff")
"""What a micro-batch adds up, in this order: the global loss's share, and sums over its trained tokens."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one global mini-batch: the denominators of its loss, the same on every rank."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Trajectories, those without a trained token included."""


@dataclass(frozen=True, slots=True)
class PolicyData:
    """What the loss needs beside the model's output, for all rows of a batch, on the host."""

    rows: Rows
    advantages: Tensor
    """[N] float32."""
    rollout_log_probs: Tensor
    """[T] float32."""
    old_log_probs: Tensor | None
    """[T] float32; None takes those of the very pass that is trained: right for the only step on a batch."""
    sequence_lengths: Tensor
    """[N] trained tokens of each row."""


def policy_loss(
    log_probs: Tensor, entropy: Tensor, micro: MicroBatch, data: PolicyData, totals: Totals, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """This micro-batch's share of the mini-batch's loss; its SUMS [9] float64; its largest |p_rollout - p_current|.

    log_probs and entropy [M] of the micro-batch's trained tokens. Loss = aggregated PPO-clip - entropy_coeff * aggregated
    entropy. The last two results are detached.
    """
    actor = config.actor
    rollout, old, advantages, weights = _host_inputs(micro, data, totals, config).to(log_probs)
    if data.old_log_probs is None:
        old = log_probs.detach()
    losses, stats = ppo_clip(
        log_probs,
        old,
        advantages,
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
    )
    pg_loss = (losses * weights).sum()
    loss = pg_loss
    if actor.entropy_coeff:
        loss = loss - actor.entropy_coeff * (entropy * weights).sum()
    with torch.no_grad():
        diff = (rollout.exp() - log_probs.exp()).abs()
        per_token = (
            entropy,
            stats["clipped"],
            stats["clipped_lower"],
            stats["log_ratio"],
            rollout - log_probs,
            k3(rollout, log_probs),
            diff,
        )
        head = torch.stack([pg_loss.detach().double(), pg_loss.new_tensor(len(losses), dtype=torch.float64)])
        sums = torch.cat([head, torch.stack(per_token).sum(-1, dtype=torch.float64)])
        largest = diff.max() if len(diff) else diff.new_zeros(())
    return loss, sums, largest


def _host_inputs(micro: MicroBatch, data: PolicyData, totals: Totals, config: Config) -> Tensor:
    """[4, M]: rollout log-probs, old log-probs, advantages, weights in the aggregate. One array, so one copy to the device."""
    actor = config.actor
    rollout = data.rollout_log_probs[micro.source]
    old = rollout if data.old_log_probs is None else data.old_log_probs[micro.source]
    weights = token_weights(
        actor.loss_agg_mode,
        sequence_ids=micro.rows,
        sequence_lengths=data.sequence_lengths,
        total_tokens=totals.tokens,
        total_sequences=totals.sequences,
        scale=loss_scale(actor, config.rollout.max_response_length),
    )
    # float64 keeps the weights' digits for float64 models; it is a few bytes a token.
    return torch.stack([rollout.double(), old.double(), data.advantages[micro.rows].double(), weights.double()])


def loss_scale(actor: ActorConfig, max_response_length: int) -> float:
    """Divisor of seq-mean-token-sum-norm: Dr.GRPO's constant length."""
    return actor.loss_scale_factor or float(max_response_length)


def token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over trained tokens, of all optimizer steps of a batch together.

    actor/entropy                  entropy of the policy at the sampling temperature, nats
    actor/pg_clipfrac              share of tokens whose loss PPO's clip changed
    actor/pg_clipfrac_lower        share whose loss the dual clip bounded
    actor/ppo_kl                   old log-prob - current log-prob
    """
    n = max(sums["tokens"], 1.0)
    return {
        "actor/entropy": sums["entropy"] / n,
        "actor/pg_clipfrac": sums["clipped"] / n,
        "actor/pg_clipfrac_lower": sums["clipped_lower"] / n,
        "actor/ppo_kl": -sums["log_ratio"] / n,
    }


def sampler_metrics(sums: Mapping[str, float], largest: float) -> dict[str, float]:
    """How far the policy under training is from the one that drew the tokens; from the first pass over the batch.

    actor/kl_to_sampler            mean of rollout log-prob - current log-prob: KL(sampler || policy), k1
    actor/k3_to_sampler            the same by k3: never negative, less noise
    actor/rollout_probs_diff_mean  mean of |p_rollout - p_current|
    actor/rollout_probs_diff_max   its maximum
    """
    n = max(sums["tokens"], 1.0)
    return {
        "actor/kl_to_sampler": sums["to_sampler"] / n,
        "actor/k3_to_sampler": sums["k3"] / n,
        "actor/rollout_probs_diff_mean": sums["probs_diff"] / n,
        "actor/rollout_probs_diff_max": largest,
    }
