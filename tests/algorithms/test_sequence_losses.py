"""Losses on whole sequences compared with NumPy in float64 and with the objectives of their papers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.losses.geo_mean import geo_mean
from millrace.algorithms.losses.gspo import gspo
from millrace.algorithms.losses.vespo import vespo
from tests.algorithms.loss_cases import (
    OPTIONS,
    SEQUENCES,
    aggregate,
    build,
    check,
    clamped,
    surrogate,
)
from tests.algorithms.options import loss_options


def trained_of(inputs: Any, sequence: Any) -> Any:
    return [
        t for t in range(len(inputs.mask)) if inputs.mask[t] and inputs.sequence_ids[t] == sequence
    ]


def columns(inputs: Any) -> Any:
    return (
        inputs.log_probs.detach().numpy(),
        inputs.old_log_probs.numpy(),
        inputs.advantages.numpy(),
    )


def sequence_ratio(new: Any, old: Any, tokens: Any) -> Any:
    """Return the ratio of a sequence, and 1 if its bound does not act."""
    mean = sum(new[t] - old[t] for t in tokens) / max(len(tokens), 1)
    return np.exp(min(mean, 10.0)), float(mean <= 10)


def gspo_of(s: Any, inside: Any, new: Any, adv: Any, options: Any) -> Any:
    loss, slope, clipped = surrogate(s, s * inside, adv, options)
    return loss, slope, clipped, 0.0


def vanilla_of(s: Any, inside: Any, new: Any, adv: Any, options: Any) -> Any:
    loss, slope, clipped, _ = gspo_of(s, inside, new, adv, options)
    if adv < 0 and loss > -adv * options.clip_c:
        return -adv * options.clip_c, 0.0, clipped, 1.0
    return loss, slope, clipped, 0.0


def cispo_of(s: Any, inside: Any, new: Any, adv: Any, options: Any) -> Any:
    weight = np.clip(s, 1 - options.clip_low, 1 + options.clip_high)
    return -weight * adv * new, -weight * adv, float(adv != 0 and weight != s), 0.0


def sapo_of(s: Any, inside: Any, new: Any, adv: Any, options: Any) -> Any:
    tau = options.tau_pos if adv > 0 else options.tau_neg
    gate = 1 / (1 + np.exp(-tau * (s - 1)))
    return -adv * 4 / tau * gate, -adv * 4 * gate * (1 - gate) * s * inside, 0.0, 0.0


def vespo_of(w: Any, inside: Any, new: Any, adv: Any, options: Any) -> Any:
    side = "pos" if adv > 0 else "neg"
    k, decay = (getattr(options, f"vespo_{name}_{side}") for name in ("k", "lambda"))
    phi = np.exp(decay) * w**k * np.exp(-decay * w)
    return -phi * adv * new, -phi * adv, 0.0, 0.0


def whole_ratio(new: Any, old: Any, tokens: Any) -> Any:
    return np.exp(np.clip(sum(new[t] - old[t] for t in tokens), -20, 20)), 1.0


def by_sequence(rule: Any, ratio: Any = sequence_ratio) -> Any:
    """Make a reference from a rule: loss, slope and two statistics of a trained token."""

    def reference(inputs: Any, weights: Any, options: Any) -> Any:
        new, old, adv = columns(inputs)
        out = np.zeros((5, len(weights)))
        for sequence in range(inputs.num_sequences):
            tokens = trained_of(inputs, sequence)
            s, inside = ratio(new, old, tokens)
            for t in tokens:
                found = rule(s, inside, new[t], adv[t], options)
                out[:, t] = *found, clamped(new[t], old[t])[0]
                out[1, t] *= weights[t]
        return out

    return reference


def geo_mean_reference(inputs: Any, weights: Any, options: Any) -> Any:
    new, old, adv = columns(inputs)
    out = np.zeros((5, len(weights)))
    for sequence in range(inputs.num_sequences):
        tokens = trained_of(inputs, sequence)
        if not tokens:
            continue
        a = sum(adv[t] for t in tokens) / len(tokens)
        sign, total, open_ = np.sign(a), 0.0, []
        for t in tokens:
            d, inside = clamped(new[t], old[t])
            bounded = min(max(d, -options.clip_low), options.clip_high)
            # As in the paper: take the smaller of both values times the sign.
            pessimistic = sign * min(sign * d, sign * bounded)
            total += pessimistic
            open_.append(float(pessimistic == d) * inside)
            out[2, t], out[4, t] = float(sign != 0 and pessimistic != d), d
        loss = -a * np.exp(total / len(tokens))
        for t, is_open in zip(tokens, open_, strict=True):
            out[0, t] = loss
            out[1, t] = loss * is_open / len(tokens) * sum(weights[u] for u in tokens)
    return out


REFERENCES = {
    ("gspo", "token"): by_sequence(gspo_of),
    ("vespo", "token"): by_sequence(vespo_of, whole_ratio),
    ("geo_mean", "token"): geo_mean_reference,
    ("vanilla", "sequence"): by_sequence(vanilla_of),
    ("cispo", "sequence"): by_sequence(cispo_of),
    ("sapo", "sequence"): by_sequence(sapo_of),
}
"""The reference of each loss and level of its ratio."""


NEAR, HIDDEN = ((-1.0, -4.0), 1.0, True, False, 0.5), ((-2.0, -0.5), 1.0, False, False, 1.0)
FAR = [
    # The mean log-ratio is over 10, and one token is over 20.
    *([((-0.1, -29.0), a, True, False, 1.0), NEAR, HIDDEN] for a in (1.0, -1.0, 0.0)),
    *([((-29.0, -0.1), a, True, False, 1.0)] * 2 for a in (1.0, -1.0)),
]
"""Sequences far from the old policy, which random ones seldom are."""


@pytest.mark.parametrize(("mode", "level"), REFERENCES)
@settings(max_examples=80)
@example(sequences=FAR, options=OPTIONS[0])
@given(sequences=SEQUENCES, options=st.sampled_from(OPTIONS))
def test_losses_of_sequences_match_numpy_in_value_gradient_and_statistics(
    mode: str, level: str, sequences: Any, options: Any
) -> None:
    inputs, weights = build(sequences)
    options = SimpleNamespace(**vars(options) | {"importance_sampling_level": level})
    check(POLICY_LOSSES[mode], inputs, weights, options, REFERENCES[mode, level])


def test_the_weight_of_vespo_is_1_on_policy_and_fades_on_both_sides() -> None:
    def weight(total: float, advantage: float) -> float:
        rows = [((-2.0 + total / 2, -2.0), advantage, True, False, 1.0)] * 2
        inputs, _ = build([rows])
        vespo(inputs, loss_options())[0].sum().backward()
        return abs(inputs.log_probs.grad[0].item() / advantage)

    for advantage, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert weight(0.0, advantage) == 1.0
        assert weight(np.log(peak), advantage) > 1.0
        assert weight(2.0, advantage) < 0.05 and weight(-3.0, advantage) < 0.1


def objective(loss_function: Any, inputs: Any, options: Any) -> Any:
    """Return the aggregated loss and its gradient."""
    lengths = torch.bincount(
        inputs.sequence_ids[inputs.mask], minlength=inputs.num_sequences
    ).double()
    loss, _ = loss_function(inputs, options)
    totals = {"total_tokens": int(inputs.mask.sum()), "total_sequences": inputs.num_sequences}
    value = aggregate(
        loss,
        inputs.mask,
        inputs.sequence_ids,
        "seq-mean-token-mean",
        sequence_lengths=lengths,
        **totals,
    )
    value.backward()
    return value.item(), inputs.log_probs.grad


@settings(max_examples=60)
@given(sequences=SEQUENCES)
def test_gspo_has_the_gradient_of_the_whole_sequences_ratio(sequences: Any) -> None:
    """Plain GSPO clips s_i = (pi(y_i) / pi_old(y_i))^(1 / L_i).

    Its gradient flows through all tokens.
    """
    same = [[(pair, s[0][1], trained, sel, w) for pair, _, trained, sel, w in s] for s in sequences]
    inputs, _ = build(same)
    value, grad = objective(gspo, inputs, loss_options())
    leaf = inputs.log_probs.detach().requires_grad_()
    want = leaf.sum() * 0
    for i in range(inputs.num_sequences):
        tokens = trained_of(inputs, i)
        if tokens:
            s = (leaf - inputs.old_log_probs)[tokens].mean().clamp(max=10).exp()
            a = inputs.advantages[tokens[0]]
            want = want - torch.minimum(a * s, a * s.clamp(0.8, 1.2)) / inputs.num_sequences
    want.backward()
    assert value == pytest.approx(want.item(), rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(grad.numpy(), leaf.grad.numpy(), rtol=1e-6, atol=1e-12)


def test_geo_mean_is_the_mean_over_sequences_however_long() -> None:
    """Two sequences of lengths 1 and 3 give -(A_1 g_1 + A_2 g_2) / 2.

    Rejected tokens do not count in the mean.
    """
    token = lambda d, a, trained=True: ((d - 2.0, -2.0), a, trained, False, 1.0)  # noqa: E731
    inputs, _ = build(
        [
            [token(0.1, 2.0)],
            [token(0.3, -1.0), token(-0.3, -1.0), token(0.05, -1.0), token(0.5, -1.0, False)],
        ]
    )
    value, grad = objective(geo_mean, inputs, loss_options(clip_low=0.2, clip_high=0.2))
    first, second = 2 * np.exp(0.1), -np.exp((0.3 - 0.2 + 0.05) / 3)
    assert value == pytest.approx(-(first + second) / 2)
    assert grad.tolist() == pytest.approx([-first / 2, -second / 6, 0.0, -second / 6, 0.0])


@pytest.mark.parametrize("advantage, sign", [(1.0, 1.0), (-1.0, -1.0)])
def test_a_log_ratio_on_geo_means_edge_is_inside(advantage: float, sign: float) -> None:
    # 0.25 and -1 are exact in binary, so the log-ratio is exactly the edge.
    for edge, clipped in ((0.25, 0.0), (np.nextafter(0.25, 0), 1.0)):
        inputs, _ = build([[((-1.0 + sign * 0.25, -1.0), advantage, True, False, 1.0)]])
        loss, stats = geo_mean(inputs, loss_options(clip_low=edge, clip_high=edge))
        loss.sum().backward()
        assert stats["clipped"].item() == clipped
        assert (inputs.log_probs.grad.item() == 0.0) == bool(clipped)


def test_gspo_keeps_the_digits_of_a_small_clip_in_float32() -> None:
    """4,000 tokens have log-ratios that nearly cancel.

    The ratio of the sequence is 1 + 2e-4, inside a clip of 3e-4.
    """
    n = 4000
    old = -torch.arange(n, dtype=torch.float32) / 400
    shift = torch.where(torch.arange(n) % 2 == 0, 0.5, -0.5) + 2e-4
    rows = [
        ((float(o + d), float(o)), 1.0, True, False, 1.0) for o, d in zip(old, shift, strict=True)
    ]
    inputs, _ = build([rows], torch.float32)
    want = np.exp(
        np.mean((inputs.log_probs.detach().double() - inputs.old_log_probs.double()).numpy())
    )
    loss, stats = gspo(inputs, loss_options(clip_low=3e-4, clip_high=3e-4))
    assert loss[0].item() == pytest.approx(-want, abs=1e-6)
    assert loss.unique().numel() == 1
    assert not stats["clipped"].any()
