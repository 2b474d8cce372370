"""The options of a rollout correction, and the place in a step where it happens. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from millrace.algorithms.rules import RejectionRule, check_band


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


class Place(StrEnum):
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
    def place(self) -> Place:
        if self.active and (self.proximal is Proximal.RECOMPUTED or self.before_baseline):
            return Place.ARRIVAL
        if self.options.rejects or (self.weighs and self.options.rollout_is_batch_normalize):
            return Place.MINI_BATCH
        return Place.PASSING if self.weighs else Place.NOWHERE
