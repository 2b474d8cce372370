"""Rejection of tokens and sequences for which policies a and b differ too much.

Policy b drew the tokens, and policy a is the trainer's. Rules use l = log pi_a - log pi_b in
float64, clamped to +-20. For k1, the sum or mean over a sequence is taken from unclamped tokens and
then clamped. A bound above e^20 or below e^-20 has no effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.correction_plan import CorrectionOptions
from millrace.algorithms.ragged import sequence_ids, sequence_sums
from millrace.algorithms.ratio import MAX_LOG_RATIO
from millrace.algorithms.rules import RejectionRule

EDGE = 1e-12
"""Slack of every bound: a value on a bound stays inside, in spite of rounding in float64."""


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
        cls, log_probs_a: Tensor, log_probs_b: Tensor, lengths: Tensor, include: Tensor | None
    ) -> Ratios:
        """Compute the ratios from log-probs [T], lengths [N] and include [T] bool."""
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
        """Sum the values [M] over the tokens of each sequence, [N]."""
        return sequence_sums(values, self.ids, len(self.counts))

    def sequence_logs(self) -> Tensor:
        """Return the log of the product of each sequence's ratios, clamped to +-20, [N] float64."""
        return self.sums(self.raw).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_means(self) -> Tensor:
        """Return the log of each sequence's geometric mean ratio, clamped to +-20, [N] float64."""
        means = self.sums(self.raw) / self.counts.clamp(min=1)
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


def accept_without_veto(threshold: float, ratios: Ratios) -> Tensor:
    """Return the tokens [M] bool of sequences with only finite ratios of at least `threshold`."""
    vetoed = ratios.sums(beyond(ratios.log, threshold, math.inf)[0].double()) > 0
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
    counts = torch.arange(len(at), 0, -1, device=at.device)
    inside = sums <= threshold * (1 + EDGE) * counts
    return torch.zeros_like(ratios.finite).index_fill(0, at[order[inside]], True)


def off_policy_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    lengths: Tensor,
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
    drew the tokens. lengths is [N], advantages [T], include [T] bool. Tokens outside `include` stay
    and are in no mean. The computation is in float64. Multiply the policy's token losses by the
    result. The masked tokens still count in denominators, as in the paper.

    TRL's `off_policy_mask_threshold` and slime's `opsm_delta` are the same. slime takes one
    advantage for each sequence, and compares with its old policy instead of the rollout's.
    """
    ratios = Ratios.of(log_probs, rollout_log_probs, lengths, include)
    near = ratios.whole & (-ratios.sequence_means() <= threshold + EDGE)
    stays = near[sequence_ids(lengths)] | ~(advantages.detach() < 0)
    return stays if include is None else stays | ~include


def beyond(log_ratios: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Return masks of ratios below `lower` (None: 0) and above `upper`, with log slack EDGE."""
    return log_ratios < _log(lower or 0.0) - EDGE, log_ratios > _log(upper) + EDGE


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
    sums = ratios.sums(tokens)
    return (sums if level == "seq_sum" else sums / ratios.counts.clamp(min=1)), ratios.whole


def rejected(keep: Tensor, ratios: Ratios) -> dict[str, Tensor]:
    """Return the share of included tokens not in `keep` [M], and of sequences with such a token."""
    masked = ratios.sums((~keep).double()) > 0
    sequences = masked[ratios.counts > 0]
    return {"masked_fraction": share(~keep), "seq_masked_fraction": share(sequences)}


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


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf
