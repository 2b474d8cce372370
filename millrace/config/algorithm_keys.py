"""The keys of losses, advantages and corrections."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field

from millrace.algorithms.correction_plan import CorrectionOptions, CorrectionPlan, Proximal
from millrace.algorithms.modes import AggMode, LossMode
from millrace.algorithms.rules import RULES, RejectionRule, parse_rules, parse_threshold
from millrace.config.optim_keys import OptimConfig
from millrace.config.section import Section
from millrace.errors import bad_value

KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+", "low_var_kl+"
]


class PolicyLossConfig(Section):
    loss_mode: LossMode = "vanilla"
    """Policy loss. docs/algorithms.md has the formulas."""
    tau_pos: float = Field(1.0, gt=0)
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: temperature of the gate for zero and negative advantages."""
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """clip_cov: share of the mini-batch's tokens that are detached."""
    clip_cov_lb: float = 1.0
    """clip_cov: a token may be detached only if its covariance is at least this."""
    clip_cov_ub: float = 5.0
    """clip_cov: a token may be detached only if its covariance is at most this."""
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """kl_cov: share of the mini-batch's tokens that get a KL penalty.

    The tokens with the largest covariance are chosen.
    """
    ppo_kl_coef: float = Field(0.1, ge=0)
    """kl_cov: weight of that penalty."""
    dppo_clip_c: float = Field(20.0, gt=1)
    """dppo_tv, dppo_kl: upper bound on the ratio that weights a token."""
    dro_beta: float = Field(0.05, gt=0)
    """dro: weight of the squared log-ratio, on the scale of the advantages."""


class ActorConfig(Section):
    ppo_mini_batch_size: int = Field(32, ge=1)
    """Samples in one optimizer step, over all devices together."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each batch that the trainer takes."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens packed into one micro-batch on one device."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The policy loss and the keys of single losses."""
    clip_ratio_low: float = Field(0.2, gt=0, le=1)
    """PPO's clip below 1.

    gspo, cispo and geo_mean clip their own ratios with it. dppo_* bounds differences of
    probabilities, or the KL, with it.
    """
    clip_ratio_high: float = Field(0.2, gt=0)
    """PPO's clip above 1. A value over clip_ratio_low is DAPO's clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: upper bound on the ratio for negative advantages."""
    loss_agg_mode: AggMode | None = None
    """How token losses become one number.

    The mean or sum is over the tokens of the global mini-batch that rejection leaves. null means
    seq-mean-token-mean for gspo, sapo and geo_mean, and token-mean for all others.
    """
    loss_scale_factor: float = Field(0.0, ge=0)
    """Divisor of seq-mean-token-sum-norm. 0 means rollout.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss.

    The reference policy has the weights that RL started from.
    """
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: KlType = "low_var_kl"
    """Estimator of that KL.

    A name with + has the value of the named estimator and the gradient of k2, which is the gradient
    of the KL.
    """
    optim: OptimConfig = OptimConfig()
    """The policy's optimizer."""

    def check(self) -> None:
        self.optim.check_warmup("actor.optim")


class CriticConfig(Section):
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The critic's optimizer. Its schedule ends at the same step as the policy's."""
    cliprange_value: float = Field(0.5, gt=0)
    """Largest useful distance of a value from the critic's value at the batch's arrival.

    The value loss rewards no move beyond it.
    """

    def check(self) -> None:
        self.optim.check_warmup("critic.optim")


class KlCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed keeps the coefficient. adaptive steers it so that the KL reaches target_kl."""
    kl_coef: float = Field(0.001, ge=0)
    """The coefficient, or the first coefficient if type is adaptive."""
    target_kl: float = Field(0.1, gt=0)
    """adaptive: the KL per token to reach."""
    horizon: int = Field(10000, ge=1)
    """adaptive: over this many trajectories, the coefficient changes by at most a fifth."""


class FilterGroupsConfig(Section):
    enable: bool = False
    """Dynamic sampling (DAPO).

    Drop a sample if all its trajectories have the same outcome. It counts as `equal_outcomes`, and
    another prompt takes its slot at once.
    """
    metric: str = "score"
    """The outcome to compare.

    It is score (before any shaping), reward (after shaping), or a component that the reward
    function returns, such as acc.
    """
    max_num_gen_batches: int = Field(20, ge=0)
    """The run fails if more than this many windows of samples are dropped for one version.

    0 sets no limit.
    """


class CorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights against the mismatch of trainer and rollout.

    They are for each token, or for each response. A weight is a trainer probability over the
    rollout probability. With use_rollout_log_probs=false, the trainer probability is that of the
    old policy (see proximal). With true, it is that of the current policy, and the loss must have
    no ratio (gpg, reinforce).
    """
    rollout_is_threshold: float | str = 2.0
    """A number is an upper bound: larger weights become the bound (TIS).

    A pair "lo_hi" sets weights outside of it to 0 (IcePop).
    """
    rollout_is_batch_normalize: bool = False
    """Divide the truncated weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection rules, separated by commas. A token is trained if every rule accepts it.

    The rules are token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3 and seq_max_k2|k3.
    """
    rollout_rs_threshold: float | str | tuple[float | str, ...] | None = None
    """Bounds of rollout_rs: one for all rules, or one for each.

    k1 takes "lo_hi" on the ratio; a single number u means 1/u to u. k2 and k3 take an upper bound
    on the divergence.
    """
    rollout_token_veto_threshold: float | None = Field(None, gt=0)
    """Reject a whole response if the ratio of one of its tokens is below this."""
    max_token_age: int | None = Field(None, ge=0)
    """Reject tokens that are more than this many versions older than the live version."""
    reject_before_baseline: bool = False
    """Leave responses that are rejected whole out of their group's baseline too."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """The old policy of PPO's ratio if use_rollout_log_probs is false.

    recompute takes the trainer's policy at the batch's arrival, which costs a forward pass.
    interpolate mixes the rollout's and the current log-probs by each token's version, which costs
    none.
    """

    @property
    def active(self) -> bool:
        """Whether any weight, rule, veto or age limit is set."""
        return bool(
            self.rollout_is
            or self.rollout_rs
            or self.rollout_token_veto_threshold
            or self.max_token_age is not None
        )

    def check(self) -> None:
        prefix = "algorithm.rollout_correction"
        self.plan(bypass=False)
        if self.rollout_is_batch_normalize and not self.rollout_is:
            raise bad_value(
                f"{prefix}.rollout_is_batch_normalize",
                True,
                "there are no importance weights to normalise",
                f"{prefix}.rollout_is=token",
            )
        if not self.reject_before_baseline:
            return
        if not (self.rollout_rs or self.rollout_token_veto_threshold):
            raise bad_value(
                f"{prefix}.reject_before_baseline",
                True,
                "no rejection rule and no veto is set",
                f"{prefix}.rollout_rs=seq_mean_k1 {prefix}.rollout_rs_threshold=0.5_2.0",
            )
        if self.proximal == "interpolate":
            raise bad_value(
                f"{prefix}.reject_before_baseline",
                True,
                "an interpolated proximal policy is known only after the advantages are computed",
                f"{prefix}.proximal=recompute",
            )

    def plan(self, *, bypass: bool) -> CorrectionPlan:
        """Return the plan that this section describes.

        `bypass` is async_training.use_rollout_log_probs. Raises ConfigError if a threshold or a
        rule cannot be parsed.
        """
        threshold, rules = _rejection(self)
        options = CorrectionOptions(
            rollout_is=self.rollout_is,
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=self.rollout_is_batch_normalize,
            rollout_rs=rules,
            rollout_token_veto_threshold=self.rollout_token_veto_threshold,
        )
        interpolated = self.proximal == "interpolate"
        decoupled = Proximal.INTERPOLATED if interpolated else Proximal.RECOMPUTED
        return CorrectionPlan(
            options=options,
            proximal=Proximal.ROLLOUT if bypass else decoupled,
            max_token_age=self.max_token_age,
            before_baseline=self.reject_before_baseline,
        )


def _rejection(
    correction: CorrectionConfig,
) -> tuple[float | tuple[float, float], tuple[RejectionRule, ...]]:
    """Return the parsed threshold of the importance weights, and the rejection rules.

    Raises ConfigError if one of them cannot be parsed.
    """
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


Estimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "remax",
    "gae",
    "gdpo",
    "optimal_token_baseline",
]


class AlgorithmConfig(Section):
    adv_estimator: Estimator = "grpo"
    """Advantage estimator. docs/algorithms.md has the formulas. gae trains a critic."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo: divide advantages by the group's standard deviation.

    false is Dr.GRPO.
    """
    gamma: float = Field(1.0, gt=0, le=1)
    """gae, reinforce_plus_plus: discount of later rewards."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae: lambda."""
    bootstrap_truncated: bool = False
    """gae: bootstrap responses that the length limit cuts (T-PPO's EGAE).

    Their return ends with the critic's value in place of their score.
    """
    gdpo_reward_keys: tuple[str, ...] = ()
    """gdpo: names of the reward's components. Empty means all components."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """gdpo: one weight for each of these components. Empty means 1 for each."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference policy from the reward of each token.

    The KL is multiplied by kl_ctrl's coefficient.
    """
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """Estimator of that KL."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    """Coefficient of that KL."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    overlong_filtering: bool = False
    """Train no token of a response that the length limit cut.

    The response still counts in its group's baseline.
    """
    rollout_correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""

    @property
    def needs_critic(self) -> bool:
        return self.adv_estimator == "gae"

    def check(self) -> None:
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if weights and len(weights) != len(keys):
            raise bad_value(
                "algorithm.gdpo_reward_weights",
                list(weights),
                f"needs one weight for each of algorithm.gdpo_reward_keys = {list(keys)}",
                "as many weights as keys, or none",
            )
        if self.adv_estimator == "gdpo" and self.use_kl_in_reward:
            raise bad_value(
                "algorithm.use_kl_in_reward",
                True,
                "gdpo normalises each component of the reward by itself and has no component for "
                "a KL penalty",
                "actor.use_kl_loss=true",
            )
