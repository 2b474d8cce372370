"""Rollout correction: the ratios of two policies, then rejection, then importance weights.

Policy b drew the tokens. Policy a is the trainer's: in decoupled mode the policy before the step,
in bypass mode the policy under training. Weights and masks are constants without a gradient.

Rules use l = log pi_a - log pi_b in float64, clamped to +-20. For k1, the sum or mean over a
sequence is taken from unclamped tokens and then clamped. A bound above e^20 or below e^-20 has no
effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.correction_plan import CorrectionOptions, RejectionRule
from millrace.algorithms.policy_loss import MAX_LOG_RATIO

EDGE = 1e-12
"""Slack of every bound: a value on a bound stays inside, in spite of rounding in float64."""


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
    `correct`. Standard deviations are of a population.
    """


def correct(
    log_probs_a: Tensor,
    log_probs_b: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    options: CorrectionOptions,
    *,
    include: Tensor | None = None,
) -> Correction:
    """Compute the importance weights and the rejection of a batch.

    (arXiv 2505.24298, 2510.18855. Names and presets are verl's.) log_probs_a [T] are the trainer's,
    log_probs_b [T] the rollout's. sequence_ids [T] int64 are the sequences of the tokens, below
    num_sequences. include [T] bool marks the tokens that are trained; None marks all. Other tokens
    are not kept, have weight 0, and enter no statistic, sum or mean. The computation is in float64.
    Weights are float64 if log_probs_a is, else float32.

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
    ratio that close to a bound may be on either side. T = 0 gives empty tensors. Raises
    ValueError if shapes differ.
    """
    _check_shapes(log_probs_a, log_probs_b, sequence_ids, include)
    ratios = Ratios.of(log_probs_a, log_probs_b, sequence_ids, num_sequences, include)
    keep, metrics = reject(ratios, options)
    weights, of_weights = weigh(ratios, keep, options)
    weights = weights.to(torch.float64 if log_probs_a.dtype == torch.float64 else torch.float32)
    named = metrics | of_weights
    values = torch.stack(list(named.values())).tolist()  # one transfer from the device
    return Correction(
        weights=_spread_out(weights, include),
        keep=_spread_out(keep, include),
        metrics={f"rollout_corr/{name}": v for name, v in zip(named, values, strict=True)},
    )


@dataclass(frozen=True, slots=True)
class Ratios:
    """The log-ratios of the included tokens, M of T."""

    raw: Tensor
    """l [M] float64, 0 where it is not finite."""
    log: Tensor
    """`raw` clamped to +-20."""
    finite: Tensor
    """[M] bool: whether l is finite."""
    ids: Tensor
    """Sequence of each token, [M] int64."""
    counts: Tensor
    """Included tokens of each sequence, [N] float64."""
    whole: Tensor
    """Sequences with an included token and with finite ratios only, [N] bool."""

    @classmethod
    def of(
        cls,
        log_probs_a: Tensor,
        log_probs_b: Tensor,
        sequence_ids: Tensor,
        num_sequences: int,
        include: Tensor | None,
    ) -> Ratios:
        """Compute the ratios. The arguments are those of `correct`."""
        ids = sequence_ids
        delta = log_probs_a.detach().double() - log_probs_b.detach().double()
        if include is not None:
            ids, delta = ids[include], delta[include]
        finite = delta.isfinite()
        none = delta.new_zeros(num_sequences)
        counts = none.index_add(0, ids, torch.ones_like(delta))
        num_finite = none.index_add(0, ids, finite.double())
        raw = torch.where(finite, delta, 0.0)
        log = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(raw, log, finite, ids, counts, (counts > 0) & (num_finite == counts))

    def by_sequence(self, values: Tensor) -> Tensor:
        """Sum the values [M] float64 over the tokens of each sequence, [N]."""
        return torch.zeros_like(self.counts).index_add(0, self.ids, values)

    def sequence_logs(self) -> Tensor:
        """Return the log of the product of each sequence's ratios, clamped to +-20, [N] float64."""
        return self.by_sequence(self.raw).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_means(self) -> Tensor:
        """Return the log of each sequence's geometric mean ratio, clamped to +-20, [N] float64."""
        means = self.by_sequence(self.raw) / self.counts.clamp(min=1)
        return means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def reject(ratios: Ratios, options: CorrectionOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mask of kept tokens among the included ones, [M] bool, and metrics."""
    metrics: dict[str, Tensor] = {}
    verdicts = {
        "nonfinite": ratios.whole[ratios.ids]
        if options.rollout_is in ("sequence", "geometric")
        else ratios.finite
    }
    if options.m2_threshold is not None:
        verdicts["m2"] = second_moment(options.m2_threshold, ratios)
    if options.rollout_token_veto_threshold is not None:
        verdicts["token_veto"] = accept_without_veto(options.rollout_token_veto_threshold, ratios)
    for rule in options.rollout_rs:
        verdicts[rule.name], statistics = accept(rule, ratios)
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in statistics.items()}
    keep = torch.ones_like(ratios.finite)
    for name, verdict in verdicts.items():
        keep &= verdict
        metrics |= {
            f"rollout_rs_{name}_{metric}": value
            for metric, value in rejected(verdict, ratios).items()
        }
    return keep, metrics | {
        f"rollout_rs_{metric}": value for metric, value in rejected(keep, ratios).items()
    }


def accept(rule: RejectionRule, ratios: Ratios) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens [M] bool that the rule accepts, and metrics of its statistic.

    mean, max, min, std, fraction_high and fraction_low are scalars over the rule's tokens or
    sequences with finite ratios, 0 if there are none. For k1, the statistic is the ratio.
    fraction_high and fraction_low are the shares above and below the bounds.
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


def _statistic(rule: RejectionRule, ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Return the rule's statistic (a log for k1) and the mask of defined values, [M] or [N]."""
    log = ratios.log
    level, kind = rule.name[:-3], rule.name[-2:]
    # expm1 preserves digits where the two policies nearly agree. e^l - 1 does not.
    tokens = log if kind == "k1" else log.square() / 2 if kind == "k2" else log.expm1() - log
    if level == "token":
        return tokens, ratios.finite
    if level == "seq_max":
        largest = tokens.new_zeros(len(ratios.counts)).scatter_reduce_(
            0, ratios.ids, tokens, "amax", include_self=False
        )
        return largest, ratios.whole
    if rule.name == "seq_sum_k1":
        return ratios.sequence_logs(), ratios.whole
    if rule.name == "seq_mean_k1":
        return ratios.sequence_means(), ratios.whole
    sums = ratios.by_sequence(tokens)
    return (sums if level == "seq_sum" else sums / ratios.counts.clamp(min=1)), ratios.whole


def accept_without_veto(threshold: float, ratios: Ratios) -> Tensor:
    """Return the tokens [M] bool of sequences with only finite ratios of at least `threshold`."""
    vetoed = ratios.by_sequence(beyond(ratios.log, threshold, math.inf)[0].double()) > 0
    return (ratios.whole & ~vetoed)[ratios.ids]


def second_moment(threshold: float, ratios: Ratios) -> Tensor:
    """Return the tokens [M] bool that M2PO keeps: the most whose mean of l^2 is in the bound.

    (M2PO, arXiv 2510.01161; AReaL's `m2_threshold`.) Tokens leave in the order of falling l^2,
    until the mean over the others is at most `threshold`. Among equal tokens, earlier ones leave
    first. A token whose ratio is not finite leaves, and is in no mean. Pass all tokens that are
    corrected together, because the mean is over them.

    AReaL takes the mean over each micro-batch, so its result depends on the split. It keeps one
    token that is over the threshold, because its loss divides by the count. Here, all may leave.
    """
    at = ratios.finite.nonzero().squeeze(-1)
    moments = ratios.log[at].square()
    order = moments.argsort(descending=True, stable=True)
    # The sum from the smallest one: entry i is the sum of all tokens from i on.
    sums = moments[order].flip(0).cumsum(0).flip(0)
    counts = torch.arange(len(at), 0, -1, dtype=sums.dtype, device=at.device)
    inside = sums <= threshold * (1 + EDGE) * counts
    return torch.zeros_like(ratios.finite).index_fill(0, at[order[inside]], True)


def rejected(keep: Tensor, ratios: Ratios) -> dict[str, Tensor]:
    """Return the share of included tokens not in `keep` [M], and of sequences with such a token."""
    masked = ratios.by_sequence((~keep).double()) > 0
    sequences = masked[ratios.counts > 0]
    return {"masked_fraction": share(~keep), "seq_masked_fraction": share(sequences)}


def weigh(
    ratios: Ratios, keep: Tensor, options: CorrectionOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each included token, [M] float64, and the metrics of weights."""
    if options.rollout_is is None:
        return keep.double(), {}
    by_token, by_mean = options.rollout_is == "token", options.rollout_is == "geometric"
    keeping = ratios.by_sequence(keep.double())
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
        ratios, (ratios.by_sequence(weights) / keeping)[keeping > 0], logs, options
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
    raw = (ratios.by_sequence(ratios.log.exp()) / ratios.counts).log() if of_tokens else logs
    low, high = _outside(raw[ratios.whole], options)
    deviation = (means - 1).abs()
    metrics = spread(means) | {
        "max_deviation": spread(deviation)["max"],
        "fraction_high": share(high),
        "fraction_low": share(low),
    }
    return {f"rollout_is_seq_{name}": value for name, value in metrics.items()}


def beyond(log_ratios: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return masks of ratios below `lower` (None: 0) and above `upper`, with log slack EDGE."""
    return log_ratios < _log(lower or 0.0) - EDGE, log_ratios > _log(upper) + EDGE


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def spread(values: Tensor) -> dict[str, Tensor]:
    """Return mean, max, min and population std of a float64 tensor, each 0 if it is empty."""
    if not len(values):
        return dict.fromkeys(("mean", "max", "min", "std"), values.new_zeros(()))
    return {
        "mean": values.mean(),
        "max": values.max(),
        "min": values.min(),
        "std": values.std(correction=0),
    }


def share(flags: Tensor) -> Tensor:
    """Return the share of true values, float64, 0 if there are no values."""
    return flags.double().sum() / max(len(flags), 1)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) as a float64 scalar.

    It is 1/n if only one weight is not 0, and 1 if all weights are equal. It is 0 without weights,
    or if all are 0.
    """
    w = weights.detach().double()
    squares = w.square().sum() * w.numel()
    tiny = torch.finfo(torch.float64).tiny
    return torch.where(squares > 0, w.sum().square() / squares.clamp(min=tiny), 0.0)


def _check_shapes(
    log_probs_a: Tensor, log_probs_b: Tensor, sequence_ids: Tensor, include: Tensor | None
) -> None:
    shapes = [tuple(x.shape) for x in (log_probs_b, sequence_ids, include) if x is not None]
    if log_probs_a.ndim != 1 or any(shape != log_probs_a.shape for shape in shapes):
        raise ValueError(
            "log-probs, sequence_ids and include must all be [T], got "
            f"{[tuple(log_probs_a.shape), *shapes]}"
        )
    if include is not None and include.dtype != torch.bool:
        raise ValueError(f"include must be bool, got {include.dtype}")


def _spread_out(values: Tensor, include: Tensor | None) -> Tensor:
    """Scatter the values of included tokens [M] to [T], with 0 elsewhere."""
    if include is None:
        return values
    return values.new_zeros(include.shape).masked_scatter_(include, values)


def off_policy_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    advantages: Tensor,
    *,
    threshold: float,
    include: Tensor | None,
) -> Tensor:
    """Mark the tokens that stay, [T] bool: all but those of A < 0 in sequences that are far away.

    (Off-policy sequence mask of DeepSeek-V3.2, arXiv 2512.02556.) A sequence is far away if
    the mean of rollout_log_probs - log_probs over its included tokens is over `threshold`. That is
    the k1 estimate of KL(rollout || current). A sequence with a ratio that is not finite is far
    away too. A token with A >= 0 always stays.

    log_probs [T] are of the policy under training, and rollout_log_probs [T] of the policy that
    drew the tokens. advantages are [T]. The other arguments are those of `correct`. Tokens outside `include` stay
    and are in no mean. The computation is in float64. Multiply the policy's token losses by the
    result. The masked tokens still count in denominators, as in the paper.

    TRL's `off_policy_mask_threshold` and slime's `opsm_delta` are the same. slime takes one
    advantage for each sequence, and compares with its old policy instead of the rollout's.
    """
    ratios = Ratios.of(log_probs, rollout_log_probs, sequence_ids, num_sequences, include)
    near = ratios.whole & (-ratios.sequence_means() <= threshold + EDGE)
    stays = near[sequence_ids] | ~(advantages.detach() < 0)
    return stays if include is None else stays | ~include
