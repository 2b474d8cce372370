"""Rollout correction against NumPy in float64: weights, what is kept, and every metric."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.correction import correct, drift, effective_sample_size
from millrace.algorithms.rules import RejectionRule, parse_rules
from tests.algorithms.options import correction_options

WEIGHTS = st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=20)
LOG_PROB = st.one_of(
    st.floats(-3, 0), st.floats(-40, 0), st.sampled_from([0.0, math.log(0.5), -math.inf, math.nan])
)
TOKEN = st.tuples(LOG_PROB, st.one_of(st.none(), LOG_PROB), st.booleans())
SEQUENCES = st.lists(st.lists(TOKEN, max_size=6), max_size=6)
BANDS = [0.5, 2.0, math.inf, (0.5, 5.0), (0.0, 1.0), (0.9, 1.1)]
RULES = [
    ("token_k1", 0.5, 5.0),
    ("token_k2", None, 0.1),
    ("token_k3", None, 1.0),
    ("seq_sum_k1", 0.5, 5.0),
    ("seq_sum_k2", None, 1.0),
    ("seq_sum_k3", None, 0.5),
    ("seq_mean_k1", 0.8, 2.0),
    ("seq_mean_k2", None, 0.2),
    ("seq_mean_k3", None, 0.1),
    ("seq_max_k2", None, 1.0),
    ("seq_max_k3", None, 1.0),
]
OPTIONS = st.fixed_dictionaries(
    {
        "rollout_is": st.sampled_from(["token", "sequence", None]),
        "rollout_is_threshold": st.sampled_from(BANDS),
        "rollout_is_batch_normalize": st.booleans(),
        "rollout_rs": st.lists(st.sampled_from(RULES), unique=True, max_size=3),
        "rollout_token_veto_threshold": st.sampled_from([None, 1e-4, 0.5]),
    }
)


def double(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(sequences: Any) -> Any:
    """(a, b, include) for each token of each sequence; a token with no `b` has equal policies."""
    return [[(a, a if b is None else b, inc) for a, b, inc in s] for s in sequences]


def run(sequences: Any, options: Any, dtype: Any = torch.float64) -> Any:
    tokens = [t for s in sequences for t in s]
    a, b = (torch.tensor([t[i] for t in tokens], dtype=dtype) for i in range(2))
    made = correction_options(
        **(
            options
            | {"rollout_rs": tuple(RejectionRule(*r) for r in options.get("rollout_rs", ()))}
        )
    )
    return correct(
        a,
        b,
        torch.tensor([len(s) for s in sequences], dtype=torch.long),
        made,
        include=torch.tensor([t[2] for t in tokens], dtype=torch.bool),
    )


# The reference: plain loops, from the definitions.


def clamp(x: Any) -> Any:
    return min(max(x, -20.0), 20.0)


def statistic(name: str, ls: Any) -> Any:
    """Of a token's log-ratio (one element), or of those of a sequence."""
    each = {"k1": lambda l: l, "k2": lambda l: l * l / 2, "k3": lambda l: math.expm1(l) - l}[
        name[-2:]
    ]
    values = [each(l) for l in ls]
    value = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[
        name.split("_")[-2].replace("token", "sum")
    ]
    return math.exp(clamp(value)) if name.endswith("k1") else value


def outside(value: Any, low: Any, high: Any) -> Any:
    """(below, above) in ratio space, with a slack well under what the random values can tell apart."""
    return value < low * (1 - 1e-12), value > high * (1 + 1e-12)


def reference(sequences: Any, options: Any) -> Any:
    """Weights, keep and metrics; sequences are lists of (a, b, include)."""
    cut = options["rollout_is_threshold"]
    low, high = cut if isinstance(cut, tuple) else (1 / cut, cut)
    raw_logs = [
        [a - b if math.isfinite(a - b) else None for a, b, inc in s if inc] for s in sequences
    ]
    logs = [[None if l is None else clamp(l) for l in s] for s in raw_logs]
    metrics, verdicts = {}, {}  # type: ignore[var-annotated]
    whole = [bool(s) and None not in s for s in logs]

    def everywhere(flags: Any) -> Any:
        return [[flag] * len(s) for flag, s in zip(flags, logs, strict=True)]

    verdicts["nonfinite"] = (
        everywhere(whole)
        if options["rollout_is"] == "sequence"
        else [[l is not None for l in s] for s in logs]
    )
    if (veto := options["rollout_token_veto_threshold"]) is not None:
        verdicts["token_veto"] = everywhere(
            [
                ok and not any(outside(math.exp(l), veto, math.inf)[0] for l in s)  # type: ignore[arg-type]
                for ok, s in zip(whole, logs, strict=True)
            ]
        )
    for name, lower, upper in options["rollout_rs"]:
        bounds = (lower if name.endswith("k1") else -math.inf, upper)
        if name.startswith("token"):
            values = [statistic(name, [l]) for s in logs for l in s if l is not None]
            verdicts[name] = [
                [l is not None and not any(outside(statistic(name, [l]), *bounds)) for l in s]
                for s in logs
            ]
        else:
            # The product of a sequence's ratios is of the ratios as they are.
            of = raw_logs if name.endswith("k1") else logs
            values = [statistic(name, s) for s, ok in zip(of, whole, strict=True) if ok]
            verdicts[name] = everywhere(
                [
                    ok and not any(outside(statistic(name, s), *bounds))
                    for s, ok in zip(of, whole, strict=True)
                ]
            )
        metrics |= {f"rollout_rs_{name}_{k}": v for k, v in spread(values).items()}
        metrics[f"rollout_rs_{name}_fraction_low"] = mean([outside(v, *bounds)[0] for v in values])
        metrics[f"rollout_rs_{name}_fraction_high"] = mean([outside(v, *bounds)[1] for v in values])
    keep = [
        [all(v[i][t] for v in verdicts.values()) for t in range(len(s))] for i, s in enumerate(logs)
    ]
    for name, verdict in [*((f"_{name}", v) for name, v in verdicts.items()), ("", keep)]:
        metrics[f"rollout_rs{name}_masked_fraction"] = mean([not v for s in verdict for v in s])
        metrics[f"rollout_rs{name}_seq_masked_fraction"] = mean([not all(s) for s in verdict if s])
    weights = weigh(raw_logs, whole, keep, cut, (low, high), options, metrics)
    flat_weights, flat_keep = [], []
    for s, ws, ks in zip(sequences, weights, keep, strict=True):
        included = iter(zip(ws, ks, strict=True))
        for token in s:
            w, k = next(included) if token[2] else (0.0, False)
            flat_weights.append(w)
            flat_keep.append(k)
    return (
        flat_weights,
        flat_keep,
        metrics | drift_reference([[t for t in s if t[2]] for s in sequences]),
    )


def weigh(
    logs: Any, whole: Any, keep: Any, cut: Any, bounds: Any, options: Any, metrics: Any
) -> Any:
    mode = options["rollout_is"]
    if mode is None:
        return [[float(k) for k in s] for s in keep]

    def applied(ratio: Any) -> Any:
        if isinstance(cut, tuple):
            return 0.0 if any(outside(ratio, *cut)) else ratio
        return min(ratio, cut)

    if mode == "token":
        ratios = [[math.exp(clamp(l)) if l is not None else None for l in s] for s in logs]
        units = [r for s in ratios for r in s if r is not None]
        kept = [
            applied(r)
            for s, ks in zip(ratios, keep, strict=True)
            for r, k in zip(s, ks, strict=True)
            if k
        ]
    else:
        ratios = [
            [math.exp(clamp(sum(s)))] * len(s) if ok else [None] * len(s)
            for s, ok in zip(logs, whole, strict=True)
        ]
        units = [s[0] for s, ok in zip(ratios, whole, strict=True) if ok]  # type: ignore[misc]
        kept = [applied(s[0]) for s, ks in zip(ratios, keep, strict=True) if any(ks)]
    weights = [
        [applied(r) if k else 0.0 for r, k in zip(s, ks, strict=True)]
        for s, ks in zip(ratios, keep, strict=True)
    ]
    metrics |= {f"rollout_is_{k}": v for k, v in spread(kept).items()}
    metrics["rollout_is_eff_sample_size"] = (
        sum(kept) ** 2 / (len(kept) * sum(w * w for w in kept)) if sum(kept) else 0.0
    )
    beyond = [outside(r, *bounds) for r in units]
    metrics["rollout_is_ratio_fraction_low"] = mean([x for x, _ in beyond])
    metrics["rollout_is_ratio_fraction_high"] = mean([x for _, x in beyond])
    if isinstance(cut, tuple):
        metrics["rollout_is_oob_ratio"] = mean([any(x) for x in beyond])
    means = [
        mean([w for w, k in zip(s, ks, strict=True) if k])
        for s, ks in zip(weights, keep, strict=True)
        if any(ks)
    ]
    metrics |= {f"rollout_is_seq_{k}": v for k, v in spread(means).items()}
    metrics["rollout_is_seq_max_deviation"] = max([abs(m - 1) for m in means], default=0.0)
    raw = [outside(mean(s), *bounds) for s, ok in zip(ratios, whole, strict=True) if ok]
    metrics["rollout_is_seq_fraction_low"] = mean([x for x, _ in raw])
    metrics["rollout_is_seq_fraction_high"] = mean([x for _, x in raw])
    if options["rollout_is_batch_normalize"]:
        factor = mean(kept) or 1.0
        metrics["rollout_is_batch_norm_factor"] = factor
        weights = [[w / factor for w in s] for s in weights]
    return weights


def drift_reference(sequences: Any) -> dict[str, Any]:
    rows = [[(a, b) for a, b, *_ in s if math.isfinite(a - b)] for s in sequences]
    rows = [s for s in rows if s]
    pairs = [pair for s in rows for pair in s]
    ppl_a, ppl_b = ([-mean([pair[i] for pair in s]) for s in rows] for i in range(2))
    diff = [x - y for x, y in zip(ppl_a, ppl_b, strict=True)]
    return {
        "kl": mean([b - a for a, b in pairs]),
        "k3_kl": mean([math.expm1(clamp(a - b)) - clamp(a - b) for a, b in pairs]),
        "chi2_token": mean([math.exp(clamp(a - b)) ** 2 for a, b in pairs]) - bool(pairs),
        "chi2_seq": mean([math.exp(clamp(sum(a - b for a, b in s))) ** 2 for s in rows])
        - bool(pairs),
        "training_log_ppl": mean(ppl_a),
        "rollout_log_ppl": mean(ppl_b),
        "training_ppl": mean([math.exp(x) for x in ppl_a]),
        "rollout_ppl": mean([math.exp(x) for x in ppl_b]),
        "log_ppl_diff": mean(diff),
        "log_ppl_diff_max": max(diff, default=0.0),
        "log_ppl_diff_min": min(diff, default=0.0),
        "log_ppl_abs_diff": mean([abs(x) for x in diff]),
        "ppl_ratio": mean([math.exp(x) for x in diff]),
    }


def mean(values: Any) -> Any:
    return sum(values) / len(values) if values else 0.0


def spread(values: Any) -> dict[str, Any]:
    return {
        "mean": mean(values),
        "max": max(values, default=0.0),
        "min": min(values, default=0.0),
        "std": float(np.std(values)) if values else 0.0,
    }


@settings(max_examples=100, deadline=None)
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
        # A standard deviation of nearly equal large values has lost its digits in either sum.
        assert got.metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@given(SEQUENCES, OPTIONS)
@settings(max_examples=40, deadline=None)
def test_what_is_not_included_might_as_well_not_be_there(sequences: Any, options: Any) -> None:
    sequences = batch(sequences)
    got, without = (
        run(sequences, options),
        run([[t for t in s if t[2]] for s in sequences], options),
    )
    included = torch.tensor([t[2] for s in sequences for t in s], dtype=torch.bool)
    assert got.weights[included].tolist() == without.weights.tolist()
    assert got.keep[included].tolist() == without.keep.tolist()
    assert not got.weights[~included].any() and not got.keep[~included].any()
    assert got.metrics == pytest.approx(without.metrics)


@given(SEQUENCES, OPTIONS)
@settings(max_examples=40, deadline=None)
def test_nothing_is_ever_nan_and_what_is_not_kept_has_no_weight(
    sequences: Any, options: Any
) -> None:
    got = run(batch(sequences), options, dtype=torch.float32)
    assert got.weights.dtype == torch.float32
    assert torch.isfinite(got.weights).all() and not got.weights[~got.keep].any()
    assert all(math.isfinite(value) for value in got.metrics.values())


def seqs(*sequences: Any) -> Any:
    """Sequences of ratios, all included."""
    return [[(math.log(r), 0.0, True) for r in s] for s in sequences]


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_are_of_the_ratio_and_both_edges_are_kept(name: str) -> None:
    """verl would keep 0.2 to 2 here."""
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


def test_weights_are_cut_before_they_are_normalised() -> None:
    ratios = seqs([0.5, 1.0, 8.0], [4.0])
    truncated = run(
        ratios,
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
    )
    assert truncated.weights.tolist() == pytest.approx(
        [0.5 / 1.375, 1 / 1.375, 2 / 1.375, 2 / 1.375]
    )
    band = run(
        ratios,
        {
            "rollout_is": "token",
            "rollout_is_threshold": (0.5, 5.0),
            "rollout_is_batch_normalize": True,
        },
    )
    # The token outside of the band is kept, with a weight of 0: it counts in the mean.
    assert band.weights.tolist() == pytest.approx([0.5 / 1.375, 1 / 1.375, 0.0, 4 / 1.375])
    assert band.keep.all() and band.metrics["rollout_corr/rollout_is_oob_ratio"] == 0.25


def test_sequence_weights_are_normalised_over_sequences_that_keep_a_token() -> None:
    ratios = seqs([1.0, 1.0, 1.5], [0.5], [0.25, 0.1])
    got = run(
        ratios,
        {
            "rollout_is": "sequence",
            "rollout_is_batch_normalize": True,
            "rollout_rs": [("seq_mean_k1", 0.5, 2.0)],
        },
    )
    assert got.weights.tolist() == pytest.approx([1.5, 1.5, 1.5, 0.5, 0.0, 0.0])
    assert got.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["token", "sequence", None])
def test_a_batch_that_is_rejected_whole_has_weights_of_0_and_finite_metrics(mode: str) -> None:
    for options in (
        {"rollout_rs": [("token_k1", 2.0, 3.0)]},
        {"rollout_token_veto_threshold": 2.0},
    ):
        got = run(
            seqs([1.0, 0.5], [], [1.5]),
            {"rollout_is": mode, "rollout_is_batch_normalize": True, **options},
        )
        assert got.weights.tolist() == [0.0] * 3 and got.keep.tolist() == [False] * 3
        assert all(math.isfinite(value) for value in got.metrics.values())
        assert got.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
        assert got.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0, (
            "the empty sequence does not count"
        )


def test_a_ratio_that_is_not_finite_is_rejected_with_its_sequence_where_sequences_are_looked_at() -> (
    None
):
    tokens = [
        [(-1.0, -1.0, True), (-math.inf, -1.0, True)],
        [(-1.0, -1.0, True), (-1.0, math.nan, False)],
    ]
    assert run(tokens, {}).keep.tolist() == [True, False, True, False]
    assert run(tokens, {"rollout_is": "token"}).weights.tolist() == [1.0, 0.0, 1.0, 0.0]
    for options in (
        {"rollout_is": "sequence"},
        {"rollout_rs": [("seq_max_k3", None, 9.0)]},
        {"rollout_rs": [("seq_mean_k1", 0.0, math.inf)]},
        {"rollout_token_veto_threshold": 1e-4},
    ):
        got = run(tokens, options)
        assert got.keep.tolist() == [False, False, True, False], options
        assert got.weights.tolist() == [0.0, 0.0, 1.0, 0.0], options


def test_extreme_ratios_are_clamped_to_e_20() -> None:
    tokens = [[(0.0, -1000.0, True), (0.0, -1000.0, True)]]
    for mode in ("token", "sequence"):
        got = run(
            tokens, {"rollout_is": mode, "rollout_is_threshold": math.inf}, dtype=torch.float32
        )
        assert got.weights.tolist() == pytest.approx([math.exp(20)] * 2)
    assert got.metrics["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40))
    assert got.metrics["rollout_corr/rollout_ppl"] == pytest.approx(math.exp(100))


def test_no_gradient_flows_through_a_correction() -> None:
    a = double([-1.0, -2.0]).requires_grad_()
    got = correct(
        a, double([-1.5, -1.0]), torch.tensor([2]), correction_options(rollout_is="token")
    )
    assert not got.weights.requires_grad


def test_the_number_of_operations_does_not_grow_with_sequences_or_tokens() -> None:
    options = correction_options(
        rollout_is="sequence", rollout_rs=parse_rules("token_k1,seq_max_k3", "2.0,1.0")
    )

    def operations(num_sequences: Any) -> Any:
        b = -torch.ones(3 * num_sequences)
        with torch.autograd.profiler.profile() as profile:
            correct(b + 0.1, b, torch.full((num_sequences,), 3), options)
        return len(profile.function_events)

    assert operations(2000) == pytest.approx(operations(20), rel=0.1)


def test_options_out_of_range_and_shapes_that_differ_are_refused() -> None:
    for options, said in (
        ({"rollout_is": "seq"}, "rollout_is"),
        ({"rollout_is_threshold": 0.0}, "0 <= lower <= upper"),
        ({"rollout_is_threshold": (2.0, 1.0)}, "2.0 to 1.0"),
        ({"rollout_is_threshold": math.nan}, "nan"),
        ({"rollout_token_veto_threshold": 0.0}, "veto"),
        ({"rollout_rs": (RejectionRule("token_k2", None, 1.0),) * 2}, "twice"),
    ):
        with pytest.raises(ValueError, match=said):
            correction_options(**options)
    two, lengths, options = torch.zeros(2), torch.tensor([2]), correction_options()  # type: ignore[assignment]
    for args, kwargs, said in (
        ((two, torch.zeros(3), lengths, options), {}, "must all be"),
        ((two, two, torch.tensor([3]), options), {}, "add up to 3"),
        ((two, two, lengths, options), {"include": torch.ones(2)}, "bool"),
    ):
        with pytest.raises(ValueError, match=said):
            correct(*args, **kwargs)  # type: ignore[arg-type]


@given(SEQUENCES)
@settings(max_examples=40, deadline=None)
def test_drift_alone_is_what_correct_reports(sequences: Any) -> None:
    sequences = batch(sequences)
    tokens = [t for s in sequences for t in s]
    a, b, include = (
        double([t[0] for t in tokens]),
        double([t[1] for t in tokens]),
        torch.tensor([t[2] for t in tokens]).bool(),
    )
    alone = drift(a, b, torch.tensor([len(s) for s in sequences]).long(), include)
    assert alone.items() <= run(sequences, {}).metrics.items()


@given(WEIGHTS)
def test_effective_sample_size_matches_its_definition(rows: Any) -> None:
    weights, mask = (
        double([w for w, _ in rows]),
        torch.tensor([m for _, m in rows], dtype=torch.bool),
    )
    kept = np.array([w for w, m in rows if m])
    got = effective_sample_size(weights, mask).item()
    if kept.sum() < 1e-3:
        assert 0 <= got <= 1 + 1e-9
    else:
        assert got == pytest.approx(1 / np.mean((kept / kept.mean()) ** 2), rel=1e-6)


def test_effective_sample_size_at_its_ends() -> None:
    assert effective_sample_size(double([2.0, 2.0, 2.0])).item() == pytest.approx(1.0)
    assert effective_sample_size(double([0.0, 0.0, 9.0, 0.0])).item() == pytest.approx(0.25)
    assert effective_sample_size(double([])).item() == 0.0
    assert effective_sample_size(double([0.0, 0.0])).item() == 0.0
