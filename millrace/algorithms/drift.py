"""Metrics of the distance between the policy that drew the tokens and the trainer's."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.policy_loss import MAX_LOG_RATIO, log_ratio
from millrace.algorithms.ragged import sequence_sums

MAX_LOG_PPL = 100.0
"""Upper bound of a reported log-perplexity: perplexities are at most e^100."""


def drift(
    log_probs_a: Tensor,
    log_probs_b: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    include: Tensor | None = None,
) -> dict[str, float]:
    """Measure the distance of policy a from policy b, which drew the tokens.

    Arguments are those of `correct`. Metrics are named `rollout_corr/NAME`:

    kl                          mean over tokens of log b - log a: KL(b || a), the k1 estimate
    k3_kl                       mean over tokens of e^l - 1 - l, l clamped to +-20: the k3 estimate
    chi2_token, chi2_seq        mean of the squared ratio over tokens, over sequences; minus 1
    {training,rollout}_log_ppl  mean over sequences of -(mean over tokens of log a, of log b)
    {training,rollout}_ppl      mean over sequences of e^(log ppl) of a, of b, each at most e^100
    log_ppl_diff[_max,_min]     mean, maximum, minimum over sequences of log ppl of a - log ppl of b
    log_ppl_abs_diff            mean of the absolute differences
    ppl_ratio                   mean over sequences of e^difference, the exponent clamped to +-100

    Tokens with a ratio that is not finite are left out. So are sequences without tokens (verl
    counts them with perplexity 1). Values are float64 and finite, and 0 without tokens.
    """
    a, b = log_probs_a.detach().double(), log_probs_b.detach().double()
    used = (a - b).isfinite() if include is None else (a - b).isfinite() & include
    a, b, ids = a[used], b[used], sequence_ids[used]
    raw = a - b
    log = log_ratio(a, b)
    counts, sum_a, sum_b, sum_raw = (
        sequence_sums(x, ids, num_sequences) for x in (torch.ones_like(raw), a, b, raw)
    )
    whole = counts > 0
    log_ppl_a, log_ppl_b = ((-x / counts)[whole] for x in (sum_a, sum_b))
    gap = log_ppl_a - log_ppl_b
    product = sum_raw[whole].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    over_tokens = {
        "kl": b - a,
        "k3_kl": log.expm1() - log,
        "chi2_token": (2 * log).expm1(),
    }
    over_sequences = {
        "chi2_seq": (2 * product).expm1(),
        "training_log_ppl": log_ppl_a,
        "rollout_log_ppl": log_ppl_b,
        "training_ppl": log_ppl_a.clamp(max=MAX_LOG_PPL).exp(),
        "rollout_ppl": log_ppl_b.clamp(max=MAX_LOG_PPL).exp(),
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.clamp(-MAX_LOG_PPL, MAX_LOG_PPL).exp(),
    }
    named = {
        name: x.sum() / max(len(x), 1) for name, x in (over_tokens | over_sequences).items()
    } | {
        "log_ppl_diff_max": gap.max() if len(gap) else gap.sum(),
        "log_ppl_diff_min": gap.min() if len(gap) else gap.sum(),
    }
    values = torch.stack(list(named.values())).tolist()
    return {f"rollout_corr/{name}": value for name, value in zip(named, values, strict=True)}


def by_age(
    log_probs_a: Tensor, log_probs_b: Tensor, ages: Tensor, max_age: int
) -> dict[str, float]:
    """Return metrics of the tokens of each age: 0 to max_age - 1, and `{max_age}+` for the rest.

    log_probs_a [T]  the trainer's log-probs
    log_probs_b [T]  the rollout's log-probs
    ages [T]         integers, at least 0: versions between the token's own and the live one

    With l = log_probs_a - log_probs_b, clamped to +-20, and w = e^l:

    staleness/token_share/AGE  share of all tokens that have this age
    staleness/log_ratio/AGE    mean of l
    staleness/ess/AGE          (sum w)^2 / (n sum w^2): effective share of the n tokens
    staleness/token_mean       mean age of the tokens
    staleness/token_max        largest age of the tokens

    The effective share is 1 if all ratios are equal. The name of the last bin does not depend on
    the ages, so a run has one curve for it. An age without tokens has only a share, which is 0.
    No tokens at all give a mean and a max of 0. A token whose log-ratio is not finite counts only
    in the share. If an age has only such tokens, its log_ratio and ess are 0. Computed in float64.

    Raises ValueError if shapes differ, or if max_age or an age is under 0.
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
    """Return for each bin: tokens, tokens with a finite log-ratio, and sums of l, w and w^2."""
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
