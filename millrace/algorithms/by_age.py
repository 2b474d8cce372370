"""Distance between the policy and the one that drew the tokens, by the age of the token."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.losses import log_ratio
from millrace.algorithms.ragged import sequence_sums


def by_age(
    log_probs_a: Tensor, log_probs_b: Tensor, ages: Tensor, max_age: int
) -> dict[str, float]:
    """Return metrics of the tokens of each age.

    The ages are 0 to max_age - 1, and `{max_age}+` for max_age and above. log_probs_a [T] are the
    trainer's, log_probs_b [T] the rollout's. ages [T] are integers of at least 0: the versions
    between the one that drew the token and the live one. With l = log_probs_a - log_probs_b,
    clamped to +-20, and w = e^l:

    staleness/token_share/AGE  share of all tokens that have this age
    staleness/log_ratio/AGE    mean of l
    staleness/ess/AGE          (sum w)^2 / (n sum w^2): the effective share of n tokens, 1 if all
                               ratios are equal
    staleness/token_mean       mean age of the tokens
    staleness/token_max        largest age of the tokens

    The name of the last bin does not depend on the ages that occur. It is therefore one curve of a
    run. An age that does not occur has a share of 0 and no other metric. Without tokens, the mean
    and the max are 0. A token whose log-ratio is not finite counts only in the share. An age with
    no other tokens has a mean of 0 and an effective sample size of 0. Everything is computed in
    float64.

    Raises ValueError if shapes differ, or if max_age or an age is below 0.
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
    """Return for each bin: all tokens, the finite log-ratios, and sums of l, w and w^2."""
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
