"""Rejection rules: their syntax, their errors, and accepted values computed by hand.

test_correction.py compares the numbers with NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.correction import Ratios, accept, off_policy_mask
from millrace.algorithms.correction_plan import RejectionRule, parse_rules, parse_threshold
from millrace.algorithms.ragged import sequence_ids


def double(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids_of(lengths: Any) -> tuple[torch.Tensor, int]:
    """Return the sequence of each token, and the number of sequences."""
    return sequence_ids(torch.tensor(lengths, dtype=torch.long)), len(lengths)


def ratios_of(a: torch.Tensor, b: torch.Tensor, lengths: Any) -> Ratios:
    return Ratios.of(a, b, *ids_of(lengths), None)


def accepted(rule: Any, *sequences: Any) -> Any:
    """Apply the rule to sequences of ratios."""
    logs = double([math.log(r) for s in sequences for r in s])
    return accept(rule, ratios_of(logs, torch.zeros_like(logs), [len(s) for s in sequences]))


@pytest.mark.parametrize(
    ("rule", "keep", "mean"),
    [
        # The ratios are 2, 4, 0.5 in the first sequence and 1, 0.25 in the second.
        (RejectionRule("token_k1", 0.5, 2.0), [True, False, True, True, False], 1.55),
        (RejectionRule("seq_sum_k1", 0.5, 4.0), [True, True, True, False, False], (4 + 0.25) / 2),
        (
            RejectionRule("seq_mean_k1", 0.5, 1.5),
            [False, False, False, True, True],
            (4 ** (1 / 3) + 0.5) / 2,
        ),
        (
            RejectionRule("token_k2", None, 0.5),
            [True, False, True, True, False],
            math.log(2) ** 2 * (1 + 4 + 1 + 0 + 4) / 10,
        ),
        (RejectionRule("seq_max_k1", 0.5, 3.0), [False, False, False, True, True], 2.5),
        (RejectionRule("seq_max_k2", None, math.log(4) ** 2 / 2), [True] * 5, math.log(4) ** 2 / 2),
        (
            RejectionRule("seq_sum_k3", None, 1.0),
            [False, False, False, True, True],
            ((1 + 3 - 0.5 - math.log(4)) + (math.log(4) - 0.75)) / 2,
        ),
    ],
)
def test_rules_by_hand(rule: Any, keep: Any, mean: Any) -> None:
    got, metrics = accepted(rule, [2.0, 4.0, 0.5], [1.0, 0.25])
    assert got.tolist() == keep
    assert metrics["mean"].item() == pytest.approx(mean)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (2.0, 2.0),
        (2, 2.0),
        ("2", 2.0),
        (" 5e-1 ", 0.5),
        ("0.5_5.0", (0.5, 5.0)),
        ("1e-4_2", (1e-4, 2.0)),
        ("0_5", (0.0, 5.0)),
    ],
)
def test_a_threshold_is_a_number_or_a_pair(text: Any, value: Any) -> None:
    assert parse_threshold(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "0.5_",
        "_5",
        "1_2_3",
        "0.5-5.0",
        "2_1",
        "0",
        0.0,
        -1.0,
        "-1_2",
        True,
        math.nan,
        "nan_2",
        "0_0",
    ],
)
def test_what_is_no_threshold_is_refused_and_shown(text: Any) -> None:
    with pytest.raises(ValueError, match=r"threshold|0 <= lower <= upper"):
        parse_threshold(text)


def test_rules_are_spelled_as_in_verl() -> None:
    assert parse_rules(None, None) == parse_rules("", None) == parse_rules([], None) == ()
    assert parse_rules("token_k1", "0.5_5.0") == (RejectionRule("token_k1", 0.5, 5.0),)
    assert parse_rules("token_k1, seq_mean_k3", "0.5_2.0, 0.01") == (
        RejectionRule("token_k1", 0.5, 2.0),
        RejectionRule("seq_mean_k3", None, 0.01),
    )
    assert parse_rules(["token_k1", "seq_mean_k3"], ["0.5_2.0", 0.01]) == parse_rules(
        "token_k1,seq_mean_k3", "0.5_2.0,0.01"
    )
    assert parse_rules("seq_max_k2,seq_max_k3", 1.5) == (
        RejectionRule("seq_max_k2", None, 1.5),
        RejectionRule("seq_max_k3", None, 1.5),
    )


@pytest.mark.parametrize("spec", [4.0, "4.0", 4])
def test_one_number_for_a_k1_rule_means_its_reciprocal_to_it(spec: float | str) -> None:
    assert parse_rules("seq_sum_k1", spec) == (RejectionRule("seq_sum_k1", 0.25, 4.0),)


@pytest.mark.parametrize(
    ("rules", "thresholds", "said"),
    [
        ("token_k4", 1.0, ["token_k4", "token_k1"]),
        ("seq_max_k4", "0.5_2.0", ["seq_max_k4", "seq_max_k2"]),
        ("token_k1", None, ["token_k1", "has no threshold"]),
        ("token_k1,token_k2,token_k3", "1.0,2.0", ["token_k1, token_k2, token_k3", "1.0,2.0", "3"]),
        ("token_k1", "2.0,3.0", ["2.0,3.0", "one threshold"]),
        ("token_k1,token_k1", "2.0", ["token_k1,token_k1", "once"]),
        (None, 2.0, ["2.0", "rollout_rs"]),
        ("token_k1", 0.5, ["token_k1", "0.5", "0.5_2.0"]),
        ("token_k1", "5_0.5", ["token_k1", "5_0.5", "0.5_2.0"]),
        ("token_k1", "x", ["token_k1", "'x'", "0.5_2.0"]),
        ("seq_mean_k3", "0.5_2.0", ["seq_mean_k3", "0.5_2.0", "one upper bound"]),
        ("seq_mean_k3", "-1", ["seq_mean_k3", "-1", "over 0"]),
        ("token_k1,seq_mean_k3", "0.5_2.0", ["seq_mean_k3", "0.5_2.0"]),
    ],
)
def test_a_mistake_is_answered_with_the_value_the_rule_and_the_fix(
    rules: Any, thresholds: Any, said: Any
) -> None:
    with pytest.raises(ValueError) as error:
        parse_rules(rules, thresholds)
    for part in said:
        assert part in str(error.value), str(error.value)


def test_a_rule_refuses_bounds_that_are_none() -> None:
    for name, lower, upper in (
        ("k1", 0.5, 2.0),
        ("token_k1", None, 2.0),
        ("token_k2", 0.5, 2.0),
        ("token_k2", None, 0.0),
    ):
        with pytest.raises(ValueError, match=name):
            RejectionRule(name, lower, upper)
    with pytest.raises(ValueError, match="lower <= upper"):
        RejectionRule("token_k1", 2.0, 0.5)


def test_upper_bounds_of_k2_and_k3_are_inclusive() -> None:
    for ratio in (1.1, 0.7, 5.0):
        l = math.log(ratio)
        for kind, value in (("k2", l * l / 2), ("k3", math.expm1(l) - l)):
            for level in ("token", "seq_sum", "seq_mean", "seq_max"):
                assert accepted(RejectionRule(f"{level}_{kind}", None, value), [ratio])[0].all()
                assert not accepted(
                    RejectionRule(f"{level}_{kind}", None, value * (1 - 1e-9)), [ratio]
                )[0].any()


def test_float32_log_probs_fall_to_either_side_of_a_bound_but_only_where_they_are_that_close() -> (
    None
):
    b = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 20

    def kept(shift: Any, upper: Any) -> Any:
        return accept(
            RejectionRule("token_k1", 0.1, upper), ratios_of(b + math.log(upper) + shift, b, [1000])
        )[0]

    at_the_edge = [kept(0.0, upper).float().mean().item() for upper in (2.0, 3.0, 5.0, 7.0)]
    assert min(at_the_edge) < 1 and max(at_the_edge) > 0
    for upper in (2.0, 3.0, 5.0, 7.0):
        assert kept(-4e-6, upper).all() and not kept(4e-6, upper).any()


MASKED = st.lists(
    st.lists(
        st.tuples(
            st.floats(-3, 0), st.floats(-3, 0), st.sampled_from([-1.0, 0.0, 2.0]), st.booleans()
        ),
        max_size=5,
    ),
    max_size=5,
)
"""Sequences of (current log-prob, rollout log-prob, advantage, included)."""


@given(MASKED, st.sampled_from([0.0, 0.1, 0.7]))
@settings(max_examples=80, deadline=None)
def test_the_off_policy_mask_matches_numpy(sequences: Any, bound: float) -> None:
    want = []
    for s in sequences:
        far = [mu - pi for pi, mu, _, included in s if included]
        near = bool(far) and np.mean(far) <= bound + 1e-12
        want += [bool(near or a >= 0 or not included) for _, _, a, included in s]
    assert off_policy(sequences, bound).tolist() == want


def off_policy(sequences: Any, bound: float) -> torch.Tensor:
    rows = [row for s in sequences for row in s]
    pi, mu, advantages = (double([row[i] for row in rows]) for i in range(3))
    return off_policy_mask(
        pi,
        mu,
        *ids_of([len(s) for s in sequences]),
        advantages,
        threshold=bound,
        include=torch.tensor([row[3] for row in rows], dtype=torch.bool),
    )


def test_the_off_policy_mask_looks_at_one_direction_and_one_sign() -> None:
    likelier, rarer = (-1.0, -2.0), (-2.0, -1.0)
    for (pi, mu), advantage, stays in (
        (rarer, -1.0, False),
        (rarer, 1.0, True),
        (likelier, -1.0, True),
        ((math.nan, -1.0), -1.0, False),
    ):
        assert off_policy([[(pi, mu, advantage, True)]], 0.5).item() == stays
    assert off_policy([[(*rarer, -1.0, True)]], 1.0).item()  # on the bound
