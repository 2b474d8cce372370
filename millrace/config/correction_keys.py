"""The keys of the off-policy correction."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field

from millrace.algorithms.correction_plan import (
    RULES,
    CorrectionOptions,
    CorrectionPlan,
    Proximal,
    parse_rules,
    parse_threshold,
)
from millrace.config.section import ReadWith, Rule, Section
from millrace.errors import bad_value

PROXIMAL = {
    "recompute": Proximal.RECOMPUTED,
    "interpolate": Proximal.INTERPOLATED,
    "linear": Proximal.LINEAR,
}
"""The proximal policies of decoupled settings, by the values of `proximal`."""


class CorrectionConfig(Section):
    rollout_is: Literal["token", "sequence", "geometric"] | None = None
    """Importance weights against the mismatch of trainer and rollout.

    They are for each token, or for each response: the product of its ratios, or their geometric
    mean. A weight is a trainer probability over the
    rollout probability. With use_rollout_log_probs=false, the trainer probability is that of the
    old policy (see proximal). With true, it is that of the current policy, and the loss must have
    no ratio (gpg, reinforce).
    """
    rollout_is_threshold: Annotated[
        float | str, ReadWith({".rollout_is": ("token", "sequence", "geometric")})
    ] = 2.0
    """A number is an upper bound: larger weights become the bound (TIS).

    A pair "lo_hi" sets weights outside of it to 0 (IcePop).
    """
    rollout_is_threshold_lower: float | None = Field(None, gt=0)
    """Lower bound of truncated weights: smaller ones become the bound."""
    rollout_is_batch_normalize: bool = False
    """Divide the truncated weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection rules, separated by commas. A token is trained if every rule accepts it.

    The rules are token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3 and seq_max_k1|k2|k3.
    """
    rollout_rs_threshold: float | str | tuple[float | str, ...] | None = None
    """Bounds of rollout_rs: one for all rules, or one for each.

    k1 takes "lo_hi" on the ratio; a single number u means 1/u to u. k2 and k3 take an upper bound
    on the divergence.
    """
    rollout_token_veto_threshold: float | None = Field(None, gt=0)
    """Reject a whole response if the ratio of one of its tokens is below this."""
    m2_threshold: float | None = Field(None, gt=0)
    """Second-moment mask (M2PO): the largest mean of the squared log-ratios.

    The tokens with the largest ones are rejected, until the mean over the others is at most this.
    AReaL's recipe has 0.04.
    """
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """Off-policy sequence mask (DeepSeek-V3.2): the largest KL of a response, in nats per token.

    Tokens with a negative advantage have no policy loss in a response whose mean of rollout
    log-prob - current log-prob is over this. They still count in denominators.
    """
    max_token_age: int | None = Field(None, ge=0)
    """Reject tokens that are more than this many versions older than the live version."""
    reject_before_baseline: bool = False
    """Leave responses that are rejected whole out of their group's baseline too."""
    proximal: Literal["recompute", "interpolate", "linear"] = "recompute"
    """The old policy of PPO's ratio if use_rollout_log_probs is false.

    recompute takes the trainer's policy at the batch's arrival, which costs a forward pass.
    interpolate mixes the rollout's and the current log-probs by each token's version, which costs
    none. linear mixes their probabilities.
    """

    @property
    def active(self) -> bool:
        """Whether any weight, rule, veto, second moment or age limit is set."""
        return bool(
            self.rollout_is
            or self.rollout_rs
            or self.rollout_token_veto_threshold
            or self.m2_threshold
            or self.max_token_age is not None
        )

    def rules(self, here: str) -> Iterator[Rule]:
        self.plan(bypass=False)
        for key, what in (
            ("rollout_is_batch_normalize", "normalise"),
            ("rollout_is_threshold_lower", "bound"),
        ):
            rule = f"there are no importance weights to {what}"
            alone = getattr(self, key) and not self.rollout_is
            yield alone, key, rule, f"{here}rollout_is=token"
        key, early = "reject_before_baseline", self.reject_before_baseline
        rejects = self.rollout_rs or self.rollout_token_veto_threshold or self.m2_threshold
        yield (
            early and not rejects,
            key,
            "no rejection rule and no veto is set",
            f"{here}rollout_rs=seq_mean_k1 {here}rollout_rs_threshold=0.5_2.0",
        )
        yield (
            early and self.proximal != "recompute",
            key,
            "an interpolated proximal policy is known only after the advantages are computed",
            f"{here}proximal=recompute",
        )

    def plan(self, *, bypass: bool) -> CorrectionPlan:
        """Return the plan that this section describes.

        `bypass` is async_training.use_rollout_log_probs. Raises ConfigError if a threshold or a
        rule cannot be parsed.
        """
        here = "algorithm.rollout_correction."
        try:
            threshold = parse_threshold(self.rollout_is_threshold)
        except ValueError as error:
            key = f"{here}rollout_is_threshold"
            raise bad_value(key, self.rollout_is_threshold, str(error), f"{key}=2.0") from None
        try:
            rules = parse_rules(self.rollout_rs, self.rollout_rs_threshold)
        except ValueError as error:
            unknown = "unknown rule" in str(error) or "twice" in str(error)
            bounded = not unknown and self.rollout_rs_threshold is not None
            key = "rollout_rs_threshold" if bounded else "rollout_rs"
            first = (self.rollout_rs or "").split(",")[0].strip()
            near = [first] if first in RULES else difflib.get_close_matches(first, RULES, 1)
            rule = (near or ["token_k1"])[0]
            bound = "0.5_2.0" if rule.endswith("k1") else "0.01"
            fix = f"{here}rollout_rs={rule} {here}rollout_rs_threshold={bound}"
            raise bad_value(f"{here}{key}", getattr(self, key), str(error), fix) from None
        lower, key = self.rollout_is_threshold_lower, f"{here}rollout_is_threshold_lower"
        if lower is not None:
            if isinstance(threshold, tuple):
                rule = "a pair in rollout_is_threshold sets weights outside of it to 0, so none is raised"
                fix = f"a single number in {here}rollout_is_threshold, or no lower bound"
                raise bad_value(key, lower, rule, fix)
            if lower > threshold:
                rule = f"must not be over rollout_is_threshold = {threshold}"
                raise bad_value(key, lower, rule, f"{key}={min(0.5, threshold)}")
        names = {field.name for field in fields(CorrectionOptions)}
        parsed = {"rollout_is_threshold": threshold, "rollout_rs": rules}
        return CorrectionPlan(
            options=CorrectionOptions(**self.model_dump(include=names) | parsed),
            proximal=Proximal.ROLLOUT if bypass else PROXIMAL[self.proximal],
            max_token_age=self.max_token_age,
            before_baseline=self.reject_before_baseline,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
        )
