"""PPO's clipped surrogate with clip-higher and dual clip."""

from __future__ import annotations

from millrace.algorithms.policy_loss import (
    LossInput,
    LossOptions,
    TokenLoss,
    clipped_surrogate,
    policy_loss,
)


@policy_loss(sequence_level=True)
def vanilla(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute PPO's clipped surrogate with clip-higher and dual clip.

    (arXiv 1707.06347; DAPO, arXiv 2503.14476; arXiv 1912.09729.)

    clip = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
    loss = min(clip, -A clip_c) if A < 0, else clip

    With importance_sampling_level="sequence", this is `gspo` with dual clip (AReaL has it by the
    same key and `c_clip`; verl's gspo has no dual clip). Ratios on a bound are not clipped.
    """
    x = inputs.trained()
    pessimistic, clipped = clipped_surrogate(x.log_ratio_at(options).exp(), x.advantages, options)
    bound = (-x.advantages * options.clip_c).where(x.advantages < 0, float("inf"))
    over = pessimistic > bound
    stats = x.statistics(log_ratio=x.log_ratio(), clipped=clipped, clipped_lower=over)
    return bound.where(over, pessimistic), stats
