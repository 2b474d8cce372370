"""Rejection rules: which tokens, and which whole sequences, are left out of a loss because their policies are too far apart.

All of them look at l = log pi_a - log pi_b, the trainer's log-prob minus the rollout's, in float64 and clamped to +-20: a
bound beyond e^20 or under e^-20 never acts. A rule sees every included token, whatever other rules say of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.losses import MAX_LOG_RATIO
from millrace.algorithms.ragged import sequence_ids, sequence_sums

RULES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""Names of the rules."""

EDGE = 1e-12
"""Slack of every bound, so that rounding in float64 does not put a value that is exactly at a bound outside of it."""


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Accepts a token (token_*), or all tokens of a sequence (seq_*), if its statistic is within inclusive bounds.

    name         statistic                                                   bounds
    token_k1     r = e^l                                                     lower <= r <= upper
    seq_sum_k1   product of the sequence's ratios, its log clamped to +-20   lower <= . <= upper
    seq_mean_k1  geometric mean of the sequence's ratios                     lower <= . <= upper
    *_k2         l^2 / 2; its sum, mean or max over the sequence             . <= upper, `lower` is None
    *_k3         e^l - 1 - l; its sum, mean or max over the sequence         . <= upper, `lower` is None

    Bounds of k1 are of the RATIO pi_a / pi_b. (verl compares -l with their logs, which keeps 1/upper <= r <= 1/lower: the
    same for reciprocal bounds alone, and wrong for 0.5 to 5.) lower = 0 and upper = inf bound one side only. A sequence
    with a ratio that is not finite is not accepted. Raises ValueError for an unknown name and for bounds that are none.
    """

    name: str
    lower: float | None
    upper: float

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(f"unknown rejection rule {self.name!r}; known: {', '.join(RULES)}")
        if self.in_ratio_space:
            if self.lower is None:
                raise ValueError(f"{self.name} bounds a ratio on both sides: give it lower and upper, such as 0.5 and 2.0")
            check_band(self.lower, self.upper)
        elif self.lower is not None:
            raise ValueError(f"{self.name} has an upper bound alone: leave out its lower bound {self.lower}")
        elif not self.upper > 0:
            raise ValueError(f"the upper bound of {self.name} must be over 0, got {self.upper}")

    @property
    def in_ratio_space(self) -> bool:
        """Whether the bounds are of a ratio (k1)."""
        return self.name.endswith("k1")


@dataclass(frozen=True, slots=True)
class Ratios:
    """The log-ratios of the included tokens, M of T."""

    log: Tensor
    """l [M] float64, clamped to +-20; 0 where it is not finite."""
    finite: Tensor
    """[M] bool."""
    ids: Tensor
    """Sequence of each token, [M] int64."""
    counts: Tensor
    """Included tokens of each sequence, [N] float64."""
    whole: Tensor
    """Sequences that have an included token, and only finite ones, [N] bool."""

    @classmethod
    def of(cls, log_probs_a: Tensor, log_probs_b: Tensor, lengths: Tensor, include: Tensor | None) -> Ratios:
        """From log-probs [T], lengths [N] and include [T] bool."""
        ids = sequence_ids(lengths)
        delta = log_probs_a.detach().double() - log_probs_b.detach().double()
        if include is not None:
            ids, delta = ids[include], delta[include]
        finite = delta.isfinite()
        num_finite = sequence_sums(finite.double(), ids, len(lengths))
        counts = sequence_sums(torch.ones_like(delta), ids, len(lengths))
        log = torch.where(finite, delta, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(log, finite, ids, counts, (counts > 0) & (num_finite == counts))

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the tokens of each sequence, [N], of values [M]."""
        return sequence_sums(values, self.ids, len(self.counts))

    def sequence_logs(self) -> Tensor:
        """Log of the product of each sequence's ratios, clamped to +-20, [N] float64."""
        return self.sums(self.log).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def accept(rule: RejectionRule, ratios: Ratios) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens [M] bool that the rule accepts, and `{mean,max,min,std,fraction_high,fraction_low}` of its statistic.

    Metrics are scalars over tokens or over sequences, as the rule has it, with finite ratios; for k1 they are of the ratio.
    fraction_high and fraction_low are the shares above and below the bounds. All are 0 where there is nothing to count.
    """
    statistic, valid = _statistic(rule, ratios)
    low, high = beyond(statistic, rule.lower, rule.upper) if rule.in_ratio_space else _over(statistic, rule.upper)
    accepted = valid & ~low & ~high
    shown = statistic.exp() if rule.in_ratio_space else statistic
    metrics = spread(shown[valid]) | {"fraction_high": share(high[valid]), "fraction_low": share(low[valid])}
    return (accepted if rule.name.startswith("token") else accepted[ratios.ids]), metrics


def accept_without_veto(threshold: float, ratios: Ratios) -> Tensor:
    """Tokens [M] bool of the sequences in which every ratio is finite and at least `threshold`."""
    vetoed = ratios.sums(beyond(ratios.log, threshold, math.inf)[0].double()) > 0
    return (ratios.whole & ~vetoed)[ratios.ids]


def beyond(log_ratios: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Whether each ratio is below `lower`, and above `upper`: compared as logs, with the slack EDGE; no lower bound is 0."""
    return log_ratios < _log(lower or 0.0) - EDGE, log_ratios > _log(upper) + EDGE


def _over(statistic: Tensor, upper: float) -> tuple[Tensor, Tensor]:
    high = statistic > upper * (1 + EDGE)
    return torch.zeros_like(high), high


def _statistic(rule: RejectionRule, ratios: Ratios) -> tuple[Tensor, Tensor]:
    """The rule's statistic, as a log for k1, and where it is defined: [M] or [N]."""
    log = ratios.log
    level, kind = rule.name[:-3], rule.name[-2:]
    # expm1 keeps the digits that e^l - 1 loses where the two policies nearly agree.
    tokens = log if kind == "k1" else log.square() / 2 if kind == "k2" else log.expm1() - log
    if level == "token":
        return tokens, ratios.finite
    if level == "seq_max":
        largest = tokens.new_zeros(len(ratios.counts)).scatter_reduce_(0, ratios.ids, tokens, "amax")
        return largest, ratios.whole
    if rule.name == "seq_sum_k1":
        return ratios.sequence_logs(), ratios.whole
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
    return {"mean": values.mean(), "max": values.max(), "min": values.min(), "std": values.std(correction=0)}


def share(flags: Tensor) -> Tensor:
    """Share of bools that are true, float64; 0 where there are none."""
    return flags.double().sum() / max(len(flags), 1)


def check_band(lower: float, upper: float) -> None:
    """Raises ValueError unless 0 <= lower <= upper and upper > 0."""
    if not (0 <= lower <= upper and upper > 0):
        raise ValueError(f"a band of ratios needs 0 <= lower <= upper and upper over 0, got {lower} to {upper}")


def parse_threshold(value: str | float) -> float | tuple[float, float]:
    """An upper bound, 2.0 or "2.0", or a pair of bounds, "0.5_5.0": verl's spelling.

    In YAML a pair needs quotes: an unquoted 0.5_5 is the number 0.55 there. Raises ValueError for anything else, for bounds
    under 0, for an upper bound of 0 and for a lower bound over the upper one.
    """
    parts = value.split("_") if isinstance(value, str) else [value]
    try:
        # float(True) is 1.0; and "1_0_5" must not become 1 to 5.
        numbers = [] if isinstance(value, bool) or len(parts) > 2 else [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers:
        raise ValueError(f"threshold {value!r} is neither a number, such as 2.0, nor a pair of numbers, such as '0.5_5.0'")
    if len(numbers) == 2:
        check_band(*numbers)
        return numbers[0], numbers[1]
    if not numbers[0] > 0:
        raise ValueError(f"threshold {value!r} must be over 0")
    return numbers[0]


def parse_rules(
    rollout_rs: str | Sequence[str] | None, thresholds: str | float | Sequence[str | float] | None
) -> tuple[RejectionRule, ...]:
    """Rules from verl's spelling: names, and one threshold for each or one for all; both as a comma list or a sequence.

    k1 rules take "lo_hi" in ratio space, where a single u, 1 or more, means 1/u to u; the others take an upper bound. No names
    give no rules. Raises ValueError, which says the value, the rule and what to write, for a name unknown or given twice, for
    a threshold that does not fit its rule, for thresholds too few or too many, and for a threshold without a rule.
    """
    names = [str(name) for name in _items(rollout_rs)]
    specs = _items(thresholds)
    if not names and specs:
        raise ValueError(f"rollout_rs_threshold {thresholds!r} has no rule: name one in rollout_rs, or leave the threshold out")
    if len(set(names)) < len(names):
        raise ValueError(f"rollout_rs {rollout_rs!r} names a rule twice: name each once")
    if names and len(specs) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs {', '.join(names)} needs one threshold for all or {len(names)}, one for each rule: "
            f"rollout_rs_threshold {thresholds!r} has {len(specs)}"
        )
    return tuple(_rule(name, spec) for name, spec in zip(names, specs * len(names) if len(specs) == 1 else specs, strict=True))


def _items(value: str | float | Sequence[str | float] | None) -> list[str | float]:
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Sequence) else [value]


def _rule(name: str, spec: str | float) -> RejectionRule:
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r} in rollout_rs; known: {', '.join(RULES)}")
    ratio = name.endswith("k1")
    fix = "'0.5_2.0' (bounds of the ratio), or 2.0 for 0.5 to 2.0" if ratio else "one upper bound, such as 0.01"
    try:
        bounds = parse_threshold(spec)
        if ratio and isinstance(bounds, float):
            bounds = (1 / bounds, bounds)
        lower, upper = bounds if isinstance(bounds, tuple) else (None, bounds)
        return RejectionRule(name, lower, upper)
    except ValueError as error:
        raise ValueError(f"rollout_rs_threshold {spec!r} does not fit the rule {name}: {error}. Write {fix}") from None


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf
