"""The mask of DeepSeek-V3.2: no policy loss for bad tokens of sequences that are far away."""

from __future__ import annotations

from torch import Tensor

from millrace.algorithms.correction import EDGE, Ratios


def off_policy_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    advantages: Tensor,
    *,
    threshold: float,
    include: Tensor | None,
) -> Tensor:
    """Mark the tokens that stay, [T] bool: all but those of A < 0 in sequences that are far away.

    (Off-policy sequence mask of DeepSeek-V3.2, arXiv 2512.02556.) A sequence is far away if
    the mean of rollout_log_probs - log_probs over its included tokens is over `threshold`. That is
    the k1 estimate of KL(rollout || current). A sequence with a ratio that is not finite is far
    away too. A token with A >= 0 always stays.

    log_probs [T] are of the policy under training, and rollout_log_probs [T] of the policy that
    drew the tokens. advantages are [T]. The other arguments are those of `correct`. Tokens outside `include` stay
    and are in no mean. The computation is in float64. Multiply the policy's token losses by the
    result. The masked tokens still count in denominators, as in the paper.

    TRL's `off_policy_mask_threshold` and slime's `opsm_delta` are the same. slime takes one
    advantage for each sequence, and compares with its old policy instead of the rollout's.
    """
    ratios = Ratios.of(log_probs, rollout_log_probs, sequence_ids, num_sequences, include)
    near = ratios.whole & (-ratios.sequence_means() <= threshold + EDGE)
    stays = near[sequence_ids] | ~(advantages.detach() < 0)
    return stays if include is None else stays | ~include
