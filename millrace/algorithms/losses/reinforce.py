"""The policy gradient, and GPG's loss."""

from __future__ import annotations

from millrace.algorithms.policy_loss import LossInput, LossOptions, TokenLoss, policy_loss


@policy_loss(reads_old=False, bounds_stale=False, aliases=("gpg",))
def reinforce(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A log pi: the policy gradient, without a bound on the distance to the old policy.

    This is also the loss of GPG (arXiv 2504.02546), whose own part is in its advantages. With W =
    sg(rho) as a factor, it is off-policy REINFORCE. It does not read the old log-probs, so the
    log_ratio statistic is 0.
    """
    x = inputs.trained()
    return -x.advantages * x.log_probs, x.statistics()
