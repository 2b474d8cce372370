"""Advantage estimators: the batch they read, their options, and the facts beside a function.

    @estimator("my_advantage", group_relative=True)
    def my_advantage(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor: ...

All estimators compute in float64, without a gradient. A trajectory outside `keep` changes no result
of another trajectory. All statistics (of groups, of whitening) are over the given batch, so pass
whole batches, not micro-batches. The configuration reads the facts, so this module and the files of
`estimators/` need no torch before they compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from millrace.algorithms.groups import normalize
from millrace.algorithms.norm_options import NormOptions
from millrace.algorithms.ragged import form, sequence_ids, sequence_sums
from millrace.algorithms.returns import place_scores, whiten

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch:
    """N trajectories with T trained tokens, in the layout of `ragged`.

    Floats may have any dtype. Wrong shapes raise ValueError. `Estimator.needs` says which estimators
    need the fields that may be None.
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
    goes_on: Tensor | None = None
    """[N] bool, gae: another sample continues the response, which has no score yet."""
    response_lengths: Tensor | None = None
    """[N] int64, gae with adaptive_lam: tokens of the response so far, with those of other samples."""
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
        cut = {"goes_on": self.goes_on, "response_lengths": self.response_lengths}
        return {**own, **cut, "truncated": self.truncated, "keep": self.keep, **parts}

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

    def outcomes(self) -> Tensor:
        """Return the outcome of each trajectory, [N]: its score and the sum of its token_rewards."""
        if self.token_rewards is None:
            return self.scores
        ids = sequence_ids(self.lengths)
        return self.scores + sequence_sums(self.token_rewards, ids, len(self.lengths))

    def rewards(self) -> Tensor:
        """Return the rewards of tokens [T], with the score on the last token."""
        return place_scores(self.scores, self.lengths, self.token_rewards)

    def each_token(self, scalars: Tensor) -> Tensor:
        """Give each trained token the value [N] of its trajectory, [T]."""
        return scalars[sequence_ids(self.lengths)]

    def whitened(self, values: Tensor, options: AdvantageOptions) -> Tensor:
        """Whiten values [T] over the trained tokens, if the options say so."""
        if not options.whiten:
            return values
        if self.trained is None:
            return whiten(values)
        return _spread(whiten(values[self.trained]), self.trained)


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
    adaptive_lam: bool = False
    """gae: lambda grows with the length of the response, from `lam`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An advantage estimator: its function, and the facts that checks, docs and the trainer read."""

    name: str
    function: Callable[[AdvantageBatch, AdvantageOptions], Advantages | Tensor]
    """It returns a number for each trajectory [N], or with by_token for each trained token [T]."""
    by_token: bool = False
    """Whether the function returns [T], or Advantages."""
    needs: frozenset[str] = frozenset()
    """The optional fields of AdvantageBatch that it requires.

    values brings a critic, greedy_scores a greedy response to each prompt, sum_pi_squared a pass
    over the batch. gae with bootstrap_truncated also requires `truncated`.
    """
    reads: frozenset[str] = frozenset()
    """The fields of AdvantageOptions that it reads."""
    group_relative: bool = False
    """Whether all advantages of a group of one are 0."""
    not_normalised: str = ""
    """The rewards that it reads in place of the scores, which reward_norm does not reach."""

    def __post_init__(self) -> None:
        for fact, known in (("needs", AdvantageBatch), ("reads", AdvantageOptions)):
            names = {f.name for f in dataclasses.fields(known)}
            if unknown := sorted(map(str, getattr(self, fact) - names)):
                raise ValueError(
                    f"the advantage estimator {self.name} {fact} {unknown[0]!r}, which is no field of "
                    f"{known.__name__}. Fix: {fact}={{...}} with names of {', '.join(sorted(names))}."
                )

    def __call__(self, batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
        """Return the advantages. Raises ValueError if the function's result has another shape."""
        found = self.function(batch, options)
        both = found if isinstance(found, Advantages) else Advantages(found)
        by_token = self.by_token or both is found
        shape = (int(batch.lengths.sum()) if by_token else len(batch.scores),)
        for x in (both.tokens, both.tokens if both.returns is None else both.returns):
            if getattr(x, "shape", None) != shape:
                of = "trained token" if by_token else "trajectory (for tokens, by_token=True)"
                raise ValueError(
                    f"the advantage estimator {self.name} returned {form(x)}. Fix: return "
                    f"{list(shape)}, a number for each {of}."
                )
        if "values" in self.needs and both.returns is None:
            raise ValueError(
                f"the advantage estimator {self.name} needs values, and returned no targets of the "
                "critic. Fix: return Advantages(tokens, returns), each a number for each trained token."
            )
        values = both.tokens.double()
        returns = None if both.returns is None else both.returns.double()
        return Advantages(values if by_token else batch.each_token(values), returns)


def estimator(
    name: str, *, needs: Collection[str] = (), reads: Collection[str] = (), **facts: Any
) -> Callable[[Callable[[AdvantageBatch, AdvantageOptions], Advantages | Tensor]], Estimator]:
    """Make a function an Estimator. `facts` are fields of Estimator."""
    if not isinstance(name, str):
        raise ValueError('@estimator has no name. Fix: @estimator("NAME").')
    return lambda function: Estimator(
        name=name, function=function, needs=frozenset(needs), reads=frozenset(reads), **facts
    )


def as_estimator(name: str, found: Callable[..., Any]) -> Estimator:
    """Return a user's estimator. A plain function counts as one that compares no groups."""
    if isinstance(found, Estimator):
        return replace(found, name=name)
    return Estimator(name=name, function=found)


def estimate(estimator: Estimator, batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Return the advantages of the trained tokens of a batch.

    Outcome estimators use `AdvantageBatch.outcomes`. They compute one number for each trajectory,
    and each of its tokens gets that number. N = 0 and T = 0 give empty tensors.

    Raises ValueError in these cases:

    - a missing field of `Estimator.needs`; the error has its name
    - a float of a kept trajectory that is not finite
    - token_rewards with gdpo, which cannot use them
    - reward_norm with an estimator that reads other rewards than the scores
    - a result of another shape than [N] or [T], or that is not finite
    """
    given = {**batch.per_trajectory(), **batch.per_token(), "components": batch.components}
    missing = sorted(field for field in estimator.needs if given[field] is None)
    if missing:
        raise ValueError(f"advantage estimator {estimator.name} needs {', '.join(missing)}")
    if options.reward_norm.active and estimator.not_normalised:
        raise ValueError(f"advantage estimator {estimator.name} cannot use reward_norm")
    keep = (batch.groups == batch.groups) if batch.keep is None else batch.keep.bool()
    at = keep[sequence_ids(batch.lengths)]
    part = _part(batch, keep, at)
    if options.reward_norm.active:
        part = replace(part, scores=normalize(part.scores, part.groups, options.reward_norm))
    result = estimator(part, options)
    tokens = result.tokens
    if not bool(tokens.isfinite().all()):
        raise ValueError(
            f"the advantage estimator {estimator.name} returned a number that is not finite. Fix: "
            "divide by no 0, and take no log of 0."
        )
    if options.adv_norm.active:
        groups = part.each_token(part.groups)
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


TokenWeights = Callable[[AdvantageBatch, "Tensor", "Tensor"], "Tensor"]
"""A user's weights of trained tokens, [T], from (batch, token ids [T], advantages [T])."""


def weighed(
    name: str, weights: TokenWeights, batch: AdvantageBatch, tokens: Tensor, advantages: Tensor
) -> Tensor:
    """Return the advantages [T] times a user's weights. Raises ValueError for malformed weights."""
    found = weights(batch, tokens, advantages).detach().double()
    fix = f"return a finite number for each trained token, [{len(advantages)}]"
    if found.shape != advantages.shape:
        raise ValueError(f"{name} returned a tensor of shape {tuple(found.shape)}. Fix: {fix}.")
    if not bool(found.isfinite().all()):
        raise ValueError(f"{name} returned a weight that is not finite. Fix: {fix}.")
    return advantages * found


def _part(batch: AdvantageBatch, keep: Tensor, at: Tensor) -> AdvantageBatch:
    """Select the trajectories `keep` [N] and their tokens `at` [T], with floats in float64.

    A float of a token that is not trained becomes 0 if it is not finite. Raises ValueError if
    another selected float is not finite.
    """
    trained = None if batch.trained is None or bool(batch.trained.all()) else batch.trained.bool()

    def floats(name: str, x: Tensor, index: Tensor) -> Tensor:
        y = x.detach()[index].double()
        if not bool(y.isfinite().all()):
            raise ValueError(f"{name} is not finite everywhere")
        return y

    cut = {
        "truncated": batch.truncated,
        "goes_on": batch.goes_on,
        "response_lengths": batch.response_lengths,
    }
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
        **{name: None if x is None else x[keep] for name, x in cut.items()},
        greedy_scores=None
        if batch.greedy_scores is None
        else floats("greedy_scores", batch.greedy_scores, keep),
        trained=None if trained is None else trained[at],
        **tokens,
    )


def _spread(values: Tensor, at: Tensor) -> Tensor:
    return values.new_zeros(at.shape).masked_scatter(at, values)
