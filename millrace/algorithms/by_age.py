"""Metrics of tokens by their age."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.ragged import sequence_sums
from millrace.algorithms.ratio import log_ratio


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
