"""A rollout correction's options, and the place in a step where it is made. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from millrace.algorithms.rules import RejectionRule, check_band


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """What `correct` does. Raises ValueError for values out of range and for two rules of one name."""

    rollout_is: Literal["token", "sequence"] | None
    """Weight of a token: its own ratio, or the product of its sequence's ratios; None gives 1."""
    rollout_is_threshold: float | tuple[float, float]
    """A number C truncates, min(r, C) (TIS); a pair keeps lo <= r <= hi and gives 0 outside (IcePop, arXiv 2510.18855)."""
    rollout_is_batch_normalize: bool
    """Divide the weights by their mean."""
    rollout_rs: tuple[RejectionRule, ...]
    """A token must be accepted by all of them."""
    rollout_token_veto_threshold: float | None
    """A whole sequence is rejected if one token's ratio is below this."""

    def __post_init__(self) -> None:
        if self.rollout_is not in ("token", "sequence", None):
            raise ValueError(f"rollout_is must be token, sequence or None, got {self.rollout_is!r}")
        check_band(*self.band)
        names = [rule.name for rule in self.rollout_rs]
        if len(set(names)) < len(names):
            raise ValueError(f"rollout_rs has a rule twice: {', '.join(names)}")
        if (
            self.rollout_token_veto_threshold is not None
            and not self.rollout_token_veto_threshold > 0
        ):
            raise ValueError(
                f"rollout_token_veto_threshold must be over 0, got {self.rollout_token_veto_threshold}"
            )

    @property
    def band(self) -> tuple[float, float]:
        """Bounds of the weights; of a truncation, 0 and C."""
        bounds = self.rollout_is_threshold
        return bounds if isinstance(bounds, tuple) else (0.0, bounds)

    @property
    def rejects(self) -> bool:
        """Whether a rule or the veto can reject a token."""
        return bool(self.rollout_rs) or self.rollout_token_veto_threshold is not None


class Proximal(StrEnum):
    """The policy that ratios of the loss are taken against."""

    ROLLOUT = "rollout"
    """The one that drew the tokens (bypass)."""
    RECOMPUTED = "recomputed"
    """The trainer's at the batch's arrival, by a forward pass."""
    INTERPOLATED = "interpolated"
    """A guess between the rollout's and the current one, by each token's version."""


class Place(StrEnum):
    """Where a correction is made."""

    NOWHERE = "nowhere"
    ARRIVAL = "arrival"
    """For the whole batch, by the policy of its arrival."""
    MINI_BATCH = "mini_batch"
    """For each mini-batch before its step, by the policy of that moment."""
    PASSING = "passing"
    """In the forward pass that is trained: a weight depends on its own sequence alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionPlan:
    """One configuration's correction. Every part of a step reads this value."""

    options: CorrectionOptions
    proximal: Proximal
    max_token_age: int | None
    """Tokens of more versions than this are not trained; None sets no limit."""
    before_baseline: bool
    """Sequences that are rejected whole are in no baseline."""

    @property
    def active(self) -> bool:
        """Whether anything about the tokens' own policy counts."""
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
