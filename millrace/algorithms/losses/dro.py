"""DRO: the policy gradient with a squared log-ratio."""

from __future__ import annotations

from pydantic import Field

from millrace.algorithms.policy_loss import LossInput, LossOptions, TokenLoss, policy_loss


class DroOptions(LossOptions):
    dro_beta: float = Field(0.05, gt=0)
    """dro: weight of the squared log-ratio, on the scale of the advantages.

    Tinker uses 0.05. verl has no default.
    """


@policy_loss(options=DroOptions)
def dro(inputs: LossInput, options: DroOptions) -> TokenLoss:
    """Compute -(A log pi - dro_beta / 2 (log pi - log pi_old)^2).

    (DRO, arXiv 2405.19107, for each token as in verl and Tinker.) The log-ratio in the loss is not
    clamped, so the square also pulls back a token that has moved far.
    """
    x = inputs.trained()
    distance = (x.log_probs - x.old_log_probs).square()
    loss = 0.5 * options.dro_beta * distance - x.advantages * x.log_probs
    return loss, x.statistics(log_ratio=x.log_ratio())
