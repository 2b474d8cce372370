"""The options of a rollout correction, its rejection rules, and its place in a step.

The configuration checks use this module, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

RULES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k1", "seq_max_k2", "seq_max_k3"),
)
"""Names of the rules."""


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """A rule that accepts a token (token_*), or all tokens of a sequence (seq_*), within bounds.

    Bounds are inclusive. l is the log-ratio of a token, log pi_a - log pi_b.

    name         statistic                                                   bounds
    token_k1     r = e^l                                                     lower <= r <= upper
    seq_sum_k1   product of the sequence's ratios, its log clamped to +-20   lower <= . <= upper
    seq_mean_k1  their geometric mean, its log clamped to +-20               lower <= . <= upper
    seq_max_k1   the largest of them                                         lower <= . <= upper
    *_k2         l^2 / 2; its sum, mean or max over the sequence             . <= upper, no `lower`
    *_k3         e^l - 1 - l; its sum, mean or max over the sequence         . <= upper, no `lower`

    k1 bounds the RATIO pi_a / pi_b. (verl compares -l with the logs of the bounds, and so keeps
    1/upper <= r <= 1/lower. That is the same only for reciprocal bounds, and wrong for 0.5 to 5.)
    seq_max_k1 is AReaL's rejection_sampling with level: sequence, metric: ratio and agg: max. verl
    lacks it. lower = 0 or upper = inf removes a bound. For k2 and k3, `lower` is None. A sequence with a
    ratio that is not finite is rejected.

    Raises ValueError for an unknown name and for invalid bounds.
    """

    name: str
    lower: float | None
    upper: float

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(f"unknown rejection rule {self.name!r}; known: {', '.join(RULES)}")
        if self.in_ratio_space:
            if self.lower is None:
                raise ValueError(
                    f"{self.name} bounds a ratio on both sides: "
                    "give it lower and upper, such as 0.5 and 2.0"
                )
            check_band(self.lower, self.upper)
        elif self.lower is not None:
            raise ValueError(
                f"{self.name} has only an upper bound: remove its lower bound {self.lower}"
            )
        elif not self.upper > 0:
            raise ValueError(f"the upper bound of {self.name} must be over 0, got {self.upper}")

    @property
    def in_ratio_space(self) -> bool:
        """Whether the rule bounds a ratio (k1)."""
        return self.name.endswith("k1")


def check_band(lower: float, upper: float) -> None:
    """Raise ValueError unless 0 <= lower <= upper and upper > 0."""
    if not (0 <= lower <= upper and upper > 0):
        raise ValueError(
            f"a band of ratios needs 0 <= lower <= upper and upper over 0, got {lower} to {upper}"
        )


def parse_threshold(value: str | float) -> float | tuple[float, float]:
    """Parse an upper bound, 2.0 or "2.0", or a pair of bounds, "0.5_5.0" (verl's spelling).

    In YAML a pair needs quotes: YAML reads an unquoted 0.5_5 as the number 0.55.

    Raises ValueError for any other value, for bounds below 0, for an upper bound of 0, and for a
    lower bound over the upper one.
    """
    parts = value.split("_") if isinstance(value, str) else [value]
    try:
        # float(True) is 1.0, so bools are refused. "1_0_5" must not become 1 to 5.
        numbers = (
            [] if isinstance(value, bool) or len(parts) > 2 else [float(part) for part in parts]
        )
    except ValueError:
        numbers = []
    if not numbers:
        raise ValueError(
            f"threshold {value!r} is neither a number, such as 2.0, "
            "nor a pair of numbers, such as '0.5_5.0'"
        )
    if len(numbers) == 2:
        check_band(*numbers)
        return numbers[0], numbers[1]
    if not numbers[0] > 0:
        raise ValueError(f"threshold {value!r} must be over 0")
    return numbers[0]


def parse_rules(
    rollout_rs: str | Sequence[str] | None, thresholds: str | float | Sequence[str | float] | None
) -> tuple[RejectionRule, ...]:
    """Parse rules in verl's spelling: names, and one threshold for each rule or one for all.

    Both arguments are a comma-separated list or a sequence. A k1 rule takes bounds of the ratio,
    "lo_hi". A single number u of at least 1 means 1/u to u. The other rules take an upper bound.
    Without names, there are no rules.

    Raises ValueError with the value, the rule and the fix in these cases:

    - an unknown or duplicate name
    - a threshold that does not fit its rule
    - too few or too many thresholds
    - a threshold without a rule
    """
    names = [str(name) for name in _items(rollout_rs)]
    specs = _items(thresholds)
    if not names and specs:
        raise ValueError(
            f"rollout_rs_threshold {thresholds!r} has no rule: "
            "name one in rollout_rs, or remove the threshold"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"rollout_rs {rollout_rs!r} names a rule twice: name each once")
    if names and not specs:
        raise ValueError(f"{', '.join(names)} has no threshold: give rollout_rs_threshold")
    if names and len(specs) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs {', '.join(names)} needs one threshold for all, or {len(names)}, "
            f"one for each rule: rollout_rs_threshold {thresholds!r} has {len(specs)}"
        )
    return tuple(
        _rule(name, spec)
        for name, spec in zip(names, specs * len(names) if len(specs) == 1 else specs, strict=True)
    )


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
    fix = (
        "'0.5_2.0' (bounds of the ratio), or 2.0 for 0.5 to 2.0"
        if ratio
        else "one upper bound, such as 0.01"
    )
    try:
        bounds = parse_threshold(spec)
        if ratio and isinstance(bounds, float):
            if bounds < 1:
                raise ValueError(
                    f"a single bound u stands for 1/u to u and must be 1 or more, got {bounds}"
                )
            bounds = (1 / bounds, bounds)
        lower, upper = bounds if isinstance(bounds, tuple) else (None, bounds)
        return RejectionRule(name, lower, upper)
    except ValueError as error:
        raise ValueError(
            f"rollout_rs_threshold {spec!r} does not fit the rule {name}: {error}. Write {fix}"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """Options of `correct`. Raises ValueError for values out of range and for duplicate rules."""

    rollout_is: Literal["token", "sequence", "geometric"] | None
    """Weight of a token: its own ratio, or its sequence's product or geometric mean of ratios.

    None gives 1.
    """
    rollout_is_threshold: float | tuple[float, float]
    """A number C truncates the ratio r to min(r, C) (TIS).

    A pair keeps r if lo <= r <= hi, and gives 0 outside (IcePop, arXiv 2510.18855).
    """
    rollout_is_threshold_lower: float | None
    """Raise smaller ratios to this one (slime's --tis-clip-low, TRL's clip_min).

    None sets no bound. Only a truncation has one: a pair has its own lower bound.
    """
    rollout_is_batch_normalize: bool
    """Divide the weights by their mean."""
    rollout_rs: tuple[RejectionRule, ...]
    """Rejection rules. A token is kept only if all of them accept it."""
    rollout_token_veto_threshold: float | None
    """Reject a whole sequence if the ratio of one token is below this."""
    m2_threshold: float | None
    """Reject the tokens that `second_moment` rejects (M2PO, arXiv 2510.01161)."""

    def __post_init__(self) -> None:
        if self.rollout_is not in ("token", "sequence", "geometric", None):
            raise ValueError(
                f"rollout_is must be token, sequence, geometric or None, got {self.rollout_is!r}"
            )
        check_band(*self.band)
        lower = self.rollout_is_threshold_lower
        if lower is not None and isinstance(self.rollout_is_threshold, tuple):
            raise ValueError(
                f"rollout_is_threshold_lower {lower} raises small weights, and the band "
                f"{self.rollout_is_threshold} sets them to 0: give one of them"
            )
        if self.m2_threshold is not None and not self.m2_threshold > 0:
            raise ValueError(f"m2_threshold must be over 0, got {self.m2_threshold}")
        names = [rule.name for rule in self.rollout_rs]
        if len(set(names)) < len(names):
            raise ValueError(f"rollout_rs contains a rule twice: {', '.join(names)}")
        if (
            self.rollout_token_veto_threshold is not None
            and not self.rollout_token_veto_threshold > 0
        ):
            raise ValueError(
                "rollout_token_veto_threshold must be over 0, "
                f"got {self.rollout_token_veto_threshold}"
            )

    @property
    def band(self) -> tuple[float, float]:
        """Bounds of the weights. For a truncation: its lower bound or 0, and C."""
        bounds = self.rollout_is_threshold
        return (
            bounds if isinstance(bounds, tuple) else (self.rollout_is_threshold_lower or 0, bounds)
        )

    @property
    def rejects(self) -> bool:
        """Whether a rule, the veto or the second moment can reject a token."""
        bounds = (self.rollout_token_veto_threshold, self.m2_threshold)
        return bool(self.rollout_rs) or any(bound is not None for bound in bounds)


class Proximal(StrEnum):
    """The policy in the denominator of the loss's ratios."""

    ROLLOUT = "rollout"
    """The policy that drew the tokens (bypass)."""
    RECOMPUTED = "recomputed"
    """The trainer's policy at the batch's arrival, from a forward pass."""
    INTERPOLATED = "interpolated"
    """An estimate between the rollout's and the current log-probs, by each token's age."""
    LINEAR = "linear"
    """The same between their probabilities."""


class CorrectionStage(StrEnum):
    """The place in a step where the correction happens."""

    NOWHERE = "nowhere"
    ARRIVAL = "arrival"
    """For the whole batch, with the policy at its arrival."""
    MINI_BATCH = "mini_batch"
    """For each mini-batch before its step, with the current policy."""
    PASSING = "passing"
    """In the forward pass of training. A weight depends on its own sequence alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionPlan:
    """The correction of one configuration. Every part of a step reads this value."""

    options: CorrectionOptions
    proximal: Proximal
    max_token_age: int | None
    """Tokens older than this many versions are not trained. None sets no limit."""
    before_baseline: bool
    """Exclude sequences that are rejected whole from the baselines."""
    off_policy_mask_threshold: float | None
    """The bound of `off_policy_mask`. None masks nothing."""

    @property
    def active(self) -> bool:
        """Whether the correction weighs tokens, rejects tokens, or leaves out old ones."""
        return self.weighs or self.options.rejects or self.max_token_age is not None

    @property
    def weighs(self) -> bool:
        """Whether token losses have importance weights."""
        return self.options.rollout_is is not None

    @property
    def place(self) -> CorrectionStage:
        if self.active and (self.proximal is Proximal.RECOMPUTED or self.before_baseline):
            return CorrectionStage.ARRIVAL
        if self.options.rejects or (self.weighs and self.options.rollout_is_batch_normalize):
            return CorrectionStage.MINI_BATCH
        return CorrectionStage.PASSING if self.weighs else CorrectionStage.NOWHERE
