"""Random batches for rollout correction, and their reference: plain NumPy loops in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from millrace.algorithms.correction import correct
from millrace.algorithms.correction_plan import RejectionRule
from millrace.algorithms.drift import drift
from tests.algorithms.options import correction_options

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
    ("seq_max_k1", 0.5, 5.0),
    ("seq_max_k2", None, 1.0),
    ("seq_max_k3", None, 1.0),
]


def possible(options: Any) -> Any:
    """Remove a lower bound of the weights that does not fit their threshold."""
    cut, lower = options["rollout_is_threshold"], options["rollout_is_threshold_lower"]
    fits = lower is None or (not isinstance(cut, tuple) and lower <= cut)
    return options if fits else options | {"rollout_is_threshold_lower": None}


OPTIONS = st.fixed_dictionaries(
    {
        "rollout_is": st.sampled_from(["token", "sequence", "geometric", None]),
        "rollout_is_threshold": st.sampled_from(BANDS),
        "rollout_is_threshold_lower": st.sampled_from([None, 0.3, 1.5]),
        "rollout_is_batch_normalize": st.booleans(),
        "rollout_rs": st.lists(st.sampled_from(RULES), unique=True, max_size=3),
        "rollout_token_veto_threshold": st.sampled_from([None, 1e-4, 0.5]),
        "m2_threshold": st.sampled_from([None, 0.04, 1.0]),
    }
).map(possible)


def double(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(sequences: Any) -> Any:
    """Return (a, b, include) of each token. If `b` is None, both policies are equal: b = a."""
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
    ids = torch.tensor([i for i, s in enumerate(sequences) for _ in s], dtype=torch.long)
    include = torch.tensor([t[2] for t in tokens], dtype=torch.bool)
    found = correct(a, b, ids, len(sequences), made, include=include)
    metrics = found.metrics | drift(a, b, ids, len(sequences), include)
    return replace(found, metrics=metrics)


# The reference: plain loops that follow the definitions.


def clamp(x: Any) -> Any:
    return min(max(x, -20.0), 20.0)


def statistic(name: str, ls: Any) -> Any:
    """Return the statistic of one token's log-ratio, or of the log-ratios of a sequence."""
    each = {"k1": lambda l: l, "k2": lambda l: l * l / 2, "k3": lambda l: math.expm1(l) - l}[
        name[-2:]
    ]
    values = [each(l) for l in ls]
    value = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[
        name.split("_")[-2].replace("token", "sum")
    ]
    return math.exp(clamp(value)) if name.endswith("k1") else value


def outside(value: Any, low: Any, high: Any) -> Any:
    """Return (below, above) in ratio space, with a relative slack of 1e-12.

    Random values never differ by so little.
    """
    return value < low * (1 - 1e-12), value > high * (1 + 1e-12)


def reference(sequences: Any, options: Any) -> Any:
    """Return weights, keep and metrics. A sequence is a list of (a, b, include)."""
    cut = options["rollout_is_threshold"]
    lower = options["rollout_is_threshold_lower"]
    low, high = cut if isinstance(cut, tuple) else (lower or 1 / cut, cut)
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
        if options["rollout_is"] in ("sequence", "geometric")
        else [[l is not None for l in s] for s in logs]
    )
    if (bound := options["m2_threshold"]) is not None:
        verdicts["m2"] = second_moment(logs, bound)
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
            # The k1 statistic of a sequence uses unclamped log-ratios; only its result is clamped.
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


def second_moment(logs: Any, bound: Any) -> Any:
    """Remove the largest square until the mean of the others is within the bound."""
    left = [(l * l, -i, -t) for i, s in enumerate(logs) for t, l in enumerate(s) if l is not None]
    while left and sum(m for m, *_ in left) > bound * (1 + 1e-12) * len(left):
        left.remove(max(left))
    kept = {(-i, -t) for _, i, t in left}
    return [[(i, t) in kept for t in range(len(s))] for i, s in enumerate(logs)]


def weigh(
    logs: Any, whole: Any, keep: Any, cut: Any, bounds: Any, options: Any, metrics: Any
) -> Any:
    mode = options["rollout_is"]
    if mode is None:
        return [[float(k) for k in s] for s in keep]

    def applied(ratio: Any) -> Any:
        if isinstance(cut, tuple):
            return 0.0 if any(outside(ratio, *cut)) else ratio
        return min(max(ratio, options["rollout_is_threshold_lower"] or 0), cut)

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
            [math.exp(clamp(sum(s) / (len(s) if mode == "geometric" else 1)))] * len(s)
            if ok
            else [None] * len(s)
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
