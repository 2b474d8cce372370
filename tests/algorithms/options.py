"""Options with all numbers set, because the algorithms have no defaults of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millrace.algorithms.advantage import AdvantageOptions
from millrace.algorithms.correction_plan import CorrectionOptions
from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.norm_options import NormOptions


def loss_options(**keys: Any) -> SimpleNamespace:
    """Return the options of all losses at once. A value out of range raises ValueError."""
    found = dict[str, Any]()
    for loss in POLICY_LOSSES.values():
        own = {name: value for name, value in keys.items() if name in loss.options.model_fields}
        found |= loss.options(**own).model_dump()
    assert keys.keys() <= found.keys()
    return SimpleNamespace(**found)


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
