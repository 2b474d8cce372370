"""The options of a rollout correction, and the place in a step where it happens. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from millrace.algorithms.rules import RejectionRule, check_band


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """Options of `correct`. Raises ValueError for values out of range and for duplicate rules."""

    rollout_is: Literal["token", "sequence"] | None
    """Weight of a token: its own ratio, or the product of its sequence's ratios. None gives 1."""
    rollout_is_threshold: float | tuple[float, float]
    """A number C truncates the ratio r to min(r, C) (TIS).

    A pair keeps r if lo <= r <= hi, and gives 0 outside (IcePop, arXiv 2510.18855).
    """
    rollout_is_batch_normalize: bool
    """Divide the weights by their mean."""
    rollout_rs: tuple[RejectionRule, ...]
    """Rejection rules. A token is kept only if all of them accept it."""
    rollout_token_veto_threshold: float | None
    """Reject a whole sequence if the ratio of one token is below this."""

    def __post_init__(self) -> None:
        if self.rollout_is not in ("token", "sequence", None):
            raise ValueError(f"rollout_is must be token, sequence or None, got {self.rollout_is!r}")
        check_band(*self.band)
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
        """Bounds of the weights. For a truncation: 0 and C."""
        bounds = self.rollout_is_threshold
        return bounds if isinstance(bounds, tuple) else (0.0, bounds)

    @property
    def rejects(self) -> bool:
        """Whether a rule or the veto can reject a token."""
        return bool(self.rollout_rs) or self.rollout_token_veto_threshold is not None


class Proximal(StrEnum):
    """The policy in the denominator of the loss's ratios."""

    ROLLOUT = "rollout"
    """The policy that drew the tokens (bypass)."""
    RECOMPUTED = "recomputed"
    """The trainer's policy at the batch's arrival, from a forward pass."""
    INTERPOLATED = "interpolated"
    """An estimate between the rollout's and the current policy, from each token's version."""


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
