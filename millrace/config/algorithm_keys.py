"""The keys of losses, optimizers and advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.algorithms.modes import JOINT, SEQUENCE_LEVEL, AggMode, LossMode
from millrace.algorithms.norm_options import Level, NormOptions
from millrace.config.correction_keys import CorrectionConfig
from millrace.config.facts import Compared, Past, ReadWith, Switch
from millrace.config.optim_keys import OptimConfig
from millrace.config.section import Section
from millrace.errors import bad_value

KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+", "low_var_kl+"
]

_NO_REFERENCE = Compared("a change that adds or removes the reference policy")
_GAE = {"algorithm.adv_estimator": ("gae",)}
_BY_STD = {".adv_estimator": ("grpo", "grpo_passk", "gdpo")}


def _loss(*modes: str) -> ReadWith:
    return ReadWith({".loss_mode": modes})


def _estimator(*names: str) -> ReadWith:
    return ReadWith({".adv_estimator": names})


class PolicyLossConfig(Section):
    loss_mode: LossMode = "vanilla"
    """Policy loss. docs/algorithms.md has the formulas."""
    tau_pos: Annotated[float, _loss("sapo")] = Field(1.0, gt=0)
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: Annotated[float, _loss("sapo")] = Field(1.05, gt=0)
    """sapo: temperature of the gate for zero and negative advantages."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """vanilla, cispo, sapo: the ratio of each token, or that of its whole response (as in gspo).

    The ratio of a response is the geometric mean of its tokens' ratios. vanilla with sequence is
    gspo with dual clip.
    """
    vespo_k_pos: Annotated[float, _loss("vespo")] = Field(2.0, ge=0)
    """vespo: exponent of the response's ratio for positive advantages."""
    vespo_lambda_pos: Annotated[float, _loss("vespo")] = Field(3.0, gt=0)
    """vespo: decay by the response's ratio for positive advantages."""
    vespo_k_neg: Annotated[float, _loss("vespo")] = Field(3.0, ge=0)
    """vespo: exponent of the response's ratio for zero and negative advantages."""
    vespo_lambda_neg: Annotated[float, _loss("vespo")] = Field(2.0, gt=0)
    """vespo: decay by the response's ratio for zero and negative advantages."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of the mini-batch's tokens that have a policy loss: those of highest entropy.

    1 means all. The others still count in denominators.
    """
    clip_cov_ratio: Annotated[float, _loss("clip_cov")] = Field(2e-4, gt=0, le=1)
    """clip_cov: share of the mini-batch's tokens that are detached."""
    clip_cov_lb: Annotated[float, _loss("clip_cov")] = 1.0
    """clip_cov: a token may be detached only if its covariance is at least this."""
    clip_cov_ub: Annotated[float, _loss("clip_cov")] = 5.0
    """clip_cov: a token may be detached only if its covariance is at most this."""
    kl_cov_ratio: Annotated[float, _loss("kl_cov")] = Field(2e-4, gt=0, le=1)
    """kl_cov: share of the mini-batch's tokens that get a KL penalty.

    The tokens with the largest covariance are chosen.
    """
    ppo_kl_coef: Annotated[float, _loss("kl_cov")] = Field(0.1, ge=0)
    """kl_cov: weight of that penalty."""
    dppo_clip_c: Annotated[float, _loss("dppo_tv", "dppo_kl")] = Field(20.0, gt=1)
    """dppo_tv, dppo_kl: upper bound on the ratio that weights a token."""
    dro_beta: Annotated[float, _loss("dro")] = Field(0.05, gt=0)
    """dro: weight of the squared log-ratio, on the scale of the advantages."""

    def check(self) -> None:
        if self.importance_sampling_level == "sequence" and self.loss_mode not in SEQUENCE_LEVEL:
            raise bad_value(
                "actor.policy_loss.importance_sampling_level",
                "sequence",
                f"{self.loss_mode} has no form with the ratio of a whole response",
                f"actor.policy_loss.loss_mode={' or '.join(sorted(SEQUENCE_LEVEL))}, or token",
            )
        if self.top_entropy_quantile < 1 and self.loss_mode in JOINT:
            raise bad_value(
                "actor.policy_loss.top_entropy_quantile",
                self.top_entropy_quantile,
                f"the loss {self.loss_mode} {JOINT[self.loss_mode]}",
                "actor.policy_loss.top_entropy_quantile=1, or another "
                "actor.policy_loss.loss_mode, such as gspo or clip_cov",
            )


class ActorConfig(Section):
    ppo_mini_batch_size: int = Field(32, ge=1)
    """Samples in one optimizer step, over all devices together."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each batch that the trainer takes."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens packed into one micro-batch on one device.

    Ranks that share tokens have a micro-batch together. It has this many tokens for each of them.
    """
    ulysses_sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share the tokens of a micro-batch. They exchange heads for tokens in attention.

    It is for rows that are too long for one device, and divides the number of ranks and the heads.
    All models share tokens: the policy, the reference and the critic.
    """
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The policy loss and the keys of single losses."""
    clip_ratio_low: float = Field(0.2, gt=0, le=1)
    """PPO's clip below 1. 1 clips no ratio there, as a larger value in verl does.

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
    seq-mean-token-mean for gspo, sapo, geo_mean and importance_sampling_level=sequence, and
    token-mean for all others.
    """
    loss_scale_factor: Annotated[
        float, ReadWith({".loss_agg_mode": ("seq-mean-token-sum-norm",)})
    ] = Field(0.0, ge=0)
    """Divisor of seq-mean-token-sum-norm. 0 means rollout.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: Annotated[bool, Switch(), _NO_REFERENCE] = False
    """Add the KL to the reference policy to the loss.

    The reference policy has the weights that RL started from.
    """
    kl_loss_coef: Annotated[float, ReadWith({".use_kl_loss": (True,)})] = Field(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: Annotated[KlType, ReadWith({".use_kl_loss": (True,)})] = "low_var_kl"
    """Estimator of that KL.

    A name with + has the value of the named estimator and the gradient of k2, which is the gradient
    of the KL.
    """
    use_bias_correction_kl: bool = False
    """Multiply that KL by the ratio of the current to the old policy (DeepSeek-V3.2).

    The estimate is then unbiased for tokens that the old policy drew.
    """
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the loss that balances the experts of a mixture: Megatron's seq_aux_loss.

    The loss of a sequence and a layer is 1 if all experts are used alike. It is added up over
    layers, and its mean is over the sequences of the global mini-batch.
    """
    optim: OptimConfig = OptimConfig()
    """The policy's optimizer."""

    def check(self) -> None:
        self.optim.check_warmup("actor.optim")
        key = "actor.use_bias_correction_kl"
        if self.use_bias_correction_kl and not self.use_kl_loss:
            raise bad_value(key, True, "there is no KL in the loss", "actor.use_kl_loss=true")
        if self.use_bias_correction_kl and self.kl_loss_type.endswith("+"):
            plain = self.kl_loss_type.removesuffix("+")
            raise bad_value(
                key,
                True,
                f"{self.kl_loss_type} already has the gradient of the KL, and the ratio would add "
                "another one",
                f"actor.kl_loss_type={plain}",
            )


class CriticConfig(Section):
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The critic's optimizer. Its schedule ends at the same step as the policy's."""
    cliprange_value: Annotated[float, ReadWith(_GAE)] = Field(0.5, gt=0)
    """Largest useful distance of a value from the critic's value at the batch's arrival.

    The value loss rewards no move beyond it.
    """
    loss_fn_type: Annotated[Literal["mse", "huber"], ReadWith(_GAE)] = "mse"
    """Value loss: half the squared error, or Huber's, which is linear beyond huber_delta."""
    huber_delta: Annotated[float, ReadWith(_GAE | {".loss_fn_type": ("huber",)})] = Field(
        10.0, gt=0
    )
    """huber: the error beyond which the loss is linear."""

    def check(self) -> None:
        self.optim.check_warmup("critic.optim")


class KlCtrlConfig(Section):
    type: Annotated[
        Literal["fixed", "adaptive"], ReadWith({"algorithm.use_kl_in_reward": (True,)})
    ] = "fixed"
    """fixed keeps the coefficient. adaptive steers it so that the KL reaches target_kl."""
    kl_coef: Annotated[
        float,
        ReadWith({"algorithm.use_kl_in_reward": (True,)}),
        Past(
            "the adaptive coefficient continues from the checkpoint",
            lambda now, before, key: now.algorithm.kl_ctrl.type == "fixed",
            "another value with the adaptive controller",
        ),
    ] = Field(0.001, ge=0)
    """The coefficient, or the first coefficient if type is adaptive."""
    target_kl: Annotated[float, ReadWith({".type": ("adaptive",)})] = Field(0.1, gt=0)
    """adaptive: the KL per token to reach."""
    horizon: Annotated[int, ReadWith({".type": ("adaptive",)})] = Field(10000, ge=1)
    """adaptive: over this many trajectories, the coefficient changes by at most a fifth."""


class NormConfig(Section):
    mean_level: Level | None = None
    """Subtract the mean of the batch or of the group. null subtracts none."""
    mean_leave1out: Annotated[bool, ReadWith({".mean_level": ("group", "batch")})] = False
    """Leave each value out of its own mean."""
    std_level: Level | None = None
    """Divide by the standard deviation of the batch or of the group. null does not divide."""
    std_unbiased: Annotated[bool, ReadWith({".std_level": ("group", "batch")})] = True
    """Divide the squares by n - 1, and not by n."""
    eps: Annotated[float, ReadWith({".std_level": ("group", "batch")})] = Field(1e-5, gt=0)
    """Added to the standard deviation."""

    @property
    def levels(self) -> dict[str, Level | None]:
        """The values of the keys that name a level."""
        return {"mean_level": self.mean_level, "std_level": self.std_level}

    def options(self) -> NormOptions:
        return NormOptions(
            mean_level=self.mean_level,
            mean_leave1out=self.mean_leave1out,
            std_level=self.std_level,
            std_unbiased=self.std_unbiased,
            eps=self.eps,
        )


class FilterGroupsConfig(Section):
    enable: Annotated[bool, Switch()] = False
    """Dynamic sampling (DAPO).

    Drop a sample if all its trajectories have the same outcome. It counts as `equal_outcomes`, and
    another prompt takes its slot at once.
    """
    metric: Annotated[str, ReadWith({".enable": (True,)})] = "score"
    """The outcome to compare.

    It is score (before any shaping), reward (after shaping), or a component that the reward
    function returns, such as acc.
    """
    max_num_gen_batches: Annotated[int, ReadWith({".enable": (True,)})] = Field(20, ge=0)
    """The run fails if more than this many windows of samples are dropped for one version.

    0 sets no limit.
    """


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
    adv_estimator: Annotated[
        Estimator,
        Compared(
            "a change to or from gae or remax, and with gdpo a reward without the components of the finished samples"
        ),
    ] = "grpo"
    """Advantage estimator. docs/algorithms.md has the formulas. gae trains a critic."""
    norm_adv_by_std_in_grpo: Annotated[bool, Switch(), ReadWith(_BY_STD, {"rollout.n": (1,)})] = (
        True
    )
    """grpo, grpo_passk, gdpo: divide advantages by the group's standard deviation.

    false is Dr.GRPO.
    """
    epsilon: Annotated[
        float,
        ReadWith(
            {".adv_estimator": ("gpg",), ".f_norm": ("std",)},
            _BY_STD | {".norm_adv_by_std_in_grpo": (True,)},
        ),
    ] = Field(1e-6, gt=0)
    """grpo, grpo_passk, gdpo, gpg: added to the group's standard deviation."""
    f_norm: Annotated[Annotated[float, Field(gt=0)] | Literal["std"], _estimator("gpg")] = 1.0
    """gpg: divisor of the advantages, a number or std, the group's standard deviation."""
    reward_norm: NormConfig = NormConfig()
    """Normalisation of the scores before the estimator (AReaL)."""
    adv_norm: NormConfig = NormConfig()
    """Normalisation of the advantages over trained tokens (AReaL).

    It replaces the whitening of estimators that whiten.
    """
    gamma: Annotated[float, _estimator("gae", "reinforce_plus_plus")] = Field(1.0, gt=0, le=1)
    """gae, reinforce_plus_plus: discount of later rewards."""
    lam: Annotated[float, _estimator("gae")] = Field(1.0, ge=0, le=1)
    """gae: lambda."""
    bootstrap_truncated: bool = False
    """gae: bootstrap responses that the length limit cuts (T-PPO's EGAE).

    Their return ends with the critic's value in place of their score.
    """
    gdpo_reward_keys: Annotated[tuple[str, ...], _estimator("gdpo")] = ()
    """gdpo: names of the reward's components. Empty means all components."""
    gdpo_reward_weights: Annotated[tuple[float, ...], _estimator("gdpo")] = ()
    """gdpo: one weight for each of these components. Empty means 1 for each."""
    use_kl_in_reward: Annotated[bool, Switch(), _NO_REFERENCE] = False
    """Subtract the KL to the reference policy from the reward of each token.

    The KL is multiplied by kl_ctrl's coefficient.
    """
    kl_penalty: Annotated[
        Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"],
        ReadWith({".use_kl_in_reward": (True,)}),
    ] = "kl"
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

    @property
    def whitens(self) -> bool:
        """Whether estimators that whiten do so: adv_norm replaces it."""
        return not self.adv_norm.options().active

    def check(self) -> None:
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if weights and len(weights) != len(keys):
            raise bad_value(
                "algorithm.gdpo_reward_weights",
                list(weights),
                f"needs one weight for each of algorithm.gdpo_reward_keys = {list(keys)}",
                "as many weights as keys, or none",
            )
        if self.adv_estimator in ("gdpo", "remax") and self.reward_norm.options().active:
            part = "the components" if self.adv_estimator == "gdpo" else "the greedy scores"
            raise bad_value(
                "algorithm.reward_norm",
                self.reward_norm.model_dump(),
                f"{self.adv_estimator} reads {part} of the reward, which it does not normalise",
                "algorithm.adv_norm in its place",
            )
        if self.adv_estimator == "gdpo" and self.use_kl_in_reward:
            raise bad_value(
                "algorithm.use_kl_in_reward",
                True,
                "gdpo normalises each component of the reward by itself and has no component for "
                "a KL penalty",
                "actor.use_kl_loss=true",
            )
