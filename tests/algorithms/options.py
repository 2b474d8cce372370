"""Options with all numbers set, because the algorithms have no defaults of their own."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.correction_plan import CorrectionOptions
from millrace.algorithms.estimators import AdvantageOptions
from millrace.algorithms.loss_input import LossOptions
from millrace.algorithms.norm_options import NormOptions


def loss_options(**keys: Any) -> LossOptions:
    given: dict[str, Any] = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "clip_c": 3.0,
        "importance_sampling_level": "token",
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "dro_beta": 0.05,
        "ppo_kl_coef": 0.1,
        "dppo_clip_c": 20.0,
    }
    return LossOptions(**given | keys)


def norm_options(**keys: Any) -> NormOptions:
    """Return options of a normalisation. Without keys, it does nothing."""
    given: dict[str, Any] = {
        "mean_level": None,
        "mean_leave1out": False,
        "std_level": None,
        "std_unbiased": True,
        "eps": 1e-5,
    }
    return NormOptions(**given | keys)


def advantage_options(**keys: Any) -> AdvantageOptions:
    given: dict[str, Any] = {
        "norm_by_std": True,
        "gamma": 1.0,
        "lam": 1.0,
        "component_weights": None,
        "bootstrap_truncated": False,
        "whiten": True,
        "eps": 1e-6,
        "f_norm": 1.0,
        "reward_norm": norm_options(),
        "adv_norm": norm_options(),
    }
    return AdvantageOptions(**given | keys)


def correction_options(**keys: Any) -> CorrectionOptions:
    given: dict[str, Any] = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_threshold_lower": None,
        "rollout_is_batch_normalize": False,
        "rollout_rs": (),
        "rollout_token_veto_threshold": None,
        "m2_threshold": None,
    }
    return CorrectionOptions(**given | keys)
