"""The advantage estimators by name: the advantage of each trained token of a batch.

All estimators compute in float64, without a gradient. A trajectory outside `keep` changes no result
of another trajectory. All statistics (of groups, of whitening) are over the given batch, so pass
whole batches, not micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from millrace.algorithms import advantages
from millrace.algorithms.advantages import normalize
from millrace.algorithms.norm_options import NormOptions
from millrace.algorithms.ragged import sequence_ids, sequence_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch:
    """N trajectories with T trained tokens, in the layout of `ragged`.

    Floats may have any dtype. Wrong shapes raise ValueError. NEEDS says which estimators need the
    fields that may be None.
    """

    scores: Tensor
    """[N] the outcome reward of each trajectory."""
    groups: Tensor
    """[N] integers: the number of each trajectory's prompt."""
    lengths: Tensor
    """[N] int64: the number of trained tokens of each trajectory.

    A trajectory without tokens still enters the group's statistics.
    """
    token_rewards: Tensor | None = None
    """[T] rewards of tokens (a KL penalty), without the score, which is on the last token."""
    components: dict[str, Tensor] | None = None
    """Rewards by name, each [N], that gdpo normalises separately."""
    values: Tensor | None = None
    """[T] gae: the critic's value of the state before each token."""
    truncated: Tensor | None = None
    """[N] bool, gae with bootstrap_truncated: cut by the length limit."""
    greedy_scores: Tensor | None = None
    """[N] remax: the score of the greedy response to the same prompt."""
    log_probs: Tensor | None = None
    """[T] optimal_token_baseline: log-probs of the policy at the batch's arrival."""
    sum_pi_squared: Tensor | None = None
    """[T] optimal_token_baseline: the same policy's sum of p^2 over the vocabulary."""
    weights: Tensor | None = None
    """[T] optimal_token_baseline: importance weights, 1 if None."""
    keep: Tensor | None = None
    """[N] bool: trajectories that take part; all if None.

    Other trajectories get 0 and have no effect, whatever their values are.
    """
    trained: Tensor | None = None
    """[T] bool: tokens that whitening and adv_norm count; all if None.

    Other tokens are in no mean and no variance there, and get 0.
    """

    def __post_init__(self) -> None:
        n, t = (len(self.scores),), (int(self.lengths.sum()),)
        for shape, fields in ((n, self.per_trajectory()), (t, self.per_token())):
            for name, x in fields.items():
                if x is not None and x.shape != shape:
                    raise ValueError(f"{name} has shape {tuple(x.shape)}, must have {shape}")

    def per_trajectory(self) -> dict[str, Tensor | None]:
        """Return the fields that are [N], by name, including those of `components`."""
        own = {
            "groups": self.groups,
            "lengths": self.lengths,
            "scores": self.scores,
            "greedy_scores": self.greedy_scores,
        }
        parts = {f"components[{name!r}]": x for name, x in (self.components or {}).items()}
        return {**own, "truncated": self.truncated, "keep": self.keep, **parts}

    def per_token(self) -> dict[str, Tensor | None]:
        """Return the fields that are [T], by name."""
        return {
            "token_rewards": self.token_rewards,
            "values": self.values,
            "log_probs": self.log_probs,
            "sum_pi_squared": self.sum_pi_squared,
            "weights": self.weights,
            "trained": self.trained,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """Options of the estimators. Each estimator reads its own and ignores the others."""

    norm_by_std: bool
    """grpo, grpo_passk, gdpo: divide by the standard deviation of the group."""
    gamma: float
    """gae, reinforce_plus_plus: discount of rewards, 0 to 1."""
    lam: float
    """gae: 0 trusts the critic, 1 the rewards."""
    component_weights: dict[str, float] | None
    """gdpo: weight of each component, 1 if its name is missing."""
    bootstrap_truncated: bool
    """gae: end a truncated trajectory with the value of its last state, and ignore its score."""
    whiten: bool
    """gae, gdpo, reinforce_plus_plus[_baseline]: whiten the advantages over the trained tokens."""
    eps: float
    """grpo, grpo_passk, gdpo, gpg: added to the standard deviation of the group."""
    f_norm: float | Literal["std"]
    """gpg: the divisor of advantages."""
    reward_norm: NormOptions
    """Normalisation of the scores, before anything else. gdpo and remax cannot use it."""
    adv_norm: NormOptions
    """Normalisation of the advantages of the trained tokens, after everything else."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"gamma and lam must be 0 to 1, got {self.gamma} and {self.lam}")
        if not self.eps > 0 or not (self.f_norm == "std" or self.f_norm > 0):
            raise ValueError(f"eps and f_norm must be over 0, got {self.eps} and {self.f_norm}")


@dataclass(frozen=True, slots=True)
class Advantages:
    """The result of `estimate`. Trajectories outside `keep` have 0 in both tensors."""

    tokens: Tensor
    """[T] float64."""
    returns: Tensor | None = None
    """[T] float64, gae only: targets of the critic (advantages before whitening, plus values)."""


def estimate(name: str, batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Return the advantages of the trained tokens of a batch, by the name of an estimator.

    Outcome estimators use the outcome s_i = score + the sum of the trajectory's token_rewards. They
    compute one number for each trajectory, and each of its tokens gets that number. N = 0 and T = 0
    give empty tensors.

    Raises ValueError in these cases:

    - an unknown name
    - a missing field of NEEDS; the error has its name
    - a float of a kept trajectory that is not finite
    - token_rewards with gdpo, which cannot use them
    - reward_norm with gdpo, which reads no score, and with remax, whose greedy scores it would not
      change
    """
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(ESTIMATORS)}")
    given = {**batch.per_trajectory(), **batch.per_token(), "components": batch.components}
    missing = sorted(field for field in NEEDS[name] if given[field] is None)
    if missing:
        raise ValueError(f"advantage estimator {name} needs {', '.join(missing)}")
    if options.reward_norm.active and name in ("gdpo", "remax"):
        raise ValueError(f"advantage estimator {name} cannot use reward_norm")
    keep = (
        torch.ones_like(batch.groups, dtype=torch.bool) if batch.keep is None else batch.keep.bool()
    )
    at = keep[sequence_ids(batch.lengths)]
    part = _part(batch, keep, at)
    if options.reward_norm.active:
        part = replace(part, scores=normalize(part.scores, part.groups, options.reward_norm))
    result = ESTIMATORS[name](part, options)
    tokens = result.tokens
    if options.adv_norm.active:
        groups = _each_token(part, part.groups)
        tokens = (
            normalize(tokens, groups, options.adv_norm)
            if part.trained is None
            else _spread(
                normalize(tokens[part.trained], groups[part.trained], options.adv_norm),
                part.trained,
            )
        )
    return Advantages(
        _spread(tokens, at), None if result.returns is None else _spread(result.returns, at)
    )


def _part(batch: AdvantageBatch, keep: Tensor, at: Tensor) -> AdvantageBatch:
    """Select the trajectories `keep` [N] and their tokens `at` [T], with floats in float64.

    A float of a token that is not trained becomes 0 if it is not finite. Raises ValueError if
    another selected float is not finite.
    """
    trained = None if batch.trained is None or bool(batch.trained.all()) else batch.trained.bool()

    def floats(name: str, x: Tensor, index: Tensor) -> Tensor:
        y = x.detach()[index].double()
        if not bool(torch.isfinite(y).all()):
            raise ValueError(f"{name} is not finite everywhere")
        return y

    tokens = {
        name: None
        if x is None
        else floats(name, x if trained is None else x.where(trained | x.isfinite(), 0), at)
        for name, x in batch.per_token().items()
        if name != "trained"
    }
    return AdvantageBatch(
        scores=floats("scores", batch.scores, keep),
        groups=batch.groups[keep],
        lengths=batch.lengths[keep],
        components=batch.components
        and {k: floats(f"component {k}", x, keep) for k, x in batch.components.items()},
        truncated=None if batch.truncated is None else batch.truncated.bool()[keep],
        greedy_scores=None
        if batch.greedy_scores is None
        else floats("greedy_scores", batch.greedy_scores, keep),
        trained=None if trained is None else trained[at],
        **tokens,
    )


def _spread(values: Tensor, at: Tensor) -> Tensor:
    return values.new_zeros(at.shape).masked_scatter(at, values)


def _outcomes(batch: AdvantageBatch) -> Tensor:
    """Return s_i [N]."""
    if batch.token_rewards is None:
        return batch.scores
    return batch.scores + sequence_sums(
        batch.token_rewards, sequence_ids(batch.lengths), len(batch.lengths)
    )


def _rewards(batch: AdvantageBatch) -> Tensor:
    """Return the rewards of tokens [T], with the score on the last token."""
    return advantages.place_scores(batch.scores, batch.lengths, batch.token_rewards)


def _each_token(batch: AdvantageBatch, scalars: Tensor) -> Tensor:
    return scalars[sequence_ids(batch.lengths)]


def _whiten(values: Tensor, batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    if not options.whiten:
        return values
    if batch.trained is None:
        return advantages.whiten(values)
    return _spread(advantages.whiten(values[batch.trained]), batch.trained)


def _grpo(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    by_std, eps = options.norm_by_std, options.eps
    scalars = advantages.grpo(_outcomes(batch), batch.groups, norm_by_std=by_std, eps=eps)
    return Advantages(_each_token(batch, scalars))


def _grpo_passk(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    by_std, eps = options.norm_by_std, options.eps
    scalars = advantages.grpo_passk(_outcomes(batch), batch.groups, norm_by_std=by_std, eps=eps)
    return Advantages(_each_token(batch, scalars))


def _rloo(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    return Advantages(_each_token(batch, advantages.rloo(_outcomes(batch), batch.groups)))


def _opo(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    return Advantages(
        _each_token(batch, advantages.opo(_outcomes(batch), batch.groups, batch.lengths))
    )


def _gpg(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    f_norm, eps = options.f_norm, options.eps
    scalars = advantages.gpg(_outcomes(batch), batch.groups, f_norm=f_norm, eps=eps)
    return Advantages(_each_token(batch, scalars))


def _reinforce_plus_plus(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Compute the reward to go with discount gamma, whitened over the trained tokens.

    There is no group baseline (REINFORCE++, arXiv 2501.03262).
    """
    to_go = advantages.discounted_sums(_rewards(batch), batch.lengths, options.gamma)
    return Advantages(_whiten(to_go, batch, options))


def _reinforce_plus_plus_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Give s_i - mean_g to each token, whitened over the trained tokens.

    (REINFORCE++ with baseline, arXiv 2501.03262.) A long response has more weight in the whitening.
    Groups of equal s_i, including groups of one, are exactly 0 before whitening and share one value
    after it. verl whitens the raw score of a group of one together with the differences of other
    groups.
    """
    centered = advantages.grpo(_outcomes(batch), batch.groups, norm_by_std=False, eps=options.eps)
    return Advantages(_whiten(_each_token(batch, centered), batch, options))


def _gdpo(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Apply `advantages.gdpo` to each token and whiten over the trained tokens.

    This is verl's form (the paper whitens over trajectories). token_rewards are refused, because
    gdpo normalises every reward separately. verl silently ignores a KL penalty here.
    """
    if batch.token_rewards is not None:
        raise ValueError(
            "gdpo cannot use token_rewards: put a KL penalty into the loss, not into the reward"
        )
    weights, by_std = options.component_weights, options.norm_by_std
    scalars = advantages.gdpo(
        batch.components or {}, batch.groups, weights=weights, norm_by_std=by_std, eps=options.eps
    )
    return Advantages(_whiten(_each_token(batch, scalars), batch, options))


def _gae(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    assert batch.values is not None
    truncated, rewards = None, _rewards(batch)
    if options.bootstrap_truncated:
        if batch.truncated is None:
            raise ValueError("advantage estimator gae with bootstrap_truncated needs truncated")
        truncated = batch.truncated
        rewards = advantages.place_scores(
            batch.scores.masked_fill(truncated, 0.0), batch.lengths, batch.token_rewards
        )
    estimates, targets = advantages.gae(
        rewards,
        batch.values,
        batch.lengths,
        gamma=options.gamma,
        lam=options.lam,
        truncated=truncated,
    )
    return Advantages(_whiten(estimates, batch, options), targets)


def _remax(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    assert batch.greedy_scores is not None
    return Advantages(advantages.remax(_rewards(batch), batch.lengths, batch.greedy_scores))


def _optimal_token_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    assert batch.log_probs is not None and batch.sum_pi_squared is not None
    return Advantages(
        advantages.optimal_token_baseline(
            _rewards(batch),
            batch.lengths,
            batch.groups,
            batch.log_probs,
            batch.sum_pi_squared,
            batch.weights,
        )
    )


ESTIMATORS: dict[str, Callable[[AdvantageBatch, AdvantageOptions], Advantages]] = {
    "gae": _gae,
    "gdpo": _gdpo,
    "gpg": _gpg,
    "grpo": _grpo,
    "grpo_passk": _grpo_passk,
    "opo": _opo,
    "optimal_token_baseline": _optimal_token_baseline,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "rloo": _rloo,
}
"""Estimators by their names in `algorithm.adv_estimator`."""

NEEDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(ESTIMATORS, frozenset[str]()),
    "gae": frozenset({"values"}),
    "gdpo": frozenset({"components"}),
    "optimal_token_baseline": frozenset({"log_probs", "sum_pi_squared"}),
    "remax": frozenset({"greedy_scores"}),
}
"""The optional fields of AdvantageBatch that an estimator requires.

gae with bootstrap_truncated also requires `truncated`.
"""
