"""Estimators of KL(pi || reference) from the log-probs of tokens that pi drew (J. Schulman, "Approximating KL divergence").

Each takes log_probs and ref_log_probs of one shape and floating dtype and returns an estimate for each token, of that shape,
with a gradient to log_probs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log pi - log ref. Unbiased, may be negative; as a loss its expected gradient is 0: of use in rewards and metrics."""
    return log_probs - ref_log_probs


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log pi - log ref|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2. Biased value, unbiased gradient."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log ref - log pi. Unbiased, never negative, low variance.

    x is clamped to +-20 and the value to +-10 (verl's low_var_kl): a token with a ratio over 12 gives 10 and no gradient.
    """
    x = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    # expm1 keeps the digits that exp(x) - 1 loses where the two policies nearly agree.
    return (x.expm1() - x).clamp(-10.0, 10.0)


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}
"""By the names that recipes use."""
