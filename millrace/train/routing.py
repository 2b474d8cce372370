"""The experts of the tokens of a batch, which a mixture of experts replays in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.errors import MillraceError, bad_value
from millrace.types import Sample, Thread

Routed = NDArray[Any]
"""[tokens, layers x experts of a token] unsigned: what each token is routed to, layer by layer."""


def room(tokens: int, width: int, experts: int) -> Routed:
    """Return room for the experts of `tokens` tokens, in a small type that ranks can add up."""
    return np.zeros((tokens, width), dtype=np.uint8 if experts <= 256 else np.int32)


def counts(
    probs: Tensor, own: Tensor, chosen: Tensor, select: Tensor, loss: Tensor | None
) -> Tensor:
    """Return the sums of one layer over the tokens `select`: [experts + 4] of `router_metrics`.

    probs   [T, experts] the router's probabilities
    own     [T, k] the router's own choice
    chosen  [T, k] the experts that were used
    loss    the balance loss, if there is one
    """
    loss = probs.new_zeros(()) if loss is None else loss.detach()
    probs, own, chosen = (x.index_select(0, select) for x in (probs, own, chosen))
    tokens = torch.bincount(chosen.flatten(), minlength=probs.shape[1]).double()
    entropy = torch.special.entr(probs).sum(dtype=torch.float64)
    moved = (own.sort(-1).values != chosen.sort(-1).values).any(-1).sum()
    rest = (
        loss.double(),
        entropy,
        moved.double(),
        probs.new_tensor(len(select), dtype=torch.float64),
    )
    return torch.cat([tokens, torch.stack(rest)])


def replayed(experts: Tensor, layers: int, k: int) -> Tensor:
    """Return the experts of a batch, [T, layers x k], as [T, layers, k].

    Raises ConfigError if another model than this one drew the tokens.
    """
    if experts.shape[1] != layers * k:
        raise bad_value(
            "model.path",
            f"{layers} layers, {k} experts for each token",
            f"the tokens of the batch have {experts.shape[1]} experts in all layers, "
            f"not {layers * k}",
            "the model that drew them",
        )
    return experts.view(-1, layers, k)


class RouterSums:
    """The sums of all layers that `router_metrics` reads, [layers, experts + 4] float64."""

    def __init__(self, layers: int, experts: int) -> None:
        self._layers, self._width = layers, experts + 4
        self._sums: Tensor | None = None

    def add(self, counted: Mapping[int, Tensor]) -> None:
        """Add the `counts` of a pass, by layer. Layers without experts have none."""
        if counted:
            none = torch.zeros_like(next(iter(counted.values())))
            new = torch.stack([counted.get(i, none) for i in range(self._layers)])
            self._sums = new if self._sums is None else self._sums + new

    def take(self) -> Tensor:
        """Return the sums since the last call, and forget them."""
        sums, self._sums = self._sums, None
        empty = torch.zeros(self._layers, self._width, dtype=torch.float64)
        return empty if sums is None else sums


def router_metrics(sums: Tensor, steps: int) -> dict[str, float]:
    """Return the metrics of the routers of a batch, over the tokens that predict trained ones.

    sums   [layers, experts + 4]: tokens of each expert, balance losses, entropies, moved, tokens
    steps  optimizer steps of the batch

    actor/router_load     tokens of the busiest expert / tokens of an average one; mean over layers
    actor/router_unused   share of experts without a token; mean over layers
    actor/router_entropy  entropy of the router's probabilities, nats; mean over tokens and layers
    actor/router_moved    share of tokens whose experts are not the router's own choice, by replay
    actor/router_aux_loss  the balance loss before its coefficient; mean over steps and layers

    Layers without experts do not count. No expert has a capacity, so no token is dropped.
    """
    rows = sums[sums[:, -1] > 0]
    if not len(rows):
        return {}
    load, tokens = rows[:, :-4], rows[:, -1].sum()
    return {
        "actor/router_load": (load.max(1).values / load.mean(1)).mean().item(),
        "actor/router_unused": (load == 0).double().mean().item(),
        "actor/router_entropy": (rows[:, -3].sum() / tokens).item(),
        "actor/router_moved": (rows[:, -2].sum() / tokens).item(),
        "actor/router_aux_loss": (rows[:, -4].mean() / max(steps, 1)).item(),
    }


def experts_of(samples: Sequence[Sample], starts: Any, num_tokens: int) -> Routed | None:
    """Return the experts of all tokens of the rows of `samples`, or None if they have none.

    Tokens that no engine read have 0. `starts` has the first token of each row. Raises
    MillraceError if only some rows have experts, or if those are not of one model.
    """
    found: list[tuple[int, int, Thread]] = []
    total = size = 0
    without = None
    for sample in samples:
        for trajectory in sample.trajectories:
            for thread in trajectory.threads:
                row = len(found)
                read, own = _read(thread, len(thread.opening or sample.prompt.tokens))
                found.append((read, own, thread))
                total, size = total + read, size + own
                if read and not own:
                    without = sample.prompt.index, row
    if not size:
        return None
    width = size // total
    if without is not None or any(own != read * width for read, own, _ in found):
        index = without[0] if without else samples[0].prompt.index
        raise MillraceError(
            f"the experts of sample {index} do not fit its tokens: router replay would be wrong. "
            "Fix: model.router_replay=disabled, or a new run"
        )
    kind = next(s.experts.typecode for _, _, t in found for s in t.segments if s.experts)
    flat = np.zeros((num_tokens, width), dtype=kind)
    for (_, own, thread), start in zip(found, starts, strict=True):
        if own:
            parts = [np.frombuffer(s.experts, kind) for s in thread.segments if s.experts]
            rows = np.concatenate(parts).reshape(-1, width)
            flat[start : start + len(rows)] = rows
    return flat


def _read(thread: Thread, opening: int) -> tuple[int, int]:
    """Return the tokens of a thread that an engine read, and the numbers of their experts.

    The engine has read all tokens before the last one that it drew.
    """
    end, last, own = opening, 0, 0
    for segment in thread.segments:
        end += len(segment.tokens)
        if segment.log_probs or segment.experts:
            last = end - 1
        own += len(segment.experts or ())
    return last, own
