"""Rollout correction: importance weights and rejection, from policies a and b.

Policy b drew the tokens. Policy a is the trainer's: in decoupled mode the policy before the step,
in bypass mode the policy under training. Weights and masks are constants without a gradient.

rejection.py has the rules that leave out tokens and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.correction_plan import CorrectionOptions
from millrace.algorithms.ragged import result_dtype
from millrace.algorithms.rejection import Ratios, beyond, reject, share, spread

PREFIX = "rollout_corr/"
MAX_LOG_PPL = 100.0
"""Upper bound of a reported log-perplexity: perplexities are at most e^100."""


@dataclass(frozen=True, slots=True)
class Correction:
    """The result of `correct`."""

    weights: Tensor
    """[T] float, detached, 0 for tokens that are not kept. Weights multiply token losses."""
    keep: Tensor
    """[T] bool: included and not rejected."""
    metrics: dict[str, float]
    """Metrics by name, finite, and 0 where nothing is counted. docs/metrics.md lists them.

    Metrics of weights are over tokens or, with sequence weights, over sequences. (verl mixes both
    in sequence mode, and counts sequences without tokens.) They use the weights after step 2 of
    `correct`. Standard deviations are of a population. The metrics of `drift` are included.
    """


def correct(
    log_probs_a: Tensor,
    log_probs_b: Tensor,
    lengths: Tensor,
    options: CorrectionOptions,
    *,
    include: Tensor | None = None,
) -> Correction:
    """Compute the importance weights and the rejection of a batch.

    (arXiv 2505.24298, 2510.18855. Names and presets are verl's.) log_probs_a [T] are the trainer's,
    log_probs_b [T] the rollout's. lengths is [N]. include [T] bool marks the tokens that are
    trained. Other tokens are not kept, have weight 0, and enter no statistic, sum or mean. The
    computation is in float64. Weights are float64 if log_probs_a is, else float32.

    l = log_probs_a - log_probs_b. A token's ratio is e^clamp(l, +-20). A sequence's ratio is the
    product over its included tokens, e^clamp(sum l, +-20), or with rollout_is=geometric their
    geometric mean, e^clamp(mean l, +-20). Only the sum or the mean is clamped there.

    1. Rejection. A token is kept if the veto and every rule accept it. Each of them sees all
    included tokens, whatever the others decide. A ratio that is not finite (a log-prob of -inf or
    NaN) is rejected. Sequence weights, sequence rules and the veto then reject its whole sequence.
    A whole batch may be rejected.
    2. Weights. The ratio is truncated to its bounds, or set to 0 outside the band. A token outside
    the band has weight 0 but is still kept: it counts in means.
    3. Normalisation, after step 2. With token weights, the divisor is the mean over kept tokens.
    With sequence weights, it is the mean over sequences that keep a token, each counted once. The
    mean is over this batch, so pass the whole batch. A mean of 0 leaves the weights unchanged.

    All bounds are inclusive, with a slack of 1e-12 in log space. A ratio of exactly 0.5 or 5.0 in
    float64 is within 0.5 to 5. Log-probs in float32 have an error of about 1e-7 x |log p|, so a
    ratio that close to a bound may be on either side. T = 0 and N = 0 give empty tensors. Raises
    ValueError if shapes differ.
    """
    _check_shapes(log_probs_a, log_probs_b, lengths, include)
    ratios = Ratios.of(log_probs_a, log_probs_b, lengths, include)
    keep, metrics = reject(ratios, options)
    weights, of_weights = _weigh(ratios, keep, options)
    return Correction(
        weights=_spread_out(weights.to(result_dtype(log_probs_a)), include),
        keep=_spread_out(keep, include),
        metrics=_named(metrics | of_weights) | drift(log_probs_a, log_probs_b, lengths, include),
    )


def _weigh(
    ratios: Ratios, keep: Tensor, options: CorrectionOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each included token, [M] float64, and the metrics of weights."""
    if options.rollout_is is None:
        return keep.double(), {}
    by_token, by_mean = options.rollout_is == "token", options.rollout_is == "geometric"
    keeping = ratios.sums(keep.double())
    logs, units, kept = (
        (ratios.log, ratios.finite, keep)
        if by_token
        else (
            ratios.sequence_means() if by_mean else ratios.sequence_logs(),
            ratios.whole,
            keeping > 0,
        )
    )
    cut = _cut(logs, options)
    weights = torch.where(keep, cut if by_token else cut[ratios.ids], 0.0)
    low, high = _outside(logs[units], options)
    metrics = {f"rollout_is_{name}": value for name, value in spread(cut[kept]).items()} | {
        "rollout_is_eff_sample_size": effective_sample_size(cut[kept]),
        "rollout_is_ratio_fraction_high": share(high),
        "rollout_is_ratio_fraction_low": share(low),
    }
    if isinstance(options.rollout_is_threshold, tuple):
        metrics["rollout_is_oob_ratio"] = share(low | high)
    metrics |= _sequence_metrics(
        ratios, (ratios.sums(weights) / keeping)[keeping > 0], logs, options
    )
    if options.rollout_is_batch_normalize:
        mean = metrics["rollout_is_mean"]
        factor = torch.where(mean > 0, mean, 1.0)
        weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, factor
    return weights, metrics


def _cut(logs: Tensor, options: CorrectionOptions) -> Tensor:
    """Return the ratios, truncated, or set to 0 outside the band."""
    if not isinstance(options.rollout_is_threshold, tuple):
        return logs.exp().clamp(*options.band)
    low, high = beyond(logs, *options.band)
    return torch.where(low | high, 0.0, logs.exp())


def _outside(logs: Tensor, options: CorrectionOptions) -> tuple[Tensor, Tensor]:
    """Return masks of ratios below and above the bounds: the band, or 1/C and C.

    With a lower bound, that is the first of the two.
    """
    bounds = options.rollout_is_threshold
    if isinstance(bounds, tuple):
        return beyond(logs, *bounds)
    return beyond(logs, options.rollout_is_threshold_lower or 1 / bounds, bounds)


def _sequence_metrics(
    ratios: Ratios, means: Tensor, logs: Tensor, options: CorrectionOptions
) -> dict[str, Tensor]:
    """Return the metrics rollout_is_seq_*, with the mean weights of sequences that keep a token."""
    of_tokens = options.rollout_is == "token"
    raw = (ratios.sums(ratios.log.exp()) / ratios.counts).log() if of_tokens else logs
    low, high = _outside(raw[ratios.whole], options)
    deviation = (means - 1).abs()
    metrics = spread(means) | {
        "max_deviation": spread(deviation)["max"],
        "fraction_high": share(high),
        "fraction_low": share(low),
    }
    return {f"rollout_is_seq_{name}": value for name, value in metrics.items()}


def drift(
    log_probs_a: Tensor, log_probs_b: Tensor, lengths: Tensor, include: Tensor | None = None
) -> dict[str, float]:
    """Measure the distance of policy a from policy b, which drew the tokens.

    Arguments are as in `correct`. Metrics are named `rollout_corr/NAME`:

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
    finite = (log_probs_a.detach().double() - log_probs_b.detach().double()).isfinite()
    used = finite if include is None else finite & include
    ratios = Ratios.of(log_probs_a, log_probs_b, lengths, used)
    a, b = log_probs_a.detach()[used].double(), log_probs_b.detach()[used].double()
    log_ppl_a, log_ppl_b = ((-ratios.sums(x) / ratios.counts)[ratios.whole] for x in (a, b))
    difference = log_ppl_a - log_ppl_b
    over_sequences = spread(difference)
    return _named(
        {
            "kl": _mean(b - a),
            "k3_kl": _mean(ratios.log.expm1() - ratios.log),
            "chi2_token": _mean((2 * ratios.log).expm1()),
            "chi2_seq": _mean((2 * ratios.sequence_logs()[ratios.whole]).expm1()),
            "training_log_ppl": _mean(log_ppl_a),
            "rollout_log_ppl": _mean(log_ppl_b),
            "training_ppl": _mean(log_ppl_a.clamp(max=MAX_LOG_PPL).exp()),
            "rollout_ppl": _mean(log_ppl_b.clamp(max=MAX_LOG_PPL).exp()),
            "log_ppl_diff": over_sequences["mean"],
            "log_ppl_diff_max": over_sequences["max"],
            "log_ppl_diff_min": over_sequences["min"],
            "log_ppl_abs_diff": _mean(difference.abs()),
            "ppl_ratio": _mean(difference.clamp(-MAX_LOG_PPL, MAX_LOG_PPL).exp()),
        }
    )


def effective_sample_size(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) as a float64 scalar.

    It is 1/n if only one weight is not 0, and 1 if all weights are equal. With `mask` [T], only
    weights where the mask is not 0 count. The result is 0 without weights or if all are 0.
    """
    w = weights.detach().double()
    if mask is not None:
        w = w[mask != 0]
    squares = w.square().sum() * w.numel()
    return torch.where(
        squares > 0, w.sum().square() / squares.clamp(min=torch.finfo(torch.float64).tiny), 0.0
    )


def _check_shapes(
    log_probs_a: Tensor, log_probs_b: Tensor, lengths: Tensor, include: Tensor | None
) -> None:
    shapes = [tuple(x.shape) for x in (log_probs_b, include) if x is not None]
    if log_probs_a.ndim != 1 or any(shape != log_probs_a.shape for shape in shapes):
        raise ValueError(
            f"log-probs and include must all be [T], got {[tuple(log_probs_a.shape), *shapes]}"
        )
    if include is not None and include.dtype != torch.bool:
        raise ValueError(f"include must be bool, got {include.dtype}")
    if int(lengths.sum()) != len(log_probs_a):
        raise ValueError(
            f"lengths add up to {int(lengths.sum())}, but there are {len(log_probs_a)} log-probs"
        )


def _spread_out(values: Tensor, include: Tensor | None) -> Tensor:
    """Scatter the values of included tokens [M] to [T], with 0 elsewhere."""
    if include is None:
        return values
    return values.new_zeros(include.shape).masked_scatter_(include, values)


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)


def _named(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics as numbers, with one transfer from the device."""
    return {
        PREFIX + name: value
        for name, value in zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True)
    }
