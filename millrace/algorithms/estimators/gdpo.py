"""GDPO: each reward is normalised by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.estimators.grpo import grpo

if TYPE_CHECKING:
    from torch import Tensor


def gdpo(
    components: Mapping[str, Tensor],
    groups: Tensor,
    *,
    weights: Mapping[str, float] | None,
    norm_by_std: bool,
    eps: float,
) -> Tensor:
    """Compute sum_k w_k grpo(r_k): each reward is normalised within its group, then all are added.

    (GDPO, arXiv 2601.05242.) `components` are the rewards by name, each [N]. `weights` are the w_k
    by name, 1 for a missing name. The estimator whitens afterwards. A component that is equal within
    a group adds exactly 0 in that group.

    Raises ValueError without components, and for a weight of an unknown component.
    """
    chosen = dict(weights or {})
    unknown = sorted(set(chosen) - set(components))
    if not components or unknown:
        raise ValueError(
            f"gdpo needs components, got {sorted(components)}; unknown names in weights: {unknown}"
        )
    parts = [
        grpo(r, groups, norm_by_std=norm_by_std, eps=eps) * chosen.get(name, 1.0)
        for name, r in components.items()
    ]
    return sum(parts[1:], start=parts[0])


@estimator(
    "gdpo",
    by_token=True,
    needs={"components"},
    reads={"norm_by_std", "eps", "component_weights", "whiten"},
    group_relative=True,
    not_normalised="the components",
)
def _gdpo(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    """Give `gdpo` to each token and whiten over the trained tokens.

    This is verl's form (the paper whitens over trajectories). token_rewards are refused, because
    gdpo normalises every reward separately. verl silently ignores a KL penalty here.
    """
    if batch.token_rewards is not None:
        raise ValueError(
            "gdpo cannot use token_rewards: put a KL penalty into the loss, not into the reward"
        )
    weights, by_std = options.component_weights, options.norm_by_std
    scalars = gdpo(
        batch.components or {}, batch.groups, weights=weights, norm_by_std=by_std, eps=options.eps
    )
    return batch.whitened(batch.each_token(scalars), options)
