"""The keys of losses, optimizers, advantages and corrections."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import Field

from millrace.algorithms.correction_plan import CorrectionOptions, CorrectionPlan, Proximal
from millrace.algorithms.modes import AggMode, LossMode
from millrace.algorithms.rules import RULES, RejectionRule, parse_rules, parse_threshold
from millrace.config.section import Section
from millrace.errors import bad_value

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 trains nothing, to measure."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up; the first one has lr / lr_warmup_steps."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; its horizon is the true number of optimizer steps of the run."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of lr at the end of linear and cosine."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay, on matrices alone."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""


KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+", "low_var_kl+"
]


class PolicyLossConfig(Section):
    loss_mode: LossMode = "vanilla"
    """Policy loss; docs/algorithms.md has their formulas."""
    tau_pos: float = Field(1.0, gt=0)
    """sapo: temperature of its gate for advantages over 0."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: temperature of its gate for other advantages."""
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """clip_cov: share of the mini-batch's tokens that are detached."""
    clip_cov_lb: float = 1.0
    """clip_cov: least covariance of a token that may be detached."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of a token that may be detached."""
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """kl_cov: share of the mini-batch's tokens, those of largest covariance, that get a KL
    penalty."""
    ppo_kl_coef: float = Field(0.1, ge=0)
    """kl_cov: weight of that penalty."""
    dppo_clip_c: float = Field(20.0, gt=1)
    """dppo_tv, dppo_kl: bound on the ratio as a weight."""
    dro_beta: float = Field(0.05, gt=0)
    """dro: weight of the squared log-ratio, on the scale of the advantages."""


class ActorConfig(Section):
    ppo_mini_batch_size: int = Field(32, ge=1)
    """Samples in one optimizer step, global over all devices."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each batch that the trainer takes."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens packed into one micro-batch on one device."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Which loss, and what belongs to it alone."""
    clip_ratio_low: float = Field(0.2, gt=0, le=1)
    """PPO clip below 1; gspo, cispo and geo_mean clip their own ratios by it, dppo_* differences of
    probabilities or KL."""
    clip_ratio_high: float = Field(0.2, gt=0)
    """PPO clip above 1; larger than clip_ratio_low is DAPO's clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: bound on the ratio for negative advantages."""
    loss_agg_mode: AggMode | None = None
    """How token losses become one number, always over the global mini-batch and what rejection
    leaves of it; null is seq-mean-token-mean for gspo, sapo and geo_mean, and token-mean for the
    others."""
    loss_scale_factor: float = Field(0.0, ge=0)
    """Divisor of seq-mean-token-sum-norm; 0 takes rollout.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy, the weights that RL started from, to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: KlType = "low_var_kl"
    """Its estimator; a + takes the value of the one and the gradient of k2, which is that of the
    KL."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""


class CriticConfig(Section):
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The critic's optimizer; its schedule has the actor's horizon."""
    cliprange_value: float = Field(0.5, gt=0)
    """Values may move this far from those of the batch's arrival before the value loss stops to
    reward it."""


class KlCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive steers the coefficient to target_kl."""
    kl_coef: float = Field(0.001, ge=0)
    """Coefficient, or where an adaptive one starts."""
    target_kl: float = Field(0.1, gt=0)
    """KL per token that the adaptive coefficient aims at."""
    horizon: int = Field(10000, ge=1)
    """Trajectories over which the adaptive coefficient may change by a fifth."""


class FilterGroupsConfig(Section):
    enable: bool = False
    """Dynamic sampling (DAPO): a sample whose trajectories all have the same outcome is dropped,
    counted as `equal_outcomes`, and another prompt takes its slot at once."""
    metric: str = "score"
    """What is compared: score (of the reward function, before any shaping), reward (what is trained
    on), or the name of a component that the reward function returns, such as acc."""
    max_num_gen_batches: int = Field(20, ge=0)
    """The run fails if more than this many windows of samples are dropped for one version; 0 sets
    no limit."""


class CorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights of the policy that the loss is taken against over the one that drew the
    tokens: of each token, or of whole responses. Without use_rollout_log_probs that is the
    trainer's own policy over the rollout's; with it, and a loss without a ratio (gpg, reinforce),
    the current one's over the rollout's."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates weights to it (TIS); "lo_hi" sets those outside to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide weights, after truncation, by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection, a comma list of token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3,
    seq_max_k2|k3: all must accept."""
    rollout_rs_threshold: float | str | tuple[float | str, ...] | None = None
    """Bounds, one for each of rollout_rs or one for all: "lo_hi" on the ratio for k1 (u alone means
    1/u to u), an upper bound on the divergence for k2 and k3."""
    rollout_token_veto_threshold: float | None = Field(None, gt=0)
    """Reject whole responses in which one token's ratio is under this."""
    max_token_age: int | None = Field(None, ge=0)
    """Reject tokens drawn more than this many versions before the live one."""
    reject_before_baseline: bool = False
    """Responses that are rejected whole are in no group's baseline either."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """The policy that PPO's ratio is taken against without use_rollout_log_probs: the trainer's at
    the batch's arrival, which takes a forward pass, or interpolated between rollout and current
    log-probs by each token's version, which takes none."""

    @property
    def active(self) -> bool:
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
                "there are no weights",
                f"{prefix}.rollout_is=token",
            )
        if not self.reject_before_baseline:
            return
        if not (self.rollout_rs or self.rollout_token_veto_threshold):
            raise bad_value(
                f"{prefix}.reject_before_baseline",
                True,
                "no rule and no veto rejects anything",
                f"{prefix}.rollout_rs=seq_mean_k1 {prefix}.rollout_rs_threshold=0.5_2.0",
            )
        if self.proximal == "interpolate":
            raise bad_value(
                f"{prefix}.reject_before_baseline",
                True,
                "an interpolated proximal policy is known only after advantages are",
                f"{prefix}.proximal=recompute",
            )

    def plan(self, *, bypass: bool) -> CorrectionPlan:
        """Return what this section asks for. `bypass` is async_training.use_rollout_log_probs.

        Raises ConfigError if a threshold or a rule cannot be parsed.
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
    """Advantage estimator; docs/algorithms.md has their formulas. gae trains a critic."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (grpo, grpo_passk, gdpo); off is Dr.GRPO."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards (gae, reinforce_plus_plus)."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae's lambda."""
    bootstrap_truncated: bool = False
    """gae: a response that the length limit cut ends in the critic's value, not in its score
    (T-PPO's EGAE)."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """gdpo: components of the reward, by the names that the reward function returns; empty takes
    all of them."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """gdpo: their weights; empty is 1 for each."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl's coefficient times the KL to the reference policy from the reward of each
    token."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """Estimator of that KL."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    """Its coefficient."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    overlong_filtering: bool = False
    """Responses cut by the length limit count in baselines, but none of their tokens is trained."""
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
                "gdpo normalises each component of the reward by itself: a KL penalty has no place "
                "among them",
                "actor.use_kl_loss=true in its place",
            )
