"""Options with all numbers set, because the algorithms have no defaults of their own."""

from __future__ import annotations

from typing import Any

from millrace.algorithms.correction_plan import CorrectionOptions
from millrace.algorithms.estimators import AdvantageOptions
from millrace.algorithms.loss_input import LossOptions


def loss_options(**keys: Any) -> LossOptions:
    given = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "clip_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "dro_beta": 0.05,
        "ppo_kl_coef": 0.1,
        "dppo_clip_c": 20.0,
    }
    return LossOptions(**given | keys)


def advantage_options(**keys: Any) -> AdvantageOptions:
    given: dict[str, Any] = {
        "norm_by_std": True,
        "gamma": 1.0,
        "lam": 1.0,
        "component_weights": None,
        "bootstrap_truncated": False,
        "whiten": True,
    }
    return AdvantageOptions(**given | keys)


def correction_options(**keys: Any) -> CorrectionOptions:
    given: dict[str, Any] = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": (),
        "rollout_token_veto_threshold": None,
    }
    return CorrectionOptions(**given | keys)
