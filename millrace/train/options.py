"""The options of a train engine, computed once from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from millrace.algorithms.advantage import AdvantageOptions, Estimator, TokenWeights
from millrace.algorithms.correction_plan import CorrectionPlan, CorrectionStage
from millrace.algorithms.distillation import Signal, k1
from millrace.algorithms.policy_loss import AggMode, LossOptions, PolicyLoss
from millrace.config import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    DistillationConfig,
    ModelConfig,
    OptimConfig,
    SftConfig,
    TeacherConfig,
    TrainerConfig,
)
from millrace.ports import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The sections and the numbers that an engine and the functions of its steps read."""

    trainer: TrainerConfig
    model: ModelConfig
    sft: SftConfig
    actor: ActorConfig
    critic: CriticConfig
    teachers: Mapping[str, TeacherConfig]
    algorithm: AlgorithmConfig
    distillation: DistillationConfig
    signal: Signal
    """The advantages that a teacher gives drawn tokens, if it gives no distributions."""
    correction: CorrectionPlan
    policy_loss: PolicyLoss
    loss: LossOptions
    estimator: Estimator
    advantages: AdvantageOptions
    token_weights: TokenWeights | None
    aggregation: AggMode
    loss_scale: float
    """Divisor of the mode seq-mean-token-sum-norm: Dr.GRPO's constant length."""
    critic_warmup: int
    """Number of optimizer steps in which only the critic learns."""
    temperature: float
    """Sampling temperature of rollouts."""
    max_tokens: int
    """Tokens of a full micro-batch."""
    lag_bound: int
    seed: int
    router_replay: str
    """model.router_replay."""
    needs_reference: bool

    @property
    def whole_trajectories(self) -> bool:
        """Whether the policy's loss needs all tokens of a trajectory in one micro-batch."""
        plan = self.correction
        by_sequence = self.loss.importance_sampling_level == "sequence"
        passing = plan.place is CorrectionStage.PASSING and plan.options.rollout_is != "token"
        masks = plan.off_policy_mask_threshold is not None
        return by_sequence or passing or masks or self.policy_loss.joins_tokens


def step_options(config: Config) -> StepOptions:
    actor, algorithm, loss = config.actor, config.algorithm, config.actor.policy_loss.loss
    return StepOptions(
        trainer=config.trainer,
        model=config.model,
        sft=config.sft,
        actor=actor,
        critic=config.critic,
        teachers=config.teachers,
        algorithm=algorithm,
        distillation=config.distillation,
        signal=config.distillation.own_signal
        or partial(k1, limit=config.distillation.max_log_ratio),
        correction=algorithm.rollout_correction.plan(
            bypass=config.async_training.use_rollout_log_probs
        ),
        policy_loss=loss,
        loss=actor.loss_options(),
        estimator=algorithm.estimator,
        advantages=algorithm.advantage_options(),
        token_weights=algorithm.weigh_tokens,
        aggregation=actor.loss_agg_mode
        or loss.default_aggregation(actor.policy_loss.importance_sampling_level),
        loss_scale=actor.loss_scale_factor or float(config.rollout.max_response_length),
        critic_warmup=config.critic_warmup_steps,
        temperature=config.rollout.temperature,
        max_tokens=config.max_tokens,
        lag_bound=config.schedule.lag_bound,
        seed=config.trainer.seed,
        router_replay=config.model.router_replay,
        needs_reference=config.needs_reference,
    )


def optim_of(optim: OptimConfig, sft: SftConfig, phase: Phase) -> OptimConfig:
    """Return the policy's optimizer settings in a phase."""
    if phase == "rl":
        return optim
    shape = {
        "lr": sft.lr,
        "lr_warmup_steps": sft.lr_warmup_steps,
        "lr_warmup_steps_ratio": 0.0,
        "lr_scheduler_type": "linear",
        "min_lr_ratio": 0.0,
    }
    return optim.model_copy(update=shape)
