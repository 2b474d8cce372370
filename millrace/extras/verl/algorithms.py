"""Losses and advantage estimators in verl's form, as register_policy_loss and register_adv_est take.

verl's functions read padded rows and return one number for the micro-batch. `agg_loss` stands in for
verl's: it hands the losses of tokens to millrace, which aggregates them over the whole mini-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, Advantages, Estimator
from millrace.algorithms.policy_loss import LossInput, LossOptions, PolicyLoss, TokenLoss
from millrace.algorithms.ragged import sequence_ids
from millrace.data.user_code import stand_in

if TYPE_CHECKING:
    from torch import Tensor

LOSS = frozenset({"old_log_prob", "log_prob", "advantages", "response_mask"})
"""The parameters that show verl's form of a loss."""
ESTIMATOR = frozenset({"token_level_rewards", "response_mask"})
"""The parameters that show verl's form of an estimator."""

_aggregated: ContextVar[list[tuple[Tensor, Tensor]]] = ContextVar("aggregated")
"""The losses of tokens that a function gave to agg_loss, and what agg_loss returned."""


class VerlOptions(LossOptions):
    """Options by any name: verl's functions read them from their `config`."""

    model_config = ConfigDict(extra="allow")


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str = "", **counts: Any) -> Tensor:
    """Keep the losses of tokens [B, T]. Return their sum, which stands for verl's number."""
    total = (loss_mat * loss_mask).sum()
    _aggregated.get().append((loss_mat, total))
    return total


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the values with mask 1. (verl adds 1e-8 to the count.)"""
    return (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the values with mask 1."""
    return (values * mask).sum(axis)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return values with mean 0 and variance 1 over the mask."""
    mean = masked_mean(values, mask)
    white = (values - mean) * (masked_var(values, mask) + 1e-8).rsqrt()
    return white if shift_mean else white + mean


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the values with mask 1."""
    squares = masked_sum((values - masked_mean(values, mask)).square(), mask)
    return squares / (mask.sum() - int(unbiased)).clamp(min=1)


def as_torch_index(index: Any, device: Any = None) -> Tensor:
    """Number the groups from 0, [B] int64."""
    import torch

    numbers = {name: i for i, name in enumerate(dict.fromkeys(list(index)))}
    return torch.tensor([numbers[name] for name in list(index)], device=device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, unbiased standard deviation and size of each group. One of one has 0 and 1."""
    count = gidx.bincount().to(scores.dtype)
    zeros = scores.new_zeros(len(count))
    mean = zeros.index_add(0, gidx, scores) / count.clamp(min=1)
    squares = zeros.index_add(0, gidx, (scores - mean[gidx]).square())
    std = (squares / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    return mean.where(count > 1, 0.0), std.where(count > 1, 1.0), count


class _Config:
    """verl's configuration, as far as a function may read it. Sections of it are itself."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str, default: Any = None) -> Any:
        return self if name == "policy_loss" else self._values.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getattr__(self, name: str) -> Any:
        if name == "policy_loss":
            return self
        if name.startswith("__") or name not in self._values:
            raise AttributeError(
                f"config has no {name}. Fix: actor.policy_loss.options.{name}=VALUE"
            )
        return self._values[name]

    __getitem__ = __getattr__


class _ActorConfig(_Config):
    """The configuration of a loss."""


class _AlgoConfig(_Config):
    """The configuration of an estimator."""


def _register(name: Any) -> Callable[[Any], Any]:
    return lambda function: function


MODULES: dict[str, dict[str, Any]] = {
    "verl.trainer.ppo.core_algos": {
        "agg_loss": agg_loss,
        "register_policy_loss": _register,
        "register_adv_est": _register,
        "AdvantageEstimator": Enum("AdvantageEstimator", {"GRPO": "grpo", "GAE": "gae"}),
    },
    "verl.trainer.config": {"AlgoConfig": _AlgoConfig},
    "verl.workers.config": {"ActorConfig": _ActorConfig},
    "verl.utils": {"as_torch_index": as_torch_index, "group_mean_std": group_mean_std},
    "verl.utils.import_utils": {"deprecated": lambda *given: lambda function: function},
    "verl.utils.torch_functional": {
        "masked_mean": masked_mean,
        "masked_sum": masked_sum,
        "masked_var": masked_var,
        "masked_whiten": masked_whiten,
    },
}
"""Names that files of verl's losses import, where verl is not installed."""


def prepare() -> None:
    """Let files import verl's names."""
    stand_in(MODULES)


def adapted(found: Any) -> Any:
    """Return a PolicyLoss or an Estimator for a function in verl's form, and others as they are."""
    marked = isinstance(found, PolicyLoss)
    function = found.function if marked else found
    if not inspect.isfunction(function):
        return found
    names = inspect.signature(function).parameters
    if names.keys() >= LOSS:
        # The file may have an agg_loss of its own, or that of an installed verl.
        if "agg_loss" in function.__globals__:
            function.__globals__["agg_loss"] = agg_loss
        facts = found if marked else PolicyLoss(name="-", function=function, bounds_stale=False)
        adapter = _Loss(function)
        return replace(facts, function=adapter, joins_tokens=True, options=VerlOptions)
    if names.keys() >= ESTIMATOR:
        needs = {
            ours
            for verls, ours in _FIELDS.items()
            if verls in names and names[verls].default is inspect.Parameter.empty
        }
        whole = "config" in names or any(p.kind is p.VAR_KEYWORD for p in names.values())
        return Estimator(
            name="-",
            function=_Estimator(function),
            by_token=True,
            needs=frozenset(needs),
            reads=frozenset(ours for verls, ours in _READS.items() if whole or verls in names),
        )
    return found


@dataclass(frozen=True)
class _Rows:
    """The places of flat tokens [M] in padded rows [B, T]."""

    row: Tensor
    column: Tensor
    size: tuple[int, int]

    @classmethod
    def of(cls, ids: Tensor, rows: int) -> _Rows:
        import torch

        counts = torch.bincount(ids, minlength=rows)
        column = torch.arange(len(ids), device=ids.device)
        return cls(
            ids, column - (counts.cumsum(0) - counts)[ids], (rows, max(int(counts.max()), 1))
        )

    def padded(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.size).index_put((self.row, self.column), values)

    def flat(self, values: Tensor) -> Tensor:
        return values.expand(self.size)[self.row, self.column]


def _call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    lacking = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in given
    ]
    if lacking:
        raise ValueError(
            f"millrace has no {lacking[0]} for a function in verl's form. Fix: give it a default; "
            f"known: {', '.join(given)}."
        )
    return function(**{k: v for k, v in given.items() if anything or k in names})


@dataclass(frozen=True)
class _Loss:
    function: Callable[..., Any]

    def __call__(self, inputs: LossInput, options: VerlOptions) -> TokenLoss:
        x = inputs.trained()
        rows = _Rows.of(x.sequence_ids, x.num_sequences)
        given = {
            "old_log_prob": rows.padded(x.old_log_probs),
            "log_prob": rows.padded(x.log_probs),
            "advantages": rows.padded(x.advantages),
            "response_mask": rows.padded(x.mask.to(x.log_probs.dtype)),
            "loss_agg_mode": "token-mean",
            "config": _ActorConfig(_loss_values(options)),
            "rollout_is_weights": None,
            "rollout_log_probs": None,
        }
        kept: list[tuple[Tensor, Tensor]] = []
        token = _aggregated.set(kept)
        try:
            found = _call(self.function, given)
        finally:
            _aggregated.reset(token)
        total = found[0] if isinstance(found, tuple) else found
        if len(kept) != 1 or total is not kept[0][1]:
            raise ValueError(
                f"a loss in verl's form returned another number than that of one agg_loss (calls: "
                f"{len(kept)}). Fix: return agg_loss(loss_mat=..., ...) of all parts of the loss."
            )
        losses = rows.flat(kept[0][0]).masked_fill(~x.mask, 0.0)
        return losses, x.statistics(log_ratio=x.log_ratio())


_FIELDS = {
    "values": "values",
    "reward_baselines": "greedy_scores",
    "old_log_probs": "log_probs",
    "sum_pi_squared": "sum_pi_squared",
}
"""Parameters of verl's estimators that are optional fields of AdvantageBatch."""

_READS = {"gamma": "gamma", "lam": "lam", "norm_adv_by_std_in_grpo": "norm_by_std"}
"""Parameters of verl's estimators that are fields of AdvantageOptions."""


@dataclass(frozen=True)
class _Estimator:
    function: Callable[..., Any]

    def __call__(self, batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
        ids = sequence_ids(batch.lengths)
        rows = _Rows.of(ids, len(batch.lengths))
        rewards = batch.rewards()
        padded = rows.padded(rewards)
        # A response without tokens has a score too, in a column that the mask leaves out.
        padded[:, 0] += batch.scores.where(batch.lengths == 0, 0.0)
        given: dict[str, Any] = {
            "token_level_rewards": padded,
            "response_mask": rows.padded(rewards.new_ones(rewards.shape)),
            "index": batch.groups.numpy(),
            "epsilon": options.eps,
            "norm_adv_by_std_in_grpo": options.norm_by_std,
            "gamma": options.gamma,
            "lam": options.lam,
        }
        given["config"] = _AlgoConfig({name: given[name] for name in _READS})
        for name, ours in _FIELDS.items():
            value = getattr(batch, ours)
            if value is not None:
                given[name] = value if ours == "greedy_scores" else rows.padded(value)
        found = _call(self.function, given)
        advantages, returns = (*found, None)[:2] if isinstance(found, tuple) else (found, None)
        targets = batch.values is not None and returns is not None
        return Advantages(rows.flat(advantages), rows.flat(returns) if targets else None)


def _loss_values(options: VerlOptions) -> dict[str, Any]:
    own = options.model_extra or {}
    return {
        "clip_ratio": options.clip_low,
        "clip_ratio_low": options.clip_low,
        "clip_ratio_high": options.clip_high,
        "clip_ratio_c": options.clip_c,
        "loss_agg_mode": "token-mean",
        "global_batch_info": {},
        **own,
    }
