"""REINFORCE with a truncated importance weight (arXiv 1611.01224), as a loss of your own.

    millrace check-algorithm examples/algorithms/truncated_reinforce.py:truncated_reinforce
    millrace train quickstart \
        actor.policy_loss.loss_mode=examples/algorithms/truncated_reinforce.py:truncated_reinforce
"""

from __future__ import annotations

from pydantic import Field

from millrace.algorithms.policy_loss import LossInput, LossOptions, TokenLoss, policy_loss


class Options(LossOptions):
    cap: float = Field(2.0, gt=0)
    """Largest weight of a token."""


@policy_loss(options=Options, stops_gradient=True)
def truncated_reinforce(inputs: LossInput, options: Options) -> TokenLoss:
    """Compute -sg(min(rho, cap)) A log pi."""
    x = inputs.trained()
    ratio = x.log_ratio().detach().exp()
    weight = ratio.clamp(max=options.cap)
    statistics = x.statistics(log_ratio=x.log_ratio(), clipped=weight < ratio)
    return -weight * x.advantages * x.log_probs, statistics
