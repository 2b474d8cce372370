"""Policy losses: their input, options and result, and the facts that stand beside a function.

    @policy_loss(bounds_stale=False)
    def my_loss(inputs: LossInput, options: LossOptions) -> TokenLoss: ...

The configuration reads the facts, so this module and the files of `losses/` need no torch before
they compute: they use methods of tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from millrace.algorithms.ragged import form, sequence_sums

if TYPE_CHECKING:
    from torch import Generator, Tensor

TokenLoss: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
"""Token losses [M] and statistics.

The losses have a gradient to log_probs and are 0 outside the mask. Each statistic is [M], of
the same dtype and detached. It is 0 outside the mask, and if the loss lacks it:

clipped        1 where a bound of the loss changed the token's contribution
clipped_lower  1 where the bound on a large ratio did this: dual clip (vanilla, A < 0),
               truncated weight (dppo)
log_ratio      log(pi / pi_old) clamped to +-20; -mean is verl's ppo_kl
"""

AggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class LossOptions(BaseModel):
    """The options that every loss has. A loss with options of its own extends this class."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    clip_low: float = Field(0.2, ge=0)
    """actor.clip_ratio_low: largest distance of a ratio below 1 (gspo's paper: 3e-4).

    dppo_tv   largest fall of the token's probability
    dppo_kl   largest binary KL where A < 0
    geo_mean  largest fall of the log-ratio (0.4 in its paper)
    """
    clip_high: float = Field(0.2, ge=0)
    """actor.clip_ratio_high: largest distance of a ratio above 1 (gspo's paper: 4e-4).

    dppo_tv   largest rise of the token's probability
    dppo_kl   largest binary KL where A > 0
    geo_mean  largest rise of the log-ratio (0.4 in its paper)
    """
    clip_c: float = Field(3.0, gt=1)
    """actor.clip_ratio_c. vanilla: upper bound of the ratio where A < 0."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """With `sequence_level`: the ratio is the token's own, or `LossInput.sequence_log_ratio`'s."""


MAX_LOG_RATIO = 20.0
"""Bound of log-ratios. The square of exp(20) = 4.9e8 is still finite in float32."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper bound of a sequence's mean log-ratio, as in verl's gspo. A small ratio needs no bound."""

STATISTICS = ("clipped", "clipped_lower", "log_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """The M tokens of a micro-batch. Floating tensors share one dtype.

    Trajectories may be cut, unless the loss or an option joins their tokens.
    """

    log_probs: Tensor
    """[M] floating, of the policy under training. Only this tensor has a gradient."""
    old_log_probs: Tensor
    """[M] of the policy in the denominator of ratios. Losses without a ratio ignore the values."""
    advantages: Tensor
    """[M]."""
    sequence_ids: Tensor
    """[M] int64 below num_sequences."""
    num_sequences: int
    """Number of trajectories. Some may have no token."""
    mask: Tensor
    """[M] bool: tokens that are trained. Values of other tokens are never read and may be NaN."""
    selected: Tensor | None = None
    """[M] bool: tokens selected in the whole mini-batch, for losses with `select`."""

    def trained(self) -> LossInput:
        """Return a copy in which tokens outside the mask have log-probs 0 and advantage 0.

        They are also not selected. Such a token then has ratio 1, loss 0 and gradient 0, and adds
        nothing to a sum over its sequence. Only log_probs keeps its gradient. Raises ValueError if
        a tensor's shape differs from that of log_probs.
        """
        self._check_shapes()
        masked = ~self.mask
        return LossInput(
            log_probs=self.log_probs.masked_fill(masked, 0.0),
            old_log_probs=self.old_log_probs.detach().masked_fill(masked, 0.0),
            advantages=self.advantages.detach().masked_fill(masked, 0.0),
            sequence_ids=self.sequence_ids,
            num_sequences=self.num_sequences,
            mask=self.mask,
            selected=None if self.selected is None else self.selected & self.mask,
        )

    def _check_shapes(self) -> None:
        tensors = {
            "old_log_probs": self.old_log_probs,
            "advantages": self.advantages,
            "sequence_ids": self.sequence_ids,
            "mask": self.mask,
            "selected": self.mask if self.selected is None else self.selected,
        }
        for name, tensor in tensors.items():
            if tensor.shape != self.log_probs.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, "
                    f"log_probs {tuple(self.log_probs.shape)}"
                )

    # -- of the result of `trained`

    def log_ratio(self) -> Tensor:
        """Return `log_ratio` of each token, [M]."""
        return log_ratio(self.log_probs, self.old_log_probs)

    def sequence_means(self, values: Tensor) -> Tensor:
        """Return means [num_sequences] over trained tokens, from values [M] that are 0 elsewhere.

        The sums are in float64.
        """
        total = sequence_sums(values.double(), self.sequence_ids, self.num_sequences)
        count = sequence_sums(self.mask.double(), self.sequence_ids, self.num_sequences)
        return (total / count.clamp(min=1)).to(values.dtype)

    def sequence_log_ratio(self) -> Tensor:
        """Return log s [M] of each token's sequence, with the gradient of the token's log-prob.

        (GSPO-token, arXiv 2507.18071.)

        s = exp(min(mean_t (log pi - log pi_old), 10)); no gradient where the bound acts

        The log-ratios of tokens are not clamped, because that would bias the mean.
        """
        far = (self.log_probs - self.old_log_probs).detach()
        mean = self.sequence_means(far)[self.sequence_ids]
        # In this order, the difference is exactly 0 and the mean keeps its digits. A clip of 3e-4
        # needs these digits.
        near = self.log_probs - self.log_probs.detach() + mean
        return near.clamp(max=MAX_SEQUENCE_LOG_RATIO)

    def log_ratio_at(self, options: LossOptions) -> Tensor:
        """Return the log of the ratio that importance_sampling_level names, [M]."""
        if options.importance_sampling_level == "sequence":
            return self.sequence_log_ratio()
        return self.log_ratio()

    def statistics(self, **given: Tensor) -> dict[str, Tensor]:
        """Return the statistics of a TokenLoss: those given, by name, and 0 for the others.

        Raises ValueError for another name.
        """
        if unknown := given.keys() - set(STATISTICS):
            raise ValueError(
                f"a loss has no statistic {sorted(unknown)[0]!r}. Fix: {', '.join(STATISTICS)}."
            )
        zeros = self.log_probs.detach().new_zeros(self.log_probs.shape)
        found = {name: value.detach().to(zeros.dtype) for name, value in given.items()}
        return dict.fromkeys(STATISTICS, zeros) | found


Select = Callable[["LossInput", Any, "Generator"], "Tensor"]
"""Choose tokens of the whole mini-batch, [T] bool, from its tokens, the options and a seed's draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss: its function, and the facts that checks, docs and the trainer read."""

    name: str
    function: Callable[[LossInput, Any], TokenLoss]
    options: type[LossOptions] = LossOptions
    """The class of its options. Its own fields are keys of actor.policy_loss."""
    reads_old: bool = True
    """Whether the loss has a ratio against old log-probs."""
    bounds_stale: bool = True
    """Whether the distance to the old log-probs bounds the effect of a token: a trust region."""
    joins_tokens: bool = False
    """Whether the loss of a token always depends on the other tokens of its trajectory."""
    sequence_level: bool = False
    """Whether the loss can use the ratio of a whole trajectory."""
    by_sequence: bool = False
    """Whether its paper has seq-mean-token-mean as the aggregation. Otherwise it is token-mean."""
    stops_gradient: bool = False
    """Whether a factor of the loss has no gradient by design, so its slope is not its gradient."""
    joint: str = ""
    """The reason why its token losses cannot be masked one by one, if they cannot."""
    select: Select | None = None
    """The selection that fills `LossInput.selected`, if the loss reads it."""
    aliases: tuple[str, ...] = ()
    """Other names of the loss."""

    def __post_init__(self) -> None:
        options: Any = self.options
        if not (isinstance(options, type) and issubclass(options, LossOptions)):
            raise ValueError(
                f"the options of the loss {self.name} are {options!r}, which does not extend "
                "LossOptions. Fix: class Options(LossOptions)."
            )
        if self.bounds_stale and not self.reads_old:
            raise ValueError(
                f"the loss {self.name} cannot bound the distance to old log-probs without reading "
                "them. Fix: bounds_stale=False, or reads_old=True."
            )

    def __call__(self, inputs: LossInput, options: Any) -> TokenLoss:
        """Return the token losses and all statistics. Raises ValueError if the result is malformed."""
        found = self.function(inputs, options)
        losses, given = found if isinstance(found, tuple) else (found, {})
        if getattr(losses, "shape", None) != inputs.log_probs.shape:
            raise ValueError(
                f"the loss {self.name} returned {form(losses)}. Fix: return a loss for each token, of "
                f"shape {tuple(inputs.log_probs.shape)}; actor.loss_agg_mode makes one number of them."
            )
        return losses, inputs.statistics(**given)

    @property
    def own_options(self) -> frozenset[str]:
        """The names of the options that this loss adds to those of every loss."""
        return frozenset(self.options.model_fields) - frozenset(LossOptions.model_fields)

    def default_aggregation(self, importance_sampling_level: str) -> AggMode:
        """Return the aggregation of the paper. A ratio of sequences has that of gspo.

        In verl 0.9.1, only sapo always uses it. gspo has token-mean unless loss_agg_mode overrides
        it, and geo_mean is a plain mean over the micro-batch.
        """
        whole = self.by_sequence or importance_sampling_level == "sequence"
        return "seq-mean-token-mean" if whole else "token-mean"


def policy_loss(**facts: Any) -> Callable[[Callable[[LossInput, Any], TokenLoss]], PolicyLoss]:
    """Make a function a PolicyLoss. `facts` are fields of PolicyLoss."""
    return lambda function: PolicyLoss(name=function.__name__, function=function, **facts)


def as_policy_loss(name: str, found: Callable[..., Any]) -> PolicyLoss:
    """Return a user's loss. A plain function has the facts that ask least of it.

    It may read all of LossInput, gets whole trajectories, and counts as one without a trust region.
    """
    if isinstance(found, PolicyLoss):
        return replace(found, name=name)
    return PolicyLoss(name=name, function=found, bounds_stale=False, joins_tokens=True)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(pi / pi_old) clamped to +-20, in the shape of its arguments.

    There is no gradient where the clamp acts.
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Compute max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and a mask.

    The bool mask is true where the clipped term is larger. Both results have the shape of `ratio`.
    A ratio on a bound is not clipped and has its full gradient.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return plain.maximum(clipped), clipped > plain
