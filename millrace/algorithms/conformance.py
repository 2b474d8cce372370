"""The conformance checks of losses and estimators: splits, masks, order, gradients, dtypes, facts.

`millrace check-algorithm` runs them on a user's function, a run on those that it names, and the
tests of the package on all of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.algorithms.advantage import (
    AdvantageBatch,
    AdvantageOptions,
    Estimator,
    TokenWeights,
    estimate,
    weighed,
)
from millrace.algorithms.distillation import Signal
from millrace.algorithms.policy_loss import STATISTICS, LossInput, PolicyLoss
from millrace.algorithms.ragged import form

FAILS = "the function fails"

BATCHES = 12
_FAR = 5.0
"""A log-ratio far beyond every clip: a ratio of 148."""
_DIFFERENCE = 1e-6
"""The step of finite differences, in nats."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A property that a loss breaks."""

    name: str
    seen: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}. Fix: {self.fix}."


def findings(algorithm: PolicyLoss | Estimator, options: Any) -> list[Finding]:
    """Return the first break of each property, in the order of the properties."""
    found = dict[str, Finding]()
    for check in _OF_A_LOSS if isinstance(algorithm, PolicyLoss) else _OF_AN_ESTIMATOR:
        for seed in range(BATCHES):
            for broken in _run(check, algorithm, options, seed):
                found.setdefault(broken.name, broken)
        if check is _finite and found:
            break  # all that follows compares numbers
    return list(found.values())


def _run(
    check: Callable[..., Iterator[Finding]], algorithm: Any, options: Any, seed: int
) -> Iterator[Finding]:
    try:
        yield from check(algorithm, options, seed)
    except Exception as error:  # noqa: BLE001 - the user's function
        text, _, fix = " ".join(str(error).split()).partition(". Fix: ")
        seen = f"it raised {type(error).__name__}: {text}"
        yield Finding(FAILS, seen, fix.rstrip(".") or "correct it")


def tokens(seed: int, *, dtype: torch.dtype = torch.float64, spread: float = 0.4) -> LossInput:
    """Return a batch of trajectories of 1 to 7 tokens, some of which no loss trains.

    All tokens of a trajectory have one advantage. `spread` is that of the log-ratios.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (5 + seed % 3,), generator=draw)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    n = len(ids)
    old = -0.1 - 3 * torch.rand(n, generator=draw, dtype=torch.float64)
    new = (old + spread * torch.randn(n, generator=draw, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.randn(len(lengths), generator=draw, dtype=torch.float64)[ids]
    return LossInput(
        log_probs=new.to(dtype),
        old_log_probs=old.to(dtype),
        advantages=advantages.to(dtype),
        sequence_ids=ids,
        num_sequences=len(lengths),
        mask=torch.rand(n, generator=draw) < 0.8,
        selected=torch.rand(n, generator=draw) < 0.3,
    )


def part(x: LossInput, at: Tensor) -> LossInput:
    """Return the tokens `at`, bool or positions, with trajectories numbered anew in their order."""
    ids, order = x.sequence_ids[at], dict[int, int]()
    for i in ids.tolist():
        order.setdefault(i, len(order))
    return LossInput(
        log_probs=x.log_probs[at],
        old_log_probs=x.old_log_probs[at],
        advantages=x.advantages[at],
        sequence_ids=torch.tensor([order[i] for i in ids.tolist()], dtype=torch.long),
        num_sequences=len(order),
        mask=x.mask[at],
        selected=None if x.selected is None else x.selected[at],
    )


def gradient(loss: PolicyLoss, x: LossInput, options: Any) -> tuple[Tensor, Tensor]:
    """Return the token losses and the gradient of their sum, each [M] and detached."""
    leaf = x.log_probs.detach().clone().requires_grad_()
    losses, _ = loss(replace(x, log_probs=leaf), options)
    if losses.requires_grad:
        losses.sum().backward()  # type: ignore[no-untyped-call]
    return losses.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _far(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    return bool(((a - b).abs().nan_to_num(nan=torch.inf) > tolerance * scale).any())


def _finite(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    if not all(found[x.mask].isfinite().all() for found in gradient(loss, x, options)):
        seen = "a trained token has a loss or a gradient that is not finite"
        yield Finding(FAILS, seen, "divide by no 0, and take no log of 0")
    # Rejection and filters may leave a micro-batch no token, and padding one token alone.
    gradient(loss, replace(x, mask=torch.zeros_like(x.mask)), options)
    gradient(loss, part(x, torch.arange(1)), options)


def _masks(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    losses, grad = gradient(loss, x, options)
    masked = ~x.mask
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=x.log_probs.dtype)
    junk = junk.repeat(len(masked))[: len(masked)]
    poisoned = replace(
        x,
        log_probs=junk.where(masked, x.log_probs),
        old_log_probs=junk.flip(0).where(masked, x.old_log_probs),
        advantages=junk.where(masked, x.advantages),
        selected=None if x.selected is None else x.selected | masked,
    )
    trained = "begin with x = inputs.trained(), and let no mean count tokens outside x.mask"
    if losses[masked].any() or grad[masked].any():
        yield Finding("mask", "a token outside the mask has a loss or a gradient", trained)
    losses2, grad2 = gradient(loss, poisoned, options)
    if _far(losses2[x.mask], losses[x.mask], 1e-9) or _far(grad2[x.mask], grad[x.mask], 1e-9):
        seen = "values of tokens outside the mask change the loss of other tokens"
        yield Finding("mask", seen, trained)
    alone = torch.stack(gradient(loss, part(x, x.mask), options))
    if _far(alone, torch.stack((losses, grad))[:, x.mask], 1e-9):
        yield Finding("mask", "the number of tokens outside the mask changes the loss", trained)


def _splits(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    whole = torch.stack(gradient(loss, x, options))
    fix = (
        "return the loss of each token, without a mean over the micro-batch: actor.loss_agg_mode "
        "divides by the counts of the whole mini-batch"
    )
    for cut in range(1, x.num_sequences):
        halves = [x.sequence_ids < cut, x.sequence_ids >= cut]
        parts = torch.cat([torch.stack(gradient(loss, part(x, at), options)) for at in halves], 1)
        if _far(parts, whole, 1e-9):
            seen = "micro-batches do not add up: a split between trajectories changes the loss"
            yield Finding("micro-batches", seen, fix)
    if not loss.joins_tokens and options.importance_sampling_level == "token":
        at = torch.arange(len(x.mask)) < len(x.mask) // 2
        parts = torch.cat([torch.stack(gradient(loss, part(x, y), options)) for y in (at, ~at)], 1)
        if _far(parts, whole, 1e-9):
            seen = "a split inside a trajectory changes the loss"
            yield Finding("micro-batches", seen, "declare @policy_loss(joins_tokens=True)")
    more = gradient(loss, replace(x, num_sequences=x.num_sequences + 3), options)
    if _far(torch.stack(more), whole, 1e-9):
        yield Finding("ranks", "trajectories without tokens change the loss", fix)


def _order(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    order = torch.argsort(x.sequence_ids.flip(0), stable=True)
    order = len(order) - 1 - order.flip(0)
    turned = torch.cat(
        [order[x.sequence_ids[order] == i] for i in reversed(range(x.num_sequences))]
    )
    there = torch.stack(gradient(loss, part(x, turned), options))
    here = torch.stack(gradient(loss, x, options))[:, turned]
    if _far(there, here, 1e-9):
        seen = "the order of the trajectories changes the loss"
        yield Finding("order", seen, "use x.sequence_ids, and not positions in the batch")


def _repeats(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    fields = [x.log_probs, x.old_log_probs, x.advantages, x.mask, x.sequence_ids]
    before = [field.clone() for field in fields]
    first = torch.stack(gradient(loss, x, options))
    if not torch.equal(torch.stack(gradient(loss, x, options)), first):
        seen = "two calls with the same input give two results"
        yield Finding("repeats", seen, "keep no state between calls, and draw no random numbers")
    if not all(torch.equal(a, b) for a, b in zip(before, fields, strict=True)):
        yield Finding("repeats", "it changes its input", "no operation in place on the input")


def _direction(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    x = replace(x, old_log_probs=x.log_probs, selected=torch.zeros_like(x.mask))
    _, grad = gradient(loss, x, options)
    if not grad.any():
        seen = "the gradient is 0 everywhere, with old log-probs equal to the current ones"
        yield Finding("gradient", seen, "do not detach log_probs")
        return
    pushed = torch.zeros(x.num_sequences, dtype=grad.dtype)
    # Another term, such as a KL or a share of SFT, may outweigh a small advantage.
    large = x.advantages.where(x.advantages.abs() > 0.25, 0.0)
    pushed.index_add_(0, x.sequence_ids, -grad * large)
    if (pushed < -1e-12).any():
        seen = "a step lowers the probability of tokens with a positive advantage"
        yield Finding("gradient", seen, "return what is to become smaller: -advantage x log_prob")


def _slopes(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    if loss.stops_gradient or options.importance_sampling_level == "sequence":
        return
    x = tokens(seed)
    _, grad = gradient(loss, x, options)
    for i in x.mask.nonzero().squeeze(-1).tolist():
        sums = [
            float(gradient(loss, replace(x, log_probs=_moved(x.log_probs, i, d)), options)[0].sum())
            for d in (-_DIFFERENCE, 0.0, _DIFFERENCE)
        ]
        left, right = (sums[1] - sums[0]) / _DIFFERENCE, (sums[2] - sums[1]) / _DIFFERENCE
        # At a kink, the two slopes differ, and any value between them is a gradient.
        if abs(left - right) < 1e-3 and abs(float(grad[i]) - (left + right) / 2) > 1e-3:
            seen = f"the gradient of a token is {float(grad[i]):.4g}, and its loss has the slope {(left + right) / 2:.4g}"
            fix = "detach nothing by mistake; if a factor has no gradient by design, declare @policy_loss(stops_gradient=True)"
            yield Finding("slope", seen, fix)
            return


def _moved(values: Tensor, at: int, by: float) -> Tensor:
    moved = values.clone()
    moved[at] += by
    return moved


class _LowPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes results in float16 and bfloat16."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        low = (torch.float16, torch.bfloat16)
        self.seen |= isinstance(found, Tensor) and found.dtype in low
        return found


def _dtypes(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x, low = tokens(seed), tokens(seed, dtype=torch.float32)
    exact, near = gradient(loss, x, options), gradient(loss, low, options)
    if near[0].dtype != torch.float32 or exact[0].dtype != torch.float64:
        yield Finding("dtype", f"float32 becomes {near[0].dtype}", "keep the dtype of log_probs")
    if _far(near[0].double(), exact[0], 1e-5) or _far(near[1].double(), exact[1], 1e-5):
        yield Finding("dtype", "float32 has fewer than five right digits", "sum in float64")
    if seed:
        return
    with _LowPrecision() as watched:  # type: ignore[no-untyped-call]
        loss(low, options)
    if watched.seen:
        seen = "a part is computed in float16 or bfloat16"
        yield Finding("dtype", seen, "keep the dtype of log_probs")
    for far in (1e3, 1e4):
        pairs = [(0.0, -far), (-far, 0.0), (-far, -far), (0.0, 0.0)]
        rows = [(new, old, adv) for new, old in pairs for adv in (-3.0, 0.0, 3.0)]
        new, old, adv = (torch.tensor(column) for column in zip(*rows, strict=True))
        ids = torch.arange(len(rows))
        extreme = LossInput(
            log_probs=new,
            old_log_probs=old,
            advantages=adv,
            sequence_ids=ids,
            num_sequences=len(rows),
            mask=torch.ones(len(rows), dtype=torch.bool),
            selected=ids % 2 == 0,
        )
        if not all(t.isfinite().all() for t in gradient(loss, extreme, options)):
            seen = f"log-probs of -{far:g} give a loss or a gradient that is not finite"
            yield Finding("extremes", seen, "bound the ratio: inputs.trained().log_ratio()")


def _facts(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    here = torch.stack(gradient(loss, x, options))
    other = gradient(loss, replace(x, old_log_probs=x.old_log_probs - 0.3), options)
    reads = _far(torch.stack(other), here, 1e-9)
    if reads and not loss.reads_old:
        seen = "it reads old log-probs, and declares reads_old=False"
        yield Finding("facts", seen, "@policy_loss(reads_old=True)")
    if loss.select is None:
        blind = torch.stack(gradient(loss, replace(x, selected=None), options))
        if _far(blind, here, 1e-9):
            seen = "it reads `selected`, which nothing fills"
            yield Finding("facts", seen, "@policy_loss(select=...)")
    if loss.bounds_stale:
        far = replace(
            x,
            old_log_probs=x.log_probs - _FAR,
            advantages=torch.ones_like(x.advantages),
            selected=torch.zeros_like(x.mask),
        )
        _, grad = gradient(loss, far, options)
        if (-grad > 30).any():
            seen = f"it declares bounds_stale=True, and at a ratio of {torch.e**_FAR:.0f} a step goes further with {float(-grad.min()):.3g} times the advantage"
            yield Finding("facts", seen, "bound the ratio, or declare bounds_stale=False")


def _statistics(loss: PolicyLoss, options: Any, seed: int) -> Iterator[Finding]:
    x = tokens(seed)
    _, stats = loss(replace(x, log_probs=x.log_probs.clone().requires_grad_()), options)
    for name in STATISTICS:
        value = stats[name]
        if value.requires_grad or value.shape != x.mask.shape or value[~x.mask].any():
            seen = f"the statistic {name} has a gradient, another shape or values outside the mask"
            yield Finding("statistics", seen, "return x.statistics(NAME=tensor of [M])")


def rewards(seed: int) -> AdvantageBatch:
    """Return a batch of groups of 1 to 4 trajectories of 0 to 5 tokens, with all optional fields."""
    draw = torch.Generator().manual_seed(seed)
    groups = torch.repeat_interleave(
        torch.arange(4), torch.tensor([1, 2, 4, 3])[torch.randperm(4, generator=draw)]
    )
    n = len(groups)
    lengths = torch.randint(0, 6, (n,), generator=draw)
    t = int(lengths.sum())

    def floats(size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    return AdvantageBatch(
        scores=torch.randint(0, 3, (n,), generator=draw).double(),
        groups=groups,
        lengths=lengths,
        components={"a": floats(n), "b": floats(n)},
        values=floats(t),
        truncated=torch.rand(n, generator=draw) < 0.2,
        greedy_scores=floats(n),
        log_probs=-floats(t).abs(),
        sum_pi_squared=torch.rand(t, generator=draw, dtype=torch.float64),
    )


def _chosen(x: AdvantageBatch, order: Tensor) -> tuple[AdvantageBatch, Tensor]:
    """Return the trajectories `order`, and the places of their tokens in `x`."""
    starts = x.lengths.cumsum(0) - x.lengths
    at = torch.cat([torch.arange(int(x.lengths[i])) + int(starts[i]) for i in order.tolist()])
    fields: dict[str, Any] = {
        name: None if value is None else value[order]
        for name, value in x.per_trajectory().items()
        if not name.startswith("components")
    }
    fields |= {name: None if v is None else v[at] for name, v in x.per_token().items()}
    parts = {name: value[order] for name, value in (x.components or {}).items()}
    return AdvantageBatch(**fields, components=parts), at


def _advantages(algorithm: Estimator, options: AdvantageOptions, seed: int) -> Iterator[Finding]:
    x = rewards(seed)
    here = estimate(algorithm, x, options).tokens
    if not torch.equal(estimate(algorithm, x, options).tokens, here):
        seen = "two calls with the same batch give two results"
        yield Finding("repeats", seen, "keep no state between calls, and draw no random numbers")
    turned, at = _chosen(x, torch.arange(len(x.scores)).flip(0))
    if _far(estimate(algorithm, turned, options).tokens, here[at], 1e-9):
        seen = "the order of the trajectories changes their advantages"
        yield Finding("order", seen, "use batch.groups, and not positions in the batch")


def _needs(algorithm: Estimator, options: AdvantageOptions, seed: int) -> Iterator[Finding]:
    x = rewards(seed)
    optional = {
        *("components", "values", "truncated", "greedy_scores", "log_probs", "sum_pi_squared"),
    } - algorithm.needs
    bare = replace(x, **dict.fromkeys(optional))  # type: ignore[arg-type]
    if _far(estimate(algorithm, bare, options).tokens, estimate(algorithm, x, options).tokens, 0):
        seen = "it reads fields of the batch that it does not need"
        yield Finding("facts", seen, "@estimator(NAME, needs={...})")


def _groups(algorithm: Estimator, options: AdvantageOptions, seed: int) -> Iterator[Finding]:
    x, _ = _chosen(rewards(seed), torch.tensor([0]))
    alone = estimate(algorithm, replace(x, scores=x.scores + 1.0), options).tokens
    if algorithm.group_relative and alone.any():
        seen = "it declares group_relative=True, and a group of one has advantages"
        yield Finding("facts", seen, "group_relative=False")


def check_weights(name: str, weights: TokenWeights) -> Finding | None:
    """Return how a user's token weights fail on made-up batches, or None."""

    def check(weights: TokenWeights, options: None, seed: int) -> Iterator[Finding]:
        x = rewards(seed)
        ids = torch.arange(int(x.lengths.sum()))
        weighed(name, weights, x, ids, torch.linspace(-1, 1, len(ids), dtype=torch.float64))
        yield from ()

    return next((f for seed in range(BATCHES) for f in _run(check, weights, None, seed)), None)


def check_signal(name: str, signal: Signal) -> Finding | None:
    """Return how a user's signal of teachers fails on made-up log-probs, or None."""

    def check(signal: Signal, options: None, seed: int) -> Iterator[Finding]:
        g = torch.Generator().manual_seed(seed)
        own, teacher = (-5 * torch.rand(9, generator=g) for _ in range(2))
        for count in (9, 0):
            given = own[:count].clone(), teacher[:count].clone()
            found = signal(*given)
            fix = f"return a finite number for each drawn token, [{count}]"
            if getattr(found, "shape", None) != (count,):
                raise ValueError(f"{name} returned {form(found)}. Fix: {fix}.")
            if not bool(found.isfinite().all()):
                raise ValueError(f"{name} returned a number that is not finite. Fix: {fix}.")
            if not (torch.equal(given[0], own[:count]) and torch.equal(given[1], teacher[:count])):
                raise ValueError(f"{name} changes its input. Fix: no operation in place.")
        yield from ()

    return next((f for seed in range(BATCHES) for f in _run(check, signal, None, seed)), None)


_OF_A_LOSS = (
    _finite,
    _masks,
    _splits,
    _order,
    _repeats,
    _direction,
    _slopes,
    _dtypes,
    _facts,
    _statistics,
)
_OF_AN_ESTIMATOR = (_advantages, _needs, _groups)
