"""Ragged batches for the policy losses, and a reference for each mode.

The references follow the definitions and do not use torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from millrace.algorithms.policy_loss import LossInput
from millrace.algorithms.token_weights import token_weights
from tests.algorithms.options import loss_options

LOG_PROB = st.floats(-30, 0)
NEAR = st.tuples(st.floats(-3, 0), st.floats(-0.7, 0.7)).map(
    lambda x: (min(x[0] + x[1], 0.0), x[0])
)
"""(new, old) log-probs with a ratio near 1."""
PAIR = st.one_of(NEAR, st.tuples(LOG_PROB, LOG_PROB), LOG_PROB.map(lambda x: (x, x)))
ADVANTAGE = st.one_of(st.just(0.0), st.floats(-4, 4))
TOKEN = st.tuples(PAIR, ADVANTAGE, st.booleans(), st.booleans(), st.floats(0, 2))
SEQUENCES = st.lists(st.lists(TOKEN, max_size=6), max_size=5)
"""Sequences of ((new, old), advantage, trained, selected, weight in the sum); some are empty."""


def aggregate(
    loss: Any, mask: Any, sequence_ids: Any, mode: str, *, scale: Any = 1.0, **counts: Any
) -> Any:
    """Return the weighted sum of token losses, as the train engine computes it."""
    weights = token_weights(
        mode,  # type: ignore[arg-type]
        sequence_ids=sequence_ids,
        scale=scale,
        dtype=loss.dtype,
        **counts,
    )
    return (loss.masked_fill(mask == 0, 0.0) * weights).sum()


def build(sequences: Any, dtype: Any = torch.float64) -> Any:
    """Return a LossInput, whose log_probs are a leaf, and the weights of its tokens."""
    rows = [token for sequence in sequences for token in sequence]
    floats = lambda values: torch.tensor(values, dtype=dtype)  # noqa: E731
    inputs = LossInput(
        log_probs=floats([new for (new, _), *_ in rows]).requires_grad_(),
        old_log_probs=floats([old for (_, old), *_ in rows]),
        advantages=floats([row[1] for row in rows]),
        sequence_ids=torch.tensor(
            [i for i, s in enumerate(sequences) for _ in s], dtype=torch.long
        ),
        num_sequences=len(sequences),
        mask=torch.tensor([row[2] for row in rows], dtype=torch.bool),
        selected=torch.tensor([row[3] for row in rows], dtype=torch.bool),
    )
    return inputs, floats([row[4] for row in rows])


def check(loss_function: Any, inputs: Any, weights: Any, options: Any, reference: Any) -> None:
    """Check a loss, the gradient of its weighted sum and its statistics against `reference`.

    The reference returns (loss, gradient, clipped, clipped_lower, log_ratio).
    """
    loss, stats = loss_function(inputs, options)
    (loss * weights).sum().backward()
    want = reference(inputs, weights.numpy(), options)
    got = (
        loss.detach(),
        inputs.log_probs.grad,
        stats["clipped"],
        stats["clipped_lower"],
        stats["log_ratio"],
    )
    for name, ours, theirs in zip(
        ("loss", "gradient", "clipped", "clipped_lower", "log_ratio"), got, want, strict=True
    ):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6, atol=1e-9, err_msg=name)
    assert set(stats) == {"clipped", "clipped_lower", "log_ratio"}
    assert not any(value.requires_grad for value in stats.values())


def by_token(rule: Any) -> Any:
    """Make a reference for whole inputs from a rule for one trained token.

    The rule returns the token's loss, its slope and three statistics.
    """

    def reference(inputs: Any, weights: Any, options: Any) -> Any:
        columns = (
            inputs.log_probs.detach(),
            inputs.old_log_probs,
            inputs.advantages,
            inputs.selected,
            inputs.mask,
        )
        out = np.zeros((len(weights), 5))
        for i, (new, old, adv, selected, trained) in enumerate(
            zip(*(c.tolist() for c in columns), strict=True)
        ):
            if trained:
                out[i] = rule(new, old, adv, selected, options)
                out[i, 1] *= weights[i]
        return out.T

    return reference


def clamped(new: Any, old: Any) -> Any:
    """Return the clamped log rho and its slope."""
    return float(np.clip(new - old, -20, 20)), float(abs(new - old) <= 20)


def surrogate(ratio: Any, slope: Any, adv: Any, options: Any) -> Any:
    """Return the larger of the plain and the clipped surrogate, its slope, and if it is clipped."""
    plain, bounded = (
        -adv * ratio,
        -adv * min(max(ratio, 1 - options.clip_low), 1 + options.clip_high),
    )
    return (bounded, 0.0, 1.0) if bounded > plain else (plain, -adv * slope, 0.0)


def vanilla(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    d, inside = clamped(new, old)
    loss, slope, clipped = surrogate(np.exp(d), np.exp(d) * inside, adv, options)
    if adv < 0 and loss > -adv * options.clip_c:
        return -adv * options.clip_c, 0.0, clipped, 1.0, d
    return loss, slope, clipped, 0.0, d


def reinforce(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    return -adv * new, -adv, 0.0, 0.0, 0.0


def cispo(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    d, _ = clamped(new, old)
    weight = np.clip(np.exp(d), 1 - options.clip_low, 1 + options.clip_high)
    return -weight * adv * new, -weight * adv, float(adv != 0 and weight != np.exp(d)), 0.0, d


def sapo(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    d, inside = clamped(new, old)
    tau = options.tau_pos if adv > 0 else options.tau_neg
    fall = np.exp(-tau * (np.exp(d) - 1))
    return (
        -adv * 4 / tau / (1 + fall),
        -adv * 4 * fall / (1 + fall) ** 2 * np.exp(d) * inside,
        0.0,
        0.0,
        d,
    )


def dro(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    loss = -(adv * new - options.dro_beta / 2 * (new - old) ** 2)
    return loss, -adv + options.dro_beta * (new - old), 0.0, 0.0, clamped(new, old)[0]


def clip_cov(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    d, inside = clamped(new, old)
    loss, slope, clipped = surrogate(np.exp(d), np.exp(d) * inside, adv, options)
    return (0.0, 0.0, 1.0, 0.0, d) if selected else (loss, slope, clipped, 0.0, d)


def kl_cov(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
    d, inside = clamped(new, old)
    loss, slope = -adv * np.exp(d), -adv * np.exp(d) * inside
    if selected:
        loss, slope = (
            loss + options.ppo_kl_coef * abs(new - old),
            slope + options.ppo_kl_coef * np.sign(new - old),
        )
    return loss, slope, 0.0, 0.0, d


def dppo(kept: Any) -> Any:
    def rule(new: Any, old: Any, adv: Any, selected: Any, options: Any) -> Any:
        d, _ = clamped(new, old)
        if not kept(new, old, adv, options):
            return 0.0, 0.0, float(adv != 0), 0.0, d
        weight = min(np.exp(d), options.dppo_clip_c)
        return (
            -adv * weight * new,
            -adv * weight,
            0.0,
            float(adv != 0 and np.exp(d) > options.dppo_clip_c),
            d,
        )

    return rule


def within_tv(new: Any, old: Any, adv: Any, options: Any) -> Any:
    shift = np.exp(new) - np.exp(old)
    return shift <= options.clip_high if adv > 0 else shift >= -options.clip_low


def within_kl(new: Any, old: Any, adv: Any, options: Any) -> Any:
    p_old, rest_old, rest = np.exp(old), max(-np.expm1(old), 1e-8), max(-np.expm1(new), 1e-8)
    kl = p_old * np.clip(old - new, -20, 20) + rest_old * np.log(rest_old / rest)
    if adv > 0:
        return kl <= options.clip_high or new <= old
    return kl <= options.clip_low or new >= old


TOKEN_RULES = {
    "vanilla": vanilla,
    "gpg": reinforce,
    "reinforce": reinforce,
    "cispo": cispo,
    "sapo": sapo,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo(within_tv),
    "dppo_kl": dppo(within_kl),
}

OPTIONS = [
    loss_options(),
    loss_options(
        clip_low=0.1,
        clip_high=0.5,
        clip_c=1.2,
        tau_pos=0.7,
        tau_neg=2.0,
        vespo_k_pos=0.0,
        vespo_lambda_pos=0.5,
        vespo_k_neg=1.1,
        vespo_lambda_neg=0.3,
        dro_beta=0.6,
        ppo_kl_coef=1.0,
        dppo_clip_c=1.5,
    ),
    loss_options(clip_low=3e-4, clip_high=4e-4),
]
