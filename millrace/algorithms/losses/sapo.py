"""SAPO: a smooth clip."""

from __future__ import annotations

from pydantic import Field

from millrace.algorithms.policy_loss import LossInput, LossOptions, TokenLoss, policy_loss


class SapoOptions(LossOptions):
    tau_pos: float = Field(1.0, gt=0)
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: temperature of the gate for zero and negative advantages."""


@policy_loss(options=SapoOptions, sequence_level=True, by_sequence=True)
def sapo(inputs: LossInput, options: SapoOptions) -> TokenLoss:
    """Compute -A (4 / tau) sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg.

    (SAPO, arXiv 2511.20347.) This is a smooth clip. At rho = 1, the gradient is that of -A log pi,
    and it fades on both sides. The `clipped` statistics are 0. With
    importance_sampling_level="sequence", rho is the sequence's ratio (as in TRL). The aggregation
    seq-mean-token-mean then has the value and the gradient of one gate for each sequence.
    """
    x = inputs.trained()
    tau = x.advantages.new_full(x.advantages.shape, options.tau_pos)
    tau = tau.where(x.advantages > 0, options.tau_neg)
    gate = (tau * (x.log_ratio_at(options).exp() - 1)).sigmoid() * (4 / tau)
    return -gate * x.advantages, x.statistics(log_ratio=x.log_ratio())
