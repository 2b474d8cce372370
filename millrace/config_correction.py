"""The off-policy correction that a configuration asks for, and what is wrong with it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from millrace.algorithms.correction_plan import CorrectionOptions, CorrectionPlan, Proximal
from millrace.algorithms.modes import TRUST_REGION, USES_OLD
from millrace.algorithms.rules import RULES, RejectionRule, parse_rules, parse_threshold
from millrace.errors import bad_value

if TYPE_CHECKING:
    from millrace.config import Config, CorrectionConfig


def check_correction(c: Config) -> None:
    """Refuse a correction that cannot be made, or that counts something twice."""
    correction, bypass = c.algorithm.rollout_correction, c.async_training.use_rollout_log_probs
    prefix, mode = "algorithm.rollout_correction", c.actor.policy_loss.loss_mode
    plan = correction_plan(correction, bypass=bypass)
    if bypass and plan.weighs and mode in USES_OLD:
        raise bad_value(
            f"{prefix}.rollout_is",
            correction.rollout_is,
            f"with use_rollout_log_probs the ratio of {mode} already is current / rollout: weights would count it twice",
            "async_training.use_rollout_log_probs=false, or actor.policy_loss.loss_mode=reinforce",
        )
    if correction.rollout_is_batch_normalize and not plan.weighs:
        raise bad_value(
            f"{prefix}.rollout_is_batch_normalize",
            True,
            "there are no weights",
            f"{prefix}.rollout_is=token",
        )
    if correction.proximal == "interpolate" and bypass:
        raise bad_value(
            f"{prefix}.proximal",
            "interpolate",
            "with use_rollout_log_probs the ratio is taken against the rollout policy itself",
            "async_training.use_rollout_log_probs=false",
        )
    if plan.before_baseline and not plan.options.rejects:
        raise bad_value(
            f"{prefix}.reject_before_baseline",
            True,
            "no rule and no veto rejects anything",
            f"{prefix}.rollout_rs=seq_mean_k1 {prefix}.rollout_rs_threshold=0.5_2.0",
        )
    if plan.before_baseline and plan.proximal is Proximal.INTERPOLATED:
        raise bad_value(
            f"{prefix}.reject_before_baseline",
            True,
            "an interpolated proximal policy is known only after advantages are",
            f"{prefix}.proximal=recompute",
        )


def check_trust(c: Config) -> None:
    """More than one version of lag needs something that holds the policy near the one that drew the tokens."""
    mode, lag = c.actor.policy_loss.loss_mode, c.schedule.lag_bound
    bypass = c.async_training.use_rollout_log_probs
    plan = correction_plan(c.algorithm.rollout_correction, bypass=bypass)
    trusted = bypass and mode in TRUST_REGION
    if lag <= 1 or trusted or plan.weighs or plan.options.rollout_rs:
        return
    if bypass:
        why = f"actor.policy_loss.loss_mode={mode} bounds no ratio"
    elif mode in USES_OLD:
        why = "the ratio is taken against the trainer's own policy, and nothing accounts for the one that drew the tokens"
    else:
        why = f"{mode} takes no ratio, and nothing accounts for the policy that drew the tokens"
    ordered = c.async_training.staleness_threshold > 0
    key = "async_training.staleness_threshold" if ordered else "async_training.lookahead"
    correct, prefix = not (bypass and mode in USES_OLD), "algorithm.rollout_correction"
    fixes = [
        *(["async_training.use_rollout_log_probs=true"] if mode in TRUST_REGION else []),
        *([f"{prefix}.rollout_is=token"] if correct else []),
        f"{prefix}.rollout_rs=token_k1 {prefix}.rollout_rs_threshold=0.5_2.0",
        *(
            []
            if mode in TRUST_REGION
            else ["actor.policy_loss.loss_mode=vanilla async_training.use_rollout_log_probs=true"]
        ),
        f"{key}={0 if ordered else 1}",
    ]
    raise bad_value(
        key,
        c.async_training.staleness_threshold if ordered else c.async_training.lookahead,
        f"samples may be {lag} versions old (lag_bound), and {why}",
        "one of " + "; ".join(fixes),
    )


def correction_plan(correction: CorrectionConfig, *, bypass: bool) -> CorrectionPlan:
    """Return what the section algorithm.rollout_correction asks for; `bypass` is async_training.use_rollout_log_probs.

    Raises ConfigError.
    """
    threshold, rules = _rejection(correction)
    options = CorrectionOptions(
        rollout_is=correction.rollout_is,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        rollout_rs=rules,
        rollout_token_veto_threshold=correction.rollout_token_veto_threshold,
    )
    decoupled = (
        Proximal.INTERPOLATED if correction.proximal == "interpolate" else Proximal.RECOMPUTED
    )
    return CorrectionPlan(
        options=options,
        proximal=Proximal.ROLLOUT if bypass else decoupled,
        max_token_age=correction.max_token_age,
        before_baseline=correction.reject_before_baseline,
    )


def _rejection(
    correction: CorrectionConfig,
) -> tuple[float | tuple[float, float], tuple[RejectionRule, ...]]:
    """The parsed threshold of the importance weights, and the rejection rules. Raises ConfigError."""
    prefix = "algorithm.rollout_correction"
    try:
        threshold = parse_threshold(correction.rollout_is_threshold)
    except ValueError as error:
        raise bad_value(
            f"{prefix}.rollout_is_threshold",
            correction.rollout_is_threshold,
            str(error),
            f"{prefix}.rollout_is_threshold=2.0",
        ) from None
    try:
        rules = parse_rules(correction.rollout_rs, correction.rollout_rs_threshold)
    except ValueError as error:
        unknown = "unknown rule" in str(error) or "twice" in str(error)
        key = (
            "rollout_rs"
            if unknown or correction.rollout_rs_threshold is None
            else "rollout_rs_threshold"
        )
        first = (correction.rollout_rs or "").split(",")[0].strip()
        rule = (
            first
            if first in RULES
            else (difflib.get_close_matches(first, RULES, 1) or ["token_k1"])[0]
        )
        bound = "0.5_2.0" if rule.endswith("k1") else "0.01"
        fix = f"{prefix}.rollout_rs={rule} {prefix}.rollout_rs_threshold={bound}"
        raise bad_value(f"{prefix}.{key}", getattr(correction, key), str(error), fix) from None
    return threshold, rules
