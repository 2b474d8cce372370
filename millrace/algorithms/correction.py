"""Rollout correction: weights and rejection between the rollout's policy (b) and the trainer's (a).

Decoupled: a is the trainer's policy before the step. Bypass: a is the policy under training.
Weights multiply token losses. Weights and `keep` are constants, without a gradient.

Rejection leaves out the tokens and whole sequences whose policies are too far apart. All of it
looks at l = log pi_a - log pi_b, in float64. A token's l is clamped to +-20. For k1, so is the sum
or mean of a sequence's l, which is taken of unclamped tokens. A bound beyond e^20 or under e^-20
never acts. A rule sees every included token, whatever other rules say of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.correction_plan import CorrectionOptions
from millrace.algorithms.losses import MAX_LOG_RATIO
from millrace.algorithms.ragged import sequence_ids, sequence_sums
from millrace.algorithms.rules import RejectionRule

PREFIX = "rollout_corr/"
MAX_LOG_PPL = 100.0
"""Perplexities are reported up to e^100."""
EDGE = 1e-12
"""Slack of every bound: rounding in float64 does not put a value at a bound outside of it."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """The log-ratios of the included tokens, M of T."""

    raw: Tensor
    """l [M] float64; 0 where it is not finite."""
    log: Tensor
    """The same, clamped to +-20."""
    finite: Tensor
    """[M] bool."""
    ids: Tensor
    """Sequence of each token, [M] int64."""
    counts: Tensor
    """Included tokens of each sequence, [N] float64."""
    whole: Tensor
    """Sequences that have an included token, and only finite ones, [N] bool."""

    @classmethod
    def of(
        cls, log_probs_a: Tensor, log_probs_b: Tensor, lengths: Tensor, include: Tensor | None
    ) -> Ratios:
        """From log-probs [T], lengths [N] and include [T] bool."""
        ids = sequence_ids(lengths)
        delta = log_probs_a.detach().double() - log_probs_b.detach().double()
        if include is not None:
            ids, delta = ids[include], delta[include]
        finite = delta.isfinite()
        num_finite = sequence_sums(finite.double(), ids, len(lengths))
        counts = sequence_sums(torch.ones_like(delta), ids, len(lengths))
        raw = torch.where(finite, delta, 0.0)
        log = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(raw, log, finite, ids, counts, (counts > 0) & (num_finite == counts))

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the tokens of each sequence, [N], of values [M]."""
        return sequence_sums(values, self.ids, len(self.counts))

    def sequence_logs(self) -> Tensor:
        """Return the log of the product of each sequence's ratios, clamped to +-20, [N] float64."""
        return self.sums(self.raw).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_means(self) -> Tensor:
        """Return the log of the geometric mean of each sequence's ratios, clamped to +-20, [N] float64."""
        means = self.sums(self.raw) / self.counts.clamp(min=1)
        return means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class Correction:
    """The result of `correct`."""

    weights: Tensor
    """[T] float, detached: multiply token losses; 0 for tokens that are not kept."""
    keep: Tensor
    """[T] bool: included and not rejected."""
    metrics: dict[str, float]
    """By name, `rollout_corr/...`."""


def correct(
    log_probs_a: Tensor,
    log_probs_b: Tensor,
    lengths: Tensor,
    options: CorrectionOptions,
    *,
    include: Tensor | None = None,
) -> Correction:
    """Importance weights and rejection of a batch (arXiv 2505.24298, 2510.18855; names and presets are verl's).

    log_probs_a, log_probs_b [T]: the trainer's and the rollout's. lengths [N]. include [T] bool: tokens that are trained at all; the
    others are not kept, have weight 0 and are in no statistic, sum or mean. Weights are float64 where log_probs_a is, else
    float32; everything is computed in float64.

    l = log_probs_a - log_probs_b. A token's ratio is e^clamp(l, +-20). A sequence's ratio is the product of those of its included
    tokens, e^clamp(sum l, +-20): the clamp is of the sum alone.

    1. Rejection: a token is kept if the veto and every rule accept it; each looks at all included tokens. A
       ratio that is not finite (a log-prob of -inf or NaN) is rejected, and with it its sequence where sequences are looked
       at: by sequence weights, sequence rules and the veto. Rejecting every token is a valid result: weights of 0.
    2. Weights: r truncated or cut by the band. Outside the band a weight is 0 but the token is still kept: it counts in means.
    3. Normalisation, after that: divide by the mean over kept tokens (token weights) or over sequences that keep a token
       (sequence weights, each sequence once) of this batch: give it whole. A mean of 0 leaves the weights as they are.

    All bounds are inclusive, with a slack of 1e-12 in log space: a ratio of exactly 0.5 or 5.0 in float64 is within 0.5 to 5.
    Log-probs of float32 have lost about 1e-7 x |log p| before they get here, so there a ratio that close to a bound may fall
    on either side of it.

    Metrics `rollout_corr/NAME`, all finite, 0 where there is nothing to count. A unit is a token or, with sequence weights, a
    sequence (verl mixes the two in sequence mode, and counts sequences without tokens). Stds are those of a population.
    rollout_is_{mean,max,min,std}        of the kept units' weights after step 2
    rollout_is_eff_sample_size           their `effective_sample_size`
    rollout_is_ratio_fraction_{high,low} share of all units with a ratio over C, under 1/C; or over hi, under lo of the band
    rollout_is_oob_ratio                 band alone: share of all units outside
    rollout_is_batch_norm_factor         with normalisation: the divisor
    rollout_is_seq_{mean,max,min,std}    of the sequences' mean weights over kept tokens; max_deviation is the largest |. - 1|
    rollout_is_seq_fraction_{high,low}   share of sequences whose mean ratio is over or under the bounds above
    rollout_rs_RULE_*                    see `accept`
    rollout_rs_X_masked_fraction         share of tokens that X rejects: X a rule, token_age, token_veto, or nonfinite
    rollout_rs_X_seq_masked_fraction     share of sequences with such a token
    rollout_rs_[seq_]masked_fraction     the same of all that is rejected
    and those of `drift`.

    T = 0 and N = 0 give empty tensors. Raises ValueError if shapes differ.
    """
    _check_shapes(log_probs_a, log_probs_b, lengths, include)
    ratios = Ratios.of(log_probs_a, log_probs_b, lengths, include)
    keep, metrics = _reject(ratios, options)
    weights, of_weights = _weigh(ratios, keep, options)
    dtype = torch.float64 if log_probs_a.dtype == torch.float64 else torch.float32
    return Correction(
        weights=_spread_out(weights.to(dtype), include),
        keep=_spread_out(keep, include),
        metrics=_named(metrics | of_weights) | drift(log_probs_a, log_probs_b, lengths, include),
    )


def _reject(ratios: Ratios, options: CorrectionOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Which included tokens are kept, [M] bool, and the metrics of rejection."""
    metrics: dict[str, Tensor] = {}
    verdicts = {
        "nonfinite": ratios.whole[ratios.ids] if options.rollout_is == "sequence" else ratios.finite
    }
    if options.rollout_token_veto_threshold is not None:
        verdicts["token_veto"] = accept_without_veto(options.rollout_token_veto_threshold, ratios)
    for rule in options.rollout_rs:
        verdicts[rule.name], statistics = accept(rule, ratios)
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in statistics.items()}
    keep = torch.ones_like(ratios.finite)
    for name, verdict in verdicts.items():
        keep &= verdict
        metrics |= {
            f"rollout_rs_{name}_{what}": value for what, value in rejected(verdict, ratios).items()
        }
    return keep, metrics | {
        f"rollout_rs_{what}": value for what, value in rejected(keep, ratios).items()
    }


def accept(rule: RejectionRule, ratios: Ratios) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens [M] bool that the rule accepts, and `{mean,max,min,std,fraction_high,fraction_low}` of its statistic.

    Metrics are scalars over tokens or over sequences, as the rule has it, with finite ratios; for k1 they are of the ratio.
    fraction_high and fraction_low are the shares above and below the bounds. All are 0 where there is nothing to count.
    """
    statistic, valid = _statistic(rule, ratios)
    high = statistic > rule.upper * (1 + EDGE)
    low = torch.zeros_like(high)
    if rule.in_ratio_space:
        low, high = beyond(statistic, rule.lower, rule.upper)
    accepted = valid & ~low & ~high
    shown = statistic.exp() if rule.in_ratio_space else statistic
    metrics = spread(shown[valid]) | {
        "fraction_high": share(high[valid]),
        "fraction_low": share(low[valid]),
    }
    return (accepted if rule.name.startswith("token") else accepted[ratios.ids]), metrics


def accept_without_veto(threshold: float, ratios: Ratios) -> Tensor:
    """Tokens [M] bool of the sequences in which every ratio is finite and at least `threshold`."""
    vetoed = ratios.sums(beyond(ratios.log, threshold, math.inf)[0].double()) > 0
    return (ratios.whole & ~vetoed)[ratios.ids]


def beyond(log_ratios: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Whether each ratio is below `lower`, and above `upper`: compared as logs, with the slack EDGE; no lower bound is 0."""
    return log_ratios < _log(lower or 0.0) - EDGE, log_ratios > _log(upper) + EDGE


def _statistic(rule: RejectionRule, ratios: Ratios) -> tuple[Tensor, Tensor]:
    """The rule's statistic, as a log for k1, and where it is defined: [M] or [N]."""
    log = ratios.log
    level, kind = rule.name[:-3], rule.name[-2:]
    # expm1 keeps the digits that e^l - 1 loses where the two policies nearly agree.
    tokens = log if kind == "k1" else log.square() / 2 if kind == "k2" else log.expm1() - log
    if level == "token":
        return tokens, ratios.finite
    if level == "seq_max":
        largest = tokens.new_zeros(len(ratios.counts)).scatter_reduce_(
            0, ratios.ids, tokens, "amax"
        )
        return largest, ratios.whole
    if rule.name == "seq_sum_k1":
        return ratios.sequence_logs(), ratios.whole
    if rule.name == "seq_mean_k1":
        return ratios.sequence_means(), ratios.whole
    sums = ratios.sums(tokens)
    return (sums if level == "seq_sum" else sums / ratios.counts.clamp(min=1)), ratios.whole


def rejected(keep: Tensor, ratios: Ratios) -> dict[str, Tensor]:
    """masked_fraction: share of the included tokens not in keep [M]; seq_masked_fraction: of the sequences that lose one."""
    lost = ratios.sums((~keep).double()) > 0
    return {"masked_fraction": share(~keep), "seq_masked_fraction": share(lost[ratios.counts > 0])}


def spread(values: Tensor) -> dict[str, Tensor]:
    """Mean, max, min and population standard deviation of a float64 tensor; 0 where it is empty."""
    if not len(values):
        return dict.fromkeys(("mean", "max", "min", "std"), values.new_zeros(()))
    return {
        "mean": values.mean(),
        "max": values.max(),
        "min": values.min(),
        "std": values.std(correction=0),
    }


def share(flags: Tensor) -> Tensor:
    """Share of bools that are true, float64; 0 where there are none."""
    return flags.double().sum() / max(len(flags), 1)


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _weigh(
    ratios: Ratios, keep: Tensor, options: CorrectionOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight of each included token, [M] float64, and the metrics of weights."""
    if options.rollout_is is None:
        return keep.double(), {}
    by_token = options.rollout_is == "token"
    keeping = ratios.sums(keep.double())
    logs, units, kept = (
        (ratios.log, ratios.finite, keep)
        if by_token
        else (ratios.sequence_logs(), ratios.whole, keeping > 0)
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
    """Ratios, truncated or 0 outside the band."""
    if not isinstance(options.rollout_is_threshold, tuple):
        return logs.exp().clamp(max=options.rollout_is_threshold)
    low, high = beyond(logs, *options.band)
    return torch.where(low | high, 0.0, logs.exp())


def _outside(logs: Tensor, options: CorrectionOptions) -> tuple[Tensor, Tensor]:
    """Ratios below and above the bounds that metrics speak of: the band, or 1/C and C."""
    bounds = options.rollout_is_threshold
    return beyond(logs, *(bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)))


def _sequence_metrics(
    ratios: Ratios, means: Tensor, logs: Tensor, options: CorrectionOptions
) -> dict[str, Tensor]:
    """rollout_is_seq_*; `means` are the mean weights of the sequences that keep a token."""
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
    """How far policy a has moved from the policy b that drew the tokens, as `rollout_corr/NAME`; arguments as in `correct`.

    kl                         mean over tokens of log b - log a: KL(b || a), the k1 estimate
    k3_kl                      mean over tokens of e^l - 1 - l, l clamped to +-20: the k3 estimate
    chi2_token, chi2_seq       mean of r^2 over tokens, and of the squared ratio over sequences; minus 1
    training_log_ppl           mean over sequences of -(mean over tokens of log a); rollout_log_ppl: of log b
    training_ppl, rollout_ppl  mean over sequences of the perplexity e^(log ppl), at most e^100
    log_ppl_diff               mean over sequences of log ppl of a - log ppl of b; log_ppl_abs_diff, log_ppl_diff_max, _min
    ppl_ratio                  mean over sequences of e^(that difference), the exponent within +-100

    Tokens whose ratio is not finite are left out, and so are sequences without tokens (verl counts those as perplexity 1).
    Computed in float64, always finite; no tokens give 0 for all.
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
    """(sum w)^2 / (n sum w^2): a share from 1/n (one weight has all) to 1 (all equal), scalar in float64.

    `mask` [T]: only weights where it is not 0 count. No weights, or all of them 0, give 0.
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
    """Values of included tokens [M] back to [T], 0 elsewhere."""
    if include is None:
        return values
    return values.new_zeros(include.shape).masked_scatter_(include, values)


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)


def _named(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Numbers, in one transfer from the device."""
    return {
        PREFIX + name: value
        for name, value in zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True)
    }
