"""A configuration as options: of the functions of `millrace.algorithms`, and of an optimizer."""

from __future__ import annotations

from millrace.algorithms.correction import CorrectionOptions
from millrace.algorithms.estimators import AdvantageOptions
from millrace.algorithms.loss_input import LossOptions
from millrace.algorithms.modes import AggMode, default_aggregation
from millrace.config import Config, OptimConfig
from millrace.config_checks import rejection_options
from millrace.ports import Phase


def optim_of(config: Config, phase: Phase) -> OptimConfig:
    """The policy's optimizer in a phase."""
    optim, sft = config.actor.optim, config.sft
    if phase == "rl":
        return optim
    shape = {
        "lr": sft.lr,
        "lr_warmup_steps": sft.lr_warmup_steps,
        "lr_scheduler_type": "linear",
        "min_lr_ratio": 0.0,
    }
    return optim.model_copy(update=shape)


def loss_options(config: Config) -> LossOptions:
    actor, own = config.actor, config.actor.policy_loss
    return LossOptions(
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        tau_pos=own.tau_pos,
        tau_neg=own.tau_neg,
        dro_beta=own.dro_beta,
        ppo_kl_coef=own.ppo_kl_coef,
        dppo_clip_c=own.dppo_clip_c,
    )


def aggregation(config: Config) -> AggMode:
    return config.actor.loss_agg_mode or default_aggregation(config.actor.policy_loss.loss_mode)


def loss_scale(config: Config) -> float:
    """Divisor of seq-mean-token-sum-norm: Dr.GRPO's constant length."""
    return config.actor.loss_scale_factor or float(config.rollout.max_response_length)


def correction_options(config: Config) -> CorrectionOptions:
    correction = config.algorithm.rollout_correction
    threshold, rules = rejection_options(config)
    return CorrectionOptions(
        rollout_is=correction.rollout_is,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        rollout_rs=rules,
        rollout_token_veto_threshold=correction.rollout_token_veto_threshold,
    )


def advantage_options(config: Config) -> AdvantageOptions:
    algorithm = config.algorithm
    weights = dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False))
    return AdvantageOptions(
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        component_weights=weights or None,
        bootstrap_truncated=algorithm.bootstrap_truncated,
    )
