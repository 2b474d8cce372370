"""The keys of losses, optimizers, advantages and the off-policy correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from millrace.algorithms.advantage import (
    AdvantageOptions,
    Estimator,
    TokenWeights,
    as_estimator,
)
from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.norm_options import Level, NormOptions
from millrace.algorithms.policy_loss import AggMode, LossOptions, PolicyLoss, as_policy_loss
from millrace.config.correction_keys import CorrectionConfig
from millrace.config.plugins import load as load_part
from millrace.config.plugins import names
from millrace.config.section import (
    Choice,
    Choices,
    Compared,
    Fixed,
    Past,
    ReadWith,
    Rule,
    Section,
    Switch,
)
from millrace.data.user_code import load
from millrace.errors import bad_value

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate. With 0, nothing is trained: use it to measure speed."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up. The first step uses lr / lr_warmup_steps."""
    lr_warmup_steps_ratio: Annotated[
        float,
        Past(
            "the warm-up keeps its length in steps from the first start of the run",
            lambda now, before, key: not now.value_of(key),
            "another value than 0",
        ),
    ] = Field(0.0, ge=0, le=1)
    """Share of the run's optimizer steps that are warm-up, rounded down to a whole step.

    It is used if lr_warmup_steps is 0. Set only one of the two keys.
    """
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up. It ends at the run's last optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a share of lr."""
    optimizer: Annotated[
        Literal["adamw", "muon"], Switch(), Fixed("the checkpoint has its moments")
    ] = "adamw"
    """muon: Muon for the matrices inside the layers, and AdamW for all other weights.

    Its steps have the rms of AdamW's, so a learning rate of AdamW fits.
    """
    muon_momentum: Annotated[Decay, ReadWith({".optimizer": ("muon",)})] = 0.95
    """Decay rate of Muon's momentum."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of AdamW. It applies to matrices only."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient.

    A larger gradient is scaled down to it. 0 disables clipping.
    """

    def warmup_steps(self, horizon: int) -> int:
        """Return the number of warm-up steps in a run of `horizon` optimizer steps."""
        # 1e-9 guards against rounding errors: 0.29 * 100 must be 29, not 28.
        return self.lr_warmup_steps or math.floor(self.lr_warmup_steps_ratio * horizon + 1e-9)

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.lr_warmup_steps and self.lr_warmup_steps_ratio,
            "lr_warmup_steps_ratio",
            f"{here}lr_warmup_steps is {self.lr_warmup_steps}, and both keys set the length of "
            "the warm-up",
            f"{here}lr_warmup_steps_ratio=0, or {here}lr_warmup_steps=0",
        )


KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+", "low_var_kl+"
]

_LOSS, _ESTIMATOR = "actor.policy_loss.loss_mode", "algorithm.adv_estimator"
_NO_REFERENCE = Compared("a change that adds or removes the reference policy")
_OF_EVERY_LOSS = {
    "clip_low": "actor.clip_ratio_low",
    "clip_high": "actor.clip_ratio_high",
    "clip_c": "actor.clip_ratio_c",
    "importance_sampling_level": "actor.policy_loss.importance_sampling_level",
}
"""The keys of the options that every loss has."""


class _Estimators(tuple[str, ...]):
    """The names of the package's estimators with a fact. A user's estimator is in it by its facts."""

    has: Callable[[Estimator], bool]

    @classmethod
    def that(cls, has: Callable[[Estimator], bool]) -> _Estimators:
        found = cls(x.name for x in ESTIMATORS.values() if has(x))
        found.has = has
        return found

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            name not in ESTIMATORS and self.has(_estimator(str(name)))
        )


def _estimator(name: str) -> Estimator:
    """Return an estimator by its name. Raises ConfigError if a user's cannot be imported."""
    return ESTIMATORS.get(name) or as_estimator(name, load_algorithm(_ESTIMATOR, name))


def _readers(option: str) -> Choice:
    """Return the estimators that read an option of AdvantageOptions."""
    return {".adv_estimator": _Estimators.that(lambda x: option in x.reads)}


_CRITIC: Choice = {_ESTIMATOR: _Estimators.that(lambda x: "values" in x.needs)}


_BY_STD = _readers("norm_by_std")


def load_algorithm(key: str, spec: str) -> Any:
    """Return the loss or the estimator of a user's file. Functions in other packages' forms adapt.

    Raises ConfigError if it cannot be imported.
    """
    forms = [load_part(key, name, "algorithm_forms") for name in names("algorithm_forms")]
    for form in forms:
        form.prepare()
    found: Any = load(key, spec, kind="policy loss or advantage estimator")
    for form in forms:
        found = form.adapted(found)
    return found


_OF_ESTIMATORS = ("gamma", "lam", "f_norm", "epsilon", "norm_adv_by_std_in_grpo")


def without_own_algorithm(tree: dict[str, Any], estimator: str = "grpo") -> dict[str, Any]:
    """Return a copy of a run's keys without a user's loss and weights, with `estimator` for a user's.

    Whoever reads a run needs none of them, must not run a user's code, and may lack its file. With an
    estimator of the package, the keys that only some estimators read are left out too.
    """
    tree = deepcopy(tree)
    loss, algorithm = (tree.get("actor") or {}).get("policy_loss"), tree.get("algorithm") or {}
    if loss and ":" in loss.get("loss_mode", ""):
        loss |= {"loss_mode": "vanilla", "options": {}, "importance_sampling_level": "token"}
    algorithm.pop("token_weights", None)
    if ":" in algorithm.get("adv_estimator", ""):
        algorithm["adv_estimator"] = estimator
        if ":" not in estimator:
            tree.pop("critic", None)
            for key in _OF_ESTIMATORS:
                algorithm.pop(key, None)
    return tree


class PolicyLossKeys(Section):
    """The keys of actor.policy_loss without the options of single losses."""

    loss_mode: Annotated[str, Choices(tuple(POLICY_LOSSES))] = "vanilla"
    """Policy loss: a name, or path.py:name for one of your own. docs/algorithms.md has the formulas."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """vanilla, cispo, sapo: the ratio of each token, or that of its whole response (as in gspo).

    The ratio of a response is the geometric mean of its tokens' ratios. vanilla with sequence is
    gspo with dual clip.
    """
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of the mini-batch's tokens that have a policy loss: those of highest entropy.

    1 means all. The others still count in denominators.
    """
    options: dict[str, Any] = Field({})
    """path.py:name: the options that a loss of your own names, NAME=VALUE."""

    @property
    def loss(self) -> PolicyLoss:
        """The loss that loss_mode names. Raises ConfigError if a user's cannot be imported."""
        if found := POLICY_LOSSES.get(self.loss_mode):
            return found
        return as_policy_loss(self.loss_mode, load_algorithm(_LOSS, self.loss_mode))

    def own_options(self) -> dict[str, Any]:
        """Return the values of the options that the loss adds to those of every loss."""
        if self.loss_mode in POLICY_LOSSES:
            return {name: getattr(self, name) for name in self.loss.own_options}
        return self.options

    def rules(self, here: str) -> Iterator[Rule]:
        loss = self.loss
        yield (
            self.options and self.loss_mode in POLICY_LOSSES,
            "options",
            f"the options of {self.loss_mode} are keys of actor.policy_loss",
            f"actor.policy_loss.{next(iter(self.options), '')}=VALUE",
        )
        by_response = sorted(name for name, x in POLICY_LOSSES.items() if x.sequence_level)
        yield (
            self.importance_sampling_level == "sequence" and not loss.sequence_level,
            "importance_sampling_level",
            f"{self.loss_mode} has no form with the ratio of a whole response",
            f"{_LOSS}={' or '.join(by_response)}, or token",
        )
        yield (
            self.top_entropy_quantile < 1 and loss.joint,
            "top_entropy_quantile",
            f"the loss {self.loss_mode} {loss.joint}",
            "actor.policy_loss.top_entropy_quantile=1, or another actor.policy_loss.loss_mode, "
            "such as gspo or clip_cov",
        )


def _with_options() -> type[PolicyLossKeys]:
    """Return the section with the options of all losses. Each is read with its own loss alone."""
    readers = dict[str, list[str]]()
    fields = dict[str, FieldInfo]()
    for name, loss in POLICY_LOSSES.items():
        for option in sorted(loss.own_options, key=list(loss.options.model_fields).index):
            readers.setdefault(option, []).append(name)
            fields[option] = copy(loss.options.model_fields[option])
    for option, field in fields.items():
        field.metadata = [*field.metadata, ReadWith({".loss_mode": tuple(readers[option])})]
    keys: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    return create_model("PolicyLossConfig", __base__=PolicyLossKeys, **keys)


if TYPE_CHECKING:
    PolicyLossConfig = PolicyLossKeys
else:
    PolicyLossConfig = _with_options()


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
    clip_ratio_low: float = Field(0.2, gt=0)
    """PPO's clip below 1. 1 or more clips no ratio there.

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

    def loss_options(self) -> LossOptions:
        """Return the options of the policy loss. Raises ConfigError for those of a user's loss."""
        own, loss = self.policy_loss.own_options(), self.policy_loss.loss
        if of_all := own.keys() & _OF_EVERY_LOSS.keys():
            key, rule = f"actor.policy_loss.options.{min(of_all)}", "another key sets it"
            raise bad_value(key, own[min(of_all)], rule, f"{_OF_EVERY_LOSS[min(of_all)]}=VALUE")
        try:
            return loss.options(
                clip_low=self.clip_ratio_low,
                clip_high=self.clip_ratio_high,
                clip_c=self.clip_ratio_c,
                importance_sampling_level=self.policy_loss.importance_sampling_level,
                **own,
            )
        except ValidationError as error:
            first = error.errors()[0]
            known = ", ".join(sorted(loss.own_options))
            unknown = first["type"] == "extra_forbidden"
            rule = f"{loss.name} has no such option" if unknown else first["msg"]
            fix = (f"one of {known}" if known else "remove it") if unknown else "another value"
            key = ".".join(map(str, ("actor.policy_loss.options", *first["loc"])))
            whole = not first["loc"] or first["type"] == "missing"
            raise bad_value(key, own if whole else first["input"], rule, fix) from None

    def rules(self, here: str) -> Iterator[Rule]:
        self.loss_options()
        key, twice = "use_bias_correction_kl", self.kl_loss_type.endswith("+")
        wanted = self.use_bias_correction_kl
        no_kl = wanted and not self.use_kl_loss
        yield no_kl, key, "there is no KL in the loss", "actor.use_kl_loss=true"
        yield (
            wanted and twice,
            key,
            f"{self.kl_loss_type} already has the gradient of the KL, and the ratio would add "
            "another one",
            f"actor.kl_loss_type={self.kl_loss_type.removesuffix('+')}",
        )


class CriticOptimConfig(OptimConfig):
    lr: float = Field(1e-5, ge=0)
    """Peak learning rate. With 0, nothing is trained: use it to measure speed."""


class CriticConfig(Section):
    optim: CriticOptimConfig = CriticOptimConfig()
    """The critic's optimizer. Its schedule ends at the same step as the policy's."""
    cliprange_value: Annotated[float, ReadWith(_CRITIC)] = Field(0.5, gt=0)
    """Largest useful distance of a value from the critic's value at the batch's arrival.

    The value loss rewards no move beyond it.
    """
    loss_fn_type: Annotated[Literal["mse", "huber"], ReadWith(_CRITIC)] = "mse"
    """Value loss: half the squared error, or Huber's, which is linear beyond huber_delta."""
    huber_delta: Annotated[float, ReadWith(_CRITIC | {".loss_fn_type": ("huber",)})] = Field(
        10.0, gt=0
    )
    """huber: the error beyond which the loss is linear."""


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
        return NormOptions(**self.model_dump())


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


class TppoConfig(Section):
    window: Annotated[
        int, Fixed("samples in flight continue responses that were cut into such windows")
    ] = Field(0, ge=0)
    """Tokens of a response that one sample draws and trains (T-PPO). 0 trains whole responses.

    The response continues in another sample, with the version that this one helped to make.
    """
    ignore_last_k: int = Field(0, ge=0)
    """Train no policy on the last k tokens of a window whose response goes on."""
    adaptive_lam: bool = False
    """lambda of a response is 1 - 1 / (0.05 x its length), and at least algorithm.lam (VAPO)."""

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.ignore_last_k and self.ignore_last_k >= self.window,
            "ignore_last_k",
            f"must be less than algorithm.tppo.window = {self.window}, or nothing is trained",
            "algorithm.tppo.ignore_last_k=0, or a larger algorithm.tppo.window",
        )


class AlgorithmConfig(Section):
    adv_estimator: Annotated[
        str,
        Choices(tuple(ESTIMATORS)),
        Compared(
            "a change to or from gae or remax, and with gdpo a reward without the components of the finished samples"
        ),
    ] = "grpo"
    """Advantage estimator: a name, or path.py:name for one of your own. gae trains a critic."""
    token_weights: Annotated[str, Choices(("",))] = ""
    """Factor of the advantage of each trained token: path.py:name of a function of your own."""
    norm_adv_by_std_in_grpo: Annotated[bool, Switch(), ReadWith(_BY_STD, {"rollout.n": (1,)})] = (
        True
    )
    """grpo, grpo_passk, gdpo: divide advantages by the group's standard deviation.

    false is Dr.GRPO.
    """
    epsilon: Annotated[
        float,
        ReadWith(
            _readers("f_norm") | {".f_norm": ("std",)},
            _BY_STD | {".norm_adv_by_std_in_grpo": (True,)},
        ),
    ] = Field(1e-6, gt=0)
    """grpo, grpo_passk, gdpo, gpg: added to the group's standard deviation."""
    f_norm: Annotated[
        Annotated[float, Field(gt=0)] | Literal["std"], ReadWith(_readers("f_norm"))
    ] = 1.0
    """gpg: divisor of the advantages, a number or std, the group's standard deviation."""
    reward_norm: NormConfig = NormConfig()
    """Normalisation of the scores before the estimator (AReaL)."""
    adv_norm: NormConfig = NormConfig()
    """Normalisation of the advantages over trained tokens (AReaL).

    It replaces the whitening of estimators that whiten.
    """
    gamma: Annotated[float, ReadWith(_readers("gamma"))] = Field(1.0, gt=0, le=1)
    """gae, reinforce_plus_plus: discount of later rewards."""
    lam: Annotated[float, ReadWith(_readers("lam"))] = Field(1.0, ge=0, le=1)
    """gae: lambda."""
    bootstrap_truncated: bool = False
    """gae: bootstrap responses that the length limit cuts (T-PPO's EGAE).

    Their return ends with the critic's value in place of their score.
    """
    tppo: TppoConfig = TppoConfig()
    """gae: train responses in windows, as they are drawn."""
    gdpo_reward_keys: Annotated[tuple[str, ...], ReadWith(_readers("component_weights"))] = ()
    """gdpo: names of the reward's components. Empty means all components."""
    gdpo_reward_weights: Annotated[tuple[float, ...], ReadWith(_readers("component_weights"))] = ()
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
    def estimator(self) -> Estimator:
        """The estimator that adv_estimator names. Raises ConfigError if a user's cannot be imported."""
        return _estimator(self.adv_estimator)

    @property
    def weigh_tokens(self) -> TokenWeights | None:
        """The function that token_weights names. Raises ConfigError if it cannot be imported."""
        key = "algorithm.token_weights"
        return load(key, self.token_weights) if self.token_weights else None

    @property
    def needs_critic(self) -> bool:
        return "values" in self.estimator.needs

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt gets a greedy response."""
        return "greedy_scores" in self.estimator.needs

    @property
    def needs_components(self) -> bool:
        return "components" in self.estimator.needs

    def advantage_options(self) -> AdvantageOptions:
        """Return the options of the estimator."""
        weights = dict(zip(self.gdpo_reward_keys, self.gdpo_reward_weights, strict=False))
        return AdvantageOptions(
            norm_by_std=self.norm_adv_by_std_in_grpo,
            gamma=self.gamma,
            lam=self.lam,
            component_weights=weights or None,
            bootstrap_truncated=self.bootstrap_truncated,
            adaptive_lam=self.tppo.adaptive_lam,
            whiten=not self.adv_norm.options().active,  # adv_norm replaces it
            eps=self.epsilon,
            f_norm=self.f_norm,
            reward_norm=self.reward_norm.options(),
            adv_norm=self.adv_norm.options(),
        )

    def rules(self, here: str) -> Iterator[Rule]:
        _ = self.weigh_tokens
        key, alone = "tppo.adaptive_lam", "whole responses have algorithm.lam alone"
        least = "algorithm.lam = 1 is the least lambda, so the length changes nothing"
        adapts, window = self.tppo.adaptive_lam, self.tppo.window
        yield adapts and not window, key, alone, "algorithm.tppo.window=TOKENS"
        yield adapts and self.lam == 1, key, least, "algorithm.lam=0.95"
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        yield (
            weights and len(weights) != len(keys),
            "gdpo_reward_weights",
            f"needs one weight for each of algorithm.gdpo_reward_keys = {list(keys)}",
            "as many weights as keys, or none",
        )
        part = self.estimator.not_normalised
        yield (
            part and self.reward_norm.options().active,
            "reward_norm",
            f"{self.adv_estimator} reads {part} of the reward, which it does not normalise",
            "algorithm.adv_norm in its place",
        )
        yield (
            self.needs_components and self.use_kl_in_reward,
            "use_kl_in_reward",
            f"{self.adv_estimator} normalises each component of the reward and has none for a KL "
            "penalty",
            "actor.use_kl_loss=true",
        )
