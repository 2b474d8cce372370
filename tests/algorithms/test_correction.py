"""Rollout correction compared with NumPy in float64: weights, kept tokens and every metric."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.algorithms.correction import correct, effective_sample_size
from millrace.algorithms.correction_plan import RejectionRule, parse_rules
from tests.algorithms.correction_cases import OPTIONS, SEQUENCES, batch, double, reference, run
from tests.algorithms.options import correction_options

WEIGHTS = st.lists(st.floats(0, 50), max_size=20)


def seqs(*sequences: Any) -> Any:
    """Return sequences with these ratios; all tokens are included."""
    return [[(math.log(r), 0.0, True) for r in s] for s in sequences]


NONE: dict[str, Any] = dict.fromkeys(
    ("rollout_is", "rollout_is_threshold_lower", "rollout_token_veto_threshold", "m2_threshold")
) | {"rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True, "rollout_rs": []}
NOT_FINITE = [
    [(-1.0, -1.0, True), (-math.inf, -1.0, True)],
    [(-1.0, -1.0, True), (-1.0, math.nan, False)],
]
EXTREME = [[(0.0, -40.0, True), (0.0, -40.0, True)]]
EDGES: list[tuple[Any, dict[str, Any]]] = [
    # A token outside the band is kept with a weight of 0, so it counts in the mean.
    *((seqs([0.5, 1.0, 8.0], [4.0]), {"rollout_is_threshold": cut}) for cut in (2.0, (0.5, 5.0))),
    (
        seqs([1.0, 1.0, 1.5], [0.5], [0.25, 0.1]),
        {"rollout_is": "sequence", "rollout_rs": [("seq_mean_k1", 0.5, 2.0)]},
    ),
    # All tokens are rejected.
    *(
        (seqs([1.0, 0.5], [], [1.5]), {"rollout_is": mode} | keys)
        for mode in ("token", "sequence", None)
        for keys in (
            {"rollout_rs": [("token_k1", 2.0, 3.0)]},
            {"rollout_token_veto_threshold": 2.0},
        )
    ),
    *(
        (NOT_FINITE, keys)
        for keys in (
            {},
            {"rollout_is": "sequence"},
            {"rollout_rs": [("seq_max_k3", None, 9.0)]},
            {"rollout_rs": [("seq_mean_k1", 0.0, math.inf)]},
            {"rollout_token_veto_threshold": 1e-4},
            {"m2_threshold": 0.04},
        )
    ),
    *(
        (EXTREME, {"rollout_is": mode, "rollout_is_threshold": math.inf})
        for mode in ("token", "sequence")
    ),
    # Ratios of e^30 and e^-25 have the product e^5: the clamp applies to the product.
    *(
        ([[(0.0, -30.0, True), (-25.0, 0.0, True)]], {"rollout_is_threshold": math.inf} | keys)
        for keys in (
            {"rollout_is": "sequence", "rollout_rs": [("seq_sum_k1", 0.0, 1e3)]},
            {"rollout_is": "geometric", "rollout_rs": [("seq_mean_k1", 0.0, 1e3)]},
        )
    ),
    # The squares of 0.2 are on the bound of the second moment.
    ([[(0.0, -0.2, True), (-0.2, 0.0, True)]], {"m2_threshold": 0.04}),
    # The largest ratio of a sequence is below 1.
    (seqs([0.25, 0.4], [0.1, 0.6]), {"rollout_rs": [("seq_max_k1", 0.5, 3.0)]}),
]


def on_edges(test: Any) -> Any:
    for sequences, keys in EDGES:
        test = example(sequences, NONE | {"rollout_is": "token"} | keys)(test)
    return test


@settings(max_examples=100, deadline=None)
@on_edges
@given(SEQUENCES, OPTIONS)
def test_weights_keep_and_every_metric_match_the_definitions(sequences: Any, options: Any) -> None:
    sequences = batch(sequences)
    got = run(sequences, options)
    weights, keep, metrics = reference(sequences, options)
    assert got.weights.dtype == torch.float64 and got.keep.dtype == torch.bool
    np.testing.assert_allclose(got.weights.numpy(), weights, rtol=1e-6, atol=1e-15)
    assert got.keep.tolist() == keep
    assert {name.removeprefix("rollout_corr/") for name in got.metrics} == set(metrics)
    for name, value in metrics.items():
        # The standard deviation of nearly equal large values loses digits on both sides.
        assert got.metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@given(SEQUENCES, OPTIONS)
@settings(max_examples=40, deadline=None)
def test_nothing_is_ever_nan_and_what_is_not_kept_has_no_weight(
    sequences: Any, options: Any
) -> None:
    got = run(batch(sequences), options, dtype=torch.float32)
    assert got.weights.dtype == torch.float32
    assert torch.isfinite(got.weights).all() and not got.weights[~got.keep].any()
    assert all(math.isfinite(value) for value in got.metrics.values())


def test_extreme_metrics_are_clamped() -> None:
    got = run([[(0.0, -1000.0, True)] * 2], {"rollout_is": "sequence"}, dtype=torch.float32)
    assert got.metrics["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40))
    assert got.metrics["rollout_corr/rollout_ppl"] == pytest.approx(math.exp(100))


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_are_of_the_ratio_and_both_edges_are_kept(name: str) -> None:
    """verl would keep ratios from 0.2 to 2 here."""
    ratios = [0.3, 0.5 - 1e-9, 0.5, 1.0, 3.0, 5.0, 5.0 + 1e-8, 6.0]
    within = [False, False, True, True, True, True, False, False]
    rules = parse_rules(name, "0.5_5.0")
    single = seqs(*([r] for r in ratios))
    assert (
        run(single, {"rollout_rs": [(r.name, r.lower, r.upper) for r in rules]}).keep.tolist()
        == within
    )
    cut = run(single, {"rollout_is": "token", "rollout_is_threshold": (0.5, 5.0)})
    assert (cut.weights > 0).tolist() == within and cut.keep.all()


@given(st.floats(-30, 0), st.sampled_from([0.5, 5.0, 0.3, 1 / 3, 2.0]))
def test_an_exact_ratio_is_kept_at_both_bounds_wherever_the_log_probs_lie(
    b: Any, edge: Any
) -> None:
    tokens = [[(b + math.log(edge), b, True)]]
    for bounds in ((edge, 9.0), (0.1, edge)):
        assert run(tokens, {"rollout_rs": [("token_k1", *bounds)]}).keep.all()
        assert run(tokens, {"rollout_is": "sequence", "rollout_is_threshold": bounds}).weights.all()
    assert run(tokens, {"rollout_token_veto_threshold": edge}).keep.all()


def test_no_gradient_flows_through_a_correction() -> None:
    a = double([-1.0, -2.0]).requires_grad_()
    got = correct(
        a, double([-1.5, -1.0]), torch.zeros(2).long(), 1, correction_options(rollout_is="token")
    )
    assert not got.weights.requires_grad


def test_the_number_of_operations_does_not_grow_with_sequences_or_tokens() -> None:
    options = correction_options(
        rollout_is="sequence", rollout_rs=parse_rules("token_k1,seq_max_k3", "2.0,1.0")
    )

    def operations(num_sequences: Any) -> Any:
        b = -torch.ones(3 * num_sequences)
        with torch.autograd.profiler.profile() as profile:
            correct(b + 0.1, b, torch.arange(3 * num_sequences) // 3, num_sequences, options)
        return len(profile.function_events)

    assert operations(2000) == pytest.approx(operations(20), rel=0.1)


def test_options_out_of_range_and_shapes_that_differ_are_refused() -> None:
    for options, said in (
        ({"rollout_is": "seq"}, "rollout_is"),
        ({"rollout_is_threshold": 0.0}, "0 <= lower <= upper"),
        ({"rollout_is_threshold": (2.0, 1.0)}, "2.0 to 1.0"),
        ({"rollout_is_threshold": math.nan}, "nan"),
        ({"rollout_token_veto_threshold": 0.0}, "veto"),
        ({"m2_threshold": 0.0}, "m2_threshold"),
        ({"rollout_is_threshold_lower": 3.0}, "3.0 to 2.0"),
        ({"rollout_is_threshold_lower": 0.1, "rollout_is_threshold": (0.5, 2.0)}, "band"),
        ({"rollout_rs": (RejectionRule("token_k2", None, 1.0),) * 2}, "twice"),
    ):
        with pytest.raises(ValueError, match=said):
            correction_options(**options)
    two, ids, options = torch.zeros(2), torch.zeros(2).long(), correction_options()  # type: ignore[assignment]
    for args, kwargs, said in (
        ((two, torch.zeros(3), ids, 1, options), {}, "must all be"),
        ((two, two, ids[:1], 1, options), {}, "must all be"),
        ((two, two, ids, 1, options), {"include": torch.ones(2)}, "bool"),
    ):
        with pytest.raises(ValueError, match=said):
            correct(*args, **kwargs)  # type: ignore[arg-type]


@given(WEIGHTS)
def test_effective_sample_size_matches_its_definition(rows: Any) -> None:
    kept = np.array(rows)
    got = effective_sample_size(double(rows)).item()
    if kept.sum() < 1e-3:
        assert 0 <= got <= 1 + 1e-9
    else:
        assert got == pytest.approx(1 / np.mean((kept / kept.mean()) ** 2), rel=1e-6)


def test_effective_sample_size_at_its_ends() -> None:
    assert effective_sample_size(double([2.0, 2.0, 2.0])).item() == pytest.approx(1.0)
    assert effective_sample_size(double([0.0, 0.0, 9.0, 0.0])).item() == pytest.approx(0.25)
    assert effective_sample_size(double([])).item() == 0.0
    assert effective_sample_size(double([0.0, 0.0])).item() == 0.0
