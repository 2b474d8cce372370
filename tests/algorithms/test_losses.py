"""Policy losses compared with NumPy in float64, and properties that all losses share.

The comparison covers values, gradients and statistics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.losses.dppo import binary_kl
from tests.algorithms.loss_cases import (
    OPTIONS,
    SEQUENCES,
    TOKEN_RULES,
    aggregate,
    build,
    by_token,
    check,
)
from tests.algorithms.options import loss_options

MODES = sorted(POLICY_LOSSES)


def run(mode: str, inputs: Any, options: Any = OPTIONS[0]) -> Any:
    return POLICY_LOSSES[mode](inputs, options)


def one_token(mode: str, log_ratio: Any, advantage: Any, options: Any) -> Any:
    """Return loss, gradient and statistics of one trained token with old log-prob -1."""
    inputs, _ = build([[((log_ratio - 1.0, -1.0), advantage, True, False, 1.0)]])
    loss, stats = run(mode, inputs, options)
    loss.sum().backward()
    return (
        loss.item(),
        inputs.log_probs.grad.item(),
        {name: value.item() for name, value in stats.items()},
    )


@pytest.mark.parametrize("mode", sorted(TOKEN_RULES))
@settings(max_examples=40)
@given(sequences=SEQUENCES, options=st.sampled_from(OPTIONS))
def test_token_losses_match_numpy_in_value_gradient_and_statistics(
    mode: str, sequences: Any, options: Any
) -> None:
    inputs, weights = build(sequences)
    check(POLICY_LOSSES[mode], inputs, weights, options, by_token(TOKEN_RULES[mode]))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20)
@given(sequences=SEQUENCES)
def test_on_policy_every_mode_has_the_policy_gradient(mode: str, sequences: Any) -> None:
    # geo_mean needs one advantage per sequence. clip_cov needs a batch without selected tokens.
    same = [
        [((old, old), s[0][1], trained, False, w) for (_, old), _, trained, _, w in s]
        for s in sequences
    ]
    inputs, _ = build(same)
    loss, stats = run(mode, inputs)
    lengths = torch.tensor([float(sum(t[2] for t in s)) for s in same], dtype=torch.float64)
    totals = {"total_tokens": 1, "total_sequences": 1}
    aggregate(
        loss,
        inputs.mask,
        inputs.sequence_ids,
        "seq-mean-token-mean",
        sequence_lengths=lengths,
        **totals,
    ).backward()
    want = torch.where(
        inputs.mask, -inputs.advantages / lengths.clamp(min=1)[inputs.sequence_ids], 0.0
    )
    np.testing.assert_allclose(inputs.log_probs.grad.numpy(), want.numpy(), rtol=1e-9, atol=1e-12)
    assert not stats["clipped"].any() and not stats["log_ratio"].any()


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_and_no_sequences_give_empty_losses(mode: str) -> None:
    for sequences in ([], [[], []]):  # type: ignore[var-annotated]
        inputs, _ = build(sequences)
        loss, stats = run(mode, inputs)
        loss.sum().backward()
        assert loss.shape == inputs.log_probs.grad.shape == (0,)
        assert all(value.shape == (0,) for value in stats.values())


@pytest.mark.parametrize("mode", MODES)
def test_the_sets_say_what_a_mode_reads(mode: str) -> None:
    inputs, _ = build(
        [[((-1.0, -1.1), 1.0, True, True, 1.0), ((-0.5, -0.9), -1.0, True, False, 1.0)]]
    )
    near = replace(inputs, old_log_probs=inputs.log_probs.detach())
    changed = [
        not torch.equal(a, b)
        for a, b in zip(*(_flat(run(mode, x)) for x in (inputs, near)), strict=True)
    ]
    assert any(changed) == POLICY_LOSSES[mode].reads_old
    blind = replace(inputs, selected=None)
    if POLICY_LOSSES[mode].select:
        with pytest.raises(ValueError, match="selected"):
            run(mode, blind)
    else:
        assert all(
            torch.equal(a, b)
            for a, b in zip(*(_flat(run(mode, x)) for x in (inputs, blind)), strict=True)
        )
    per_sequence = mode in ("gspo", "sapo", "geo_mean")
    token, whole = (
        POLICY_LOSSES[mode].default_aggregation(level) for level in ("token", "sequence")
    )
    assert token == ("seq-mean-token-mean" if per_sequence else "token-mean")
    assert whole == "seq-mean-token-mean"


def _flat(result: Any) -> Any:
    return [result[0], *result[1].values()]


@pytest.mark.parametrize("mode", ["vanilla", "clip_cov", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [np.log(1.3), np.log(0.7)])
def test_a_ratio_on_the_edge_is_inside_and_one_ulp_beyond_is_out(
    mode: str, advantage: float, log_ratio: Any
) -> None:
    # For a ratio in [1/2, 2], e = |ratio - 1|, 1 - e and 1 + e are exact.
    ratio = torch.tensor((log_ratio - 1.0) - -1.0, dtype=torch.float64).exp().item()
    edge = abs(ratio - 1)
    _, grad, stats = one_token(
        mode, log_ratio, advantage, loss_options(clip_low=edge, clip_high=edge)
    )
    assert grad == pytest.approx(-advantage * ratio) and stats["clipped"] == 0.0
    tight = np.nextafter(edge, 0) - 1e-15
    _, grad, stats = one_token(
        mode, log_ratio, advantage, loss_options(clip_low=tight, clip_high=tight)
    )
    pushed_out = (advantage > 0) == (ratio > 1)
    assert stats["clipped"] == float(pushed_out or mode == "cispo")
    assert (grad == 0.0) == (pushed_out and mode != "cispo")


def test_a_ratio_on_the_dual_clip_keeps_its_gradient() -> None:
    d = np.log(3.0)
    ratio = torch.tensor((d - 1.0) - -1.0, dtype=torch.float64).exp().item()
    loss, grad, stats = one_token("vanilla", d, -2.0, loss_options(clip_c=ratio))
    assert (loss, grad, stats["clipped_lower"]) == (
        pytest.approx(2 * ratio),
        pytest.approx(2 * ratio),
        0.0,
    )
    loss, grad, stats = one_token("vanilla", d, -2.0, loss_options(clip_c=ratio - 1e-12))
    assert (loss, grad, stats["clipped_lower"]) == (pytest.approx(2 * ratio), 0.0, 1.0)


@pytest.mark.parametrize("advantage, log_ratio", [(1.0, 0.3), (-1.0, -0.3)])
def test_dppo_keeps_a_shift_of_exactly_its_bound(advantage: float, log_ratio: float) -> None:
    new = torch.tensor(log_ratio - 1.0, dtype=torch.float64)
    shift = abs(new.exp() - torch.tensor(-1.0, dtype=torch.float64).exp()).item()
    for bound, kept in ((shift, True), (np.nextafter(shift, 0), False)):
        bounds = {"clip_low": bound, "clip_high": 1e-3}
        if advantage > 0:
            bounds = {"clip_low": 1e-3, "clip_high": bound}
        _, grad, stats = one_token("dppo_tv", log_ratio, advantage, loss_options(**bounds))
        assert (grad != 0.0) == kept and stats["clipped"] == float(not kept)


def test_dppo_kl_lets_sure_tokens_be_surer_and_stops_unsure_ones() -> None:
    # In float32, a sure token has log-prob 0. Its binary KL must still be finite.
    sure, _ = build([[((0.0, -1e-6), 1.0, True, False, 1.0)]], torch.float32)
    loss, stats = run("dppo_kl", sure)
    loss.sum().backward()
    assert stats["clipped"].item() == 0.0 and sure.log_probs.grad.item() == pytest.approx(
        -1.0, rel=1e-5
    )
    half = torch.tensor([0.5], dtype=torch.float64).log()
    assert binary_kl(half, torch.zeros_like(half)).item() == pytest.approx(
        0.5 * np.log(0.5) + 0.5 * np.log(0.5 / 1e-8)
    )
    unsure, _ = build(
        [[((-0.01, -2.0), 1.0, True, False, 1.0), ((-2.0, -0.01), 1.0, True, False, 1.0)]]
    )
    assert run("dppo_kl", unsure)[1]["clipped"].tolist() == [1.0, 0.0]  # the second moves back


def test_dro_and_kl_cov_pull_back_from_any_distance() -> None:
    options = loss_options(dro_beta=0.1, ppo_kl_coef=0.5)
    inputs, _ = build([[((-1.0, -101.0), 0.0, True, True, 1.0)]])
    for mode, pull in (("dro", 10.0), ("kl_cov", 0.5)):
        inputs.log_probs.grad = None
        run(mode, inputs, options)[0].sum().backward()
        assert inputs.log_probs.grad.item() == pytest.approx(pull)


def test_options_and_shapes_out_of_range_are_refused() -> None:
    for name, value in {
        "clip_c": 1.0,
        "clip_low": -0.1,
        "tau_pos": 0.0,
        "dro_beta": 0.0,
        "ppo_kl_coef": -1.0,
        "vespo_k_pos": -1.0,
        "vespo_lambda_neg": 0.0,
    }.items():
        with pytest.raises(ValueError, match=name):
            loss_options(**{name: value})
    inputs, _ = build([[((-1.0, -1.0), 1.0, True, True, 1.0)] * 2])
    with pytest.raises(ValueError, match="advantages has shape"):
        run("vanilla", replace(inputs, advantages=inputs.advantages[:1]))
