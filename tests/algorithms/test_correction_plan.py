"""The place of a correction follows from its kind and from the proximal policy."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.algorithms.correction_plan import (
    CorrectionPlan,
    CorrectionStage,
    Proximal,
    RejectionRule,
)
from tests.algorithms.options import correction_options

RULE = {"rollout_rs": (RejectionRule("seq_mean_k1", 0.5, 2.0),)}
MOMENT = {"m2_threshold": 0.04}
VETO = {"rollout_token_veto_threshold": 1e-4}
WEIGHTS = {"rollout_is": "token"}
NORMALISED = WEIGHTS | {"rollout_is_batch_normalize": True}


def plan(proximal: Any, *, age: Any = None, before: Any = False, **keys: Any) -> CorrectionPlan:
    return CorrectionPlan(
        options=correction_options(**keys),
        proximal=proximal,
        max_token_age=age,
        before_baseline=before,
        off_policy_mask_threshold=None,
    )


@pytest.mark.parametrize("keys", [WEIGHTS, NORMALISED, RULE, VETO, MOMENT, WEIGHTS | RULE])
def test_with_a_recomputed_proximal_policy_it_is_made_at_arrival(keys: Any) -> None:
    assert plan(Proximal.RECOMPUTED, **keys).place is CorrectionStage.ARRIVAL


@pytest.mark.parametrize("proximal", [Proximal.ROLLOUT, Proximal.INTERPOLATED, Proximal.LINEAR])
@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({}, CorrectionStage.NOWHERE),
        (WEIGHTS, CorrectionStage.PASSING),
        (NORMALISED, CorrectionStage.MINI_BATCH),
        (RULE, CorrectionStage.MINI_BATCH),
        (VETO, CorrectionStage.MINI_BATCH),
        (MOMENT, CorrectionStage.MINI_BATCH),
        (WEIGHTS | VETO, CorrectionStage.MINI_BATCH),
    ],
)
def test_else_it_is_made_in_passing_where_it_is_of_single_sequences(
    proximal: Any, keys: Any, place: Any
) -> None:
    assert plan(proximal, **keys).place is place


def test_baselines_without_rejected_sequences_need_it_at_arrival() -> None:
    assert plan(Proximal.ROLLOUT, before=True, **RULE).place is CorrectionStage.ARRIVAL


@pytest.mark.parametrize(
    ("proximal", "place"),
    [(Proximal.RECOMPUTED, CorrectionStage.ARRIVAL), (Proximal.ROLLOUT, CorrectionStage.NOWHERE)],
)
def test_a_limit_on_age_is_active_without_weights_or_rejection(proximal: Any, place: Any) -> None:
    shown = plan(proximal, age=2)
    assert shown.active and not shown.weighs and shown.place is place
    assert not plan(proximal).active and plan(proximal).place is CorrectionStage.NOWHERE
