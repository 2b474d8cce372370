"""Rejection rules in the spelling of a configuration.

The configuration checks use this module, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
