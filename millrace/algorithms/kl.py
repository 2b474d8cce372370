"""Estimators of KL(pi || reference) from the log-probs of tokens that pi drew.

(J. Schulman, "Approximating KL divergence".) Each estimator takes log_probs and ref_log_probs of
one shape and one floating dtype. It returns one estimate for each token, in that shape, with a
gradient to log_probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from millrace.algorithms.policy_loss import log_ratio


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute log pi - log ref: unbiased, may be negative.

    As a loss it is useless, because its expected gradient is 0. It is useful in rewards and
    metrics.
    """
    return log_probs - ref_log_probs


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute |log pi - log ref|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute (log pi - log ref)^2 / 2: biased value, unbiased gradient."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute exp(x) - x - 1 with x = log ref - log pi: unbiased, never negative, low variance.

    x is clamped to +-20 and the value to +-10 (verl's low_var_kl). The value reaches 10 at x =
    2.611 and at x = -11.000, where ref / pi is 13.6 and 1 / 59873. A token beyond these points
    gives 10 and no gradient.
    """
    x = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    # expm1 preserves digits where the two policies nearly agree. exp(x) - 1 does not.
    return (x.expm1() - x).clamp(-10.0, 10.0)


Estimator = Callable[[Tensor, Tensor], Tensor]


def with_k2_gradient(estimator: Estimator) -> Estimator:
    """Return an estimator with the value of `estimator` and the gradient of k2, log pi - log ref.

    The mean of that gradient is the gradient of the KL. The result is k2 - sg(k2) + sg(estimator),
    a straight-through estimator. Its gradient is that of k2 even where `estimator` is clamped and
    has no gradient.
    """

    def estimate(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        carrier = k2(log_probs, ref_log_probs)
        # In this order, the first difference is exactly 0 and the value keeps its digits.
        return (carrier - carrier.detach()) + estimator(log_probs, ref_log_probs).detach()

    return estimate


def weighted_by_ratio(
    estimator: Estimator, log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor
) -> Tensor:
    """Compute rho x the estimate, rho = exp(clamp(log pi - log pi_old, +-20)), with rho's gradient.

    (Unbiased KL estimate of DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`,
    slime's `--use-unbiased-kl`.) pi_old drew the tokens, so the mean of the result is an
    estimate under pi. With k3, value and gradient are unbiased. All tensors have one shape and
    dtype. Do not use an estimator of `with_k2_gradient`: its gradient is that of the KL already.

    The estimator keeps its own clamps. slime's k3 clamps the product. TRL clamps nothing, and takes
    the sequence's ratio with importance_sampling_level="sequence"; here rho is always the token's.
    """
    rho = log_ratio(log_probs, old_log_probs.detach()).exp()
    return rho * estimator(log_probs, ref_log_probs)


_BASE: dict[str, Estimator] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}

KL: dict[str, Estimator] = _BASE | {
    f"{name}+": with_k2_gradient(estimator) for name, estimator in _BASE.items()
}
"""Estimators by their names in recipes. A name with `+` has the gradient of k2."""

MAX_ERROR = 0.2
"""Bound on the error kl / target - 1 in one update of the coefficient."""


def adapt(coef: float, kl: float, target: float, horizon: float, count: float) -> float:
    """Compute coef (1 + clip(kl / target - 1, +-0.2) count / horizon).

    The result is the next coefficient of a KL penalty in the reward (arXiv 1909.08593, where
    count / horizon is the constant 0.1). kl is the mean over the batch. count is the batch's number
    of trajectories. For a fixed coefficient, do not call this function.

    Raises ValueError in these cases:

    - target or horizon is not over 0
    - kl is not finite; the coefficient would never recover
    - 0.2 count reaches the horizon; the coefficient could reach 0 or change its sign
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon must be over 0, got {target} and {horizon}")
    if not math.isfinite(kl):
        raise ValueError(f"kl is {kl}")
    if MAX_ERROR * count >= horizon:
        raise ValueError(
            f"a horizon of {horizon} is too short for steps of {count}: "
            f"it must be over {MAX_ERROR * count}"
        )
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coef * (1 + error * count / horizon)
