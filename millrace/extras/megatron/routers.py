"""The routers of a Megatron policy: replay, records and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from millrace.extras.megatron.shape import Shape
from millrace.models.mixtures import experts_of
from millrace.train.balance import Sequences, balance_loss, sequences_of, with_loss
from millrace.train.packing import MicroBatch
from millrace.train.routing import Routed, RouterSums, counts, replayed, room

TopK = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Routing:
    """One pass over this rank's tokens of a micro-batch. T is their number, padding included."""

    experts: Tensor | None
    """[T, layers, k] the experts to replay. None lets routers choose."""
    select: Tensor | None
    """This rank's tokens that predict trained ones, if the pass counts for metrics."""
    first: int
    """This rank's first token in the micro-batch."""
    sequences: Sequences | None
    """The sequences, if the pass has a balance loss."""
    balance: float
    """The weight of the balance loss of one sequence."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """By layer: [T, k] the experts of each token."""
    counted: dict[int, Tensor] = field(default_factory=dict)


class Router:
    """The choice of one layer. Megatron calls it in place of its own RouterReplay.

    Attention runs before the router of its layer, also if the layer is recomputed. It says which
    pass this is.
    """

    def __init__(self, layer: int, gates_are_probs: bool) -> None:
        self.layer, self._gates_are_probs = layer, gates_are_probs
        self.routing: Routing | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: Any, limit: Any, default: Callable[..., TopK]
    ) -> TopK:
        """Return the scores and the experts [T, k] of each token, from its scores [T, experts]."""
        values, own = default(scores, topk, groups, limit)
        routing, chosen = self.routing, own
        if routing is None:
            return values, own
        if routing.experts is not None:
            chosen = routing.experts[:, self.layer]
            values = scores.gather(1, chosen)
        routing.chosen[self.layer], loss = chosen, None
        if routing.select is None:
            return values, chosen
        probs = scores.float() if self._gates_are_probs else scores.float().softmax(-1)
        if routing.sequences is not None:
            loss = balance_loss(probs, own, routing.sequences, _add_up)
            values = with_loss(values, loss, routing.balance)
        routing.counted[self.layer] = counts(probs.detach(), own, chosen, routing.select, loss)
        return values, chosen


def _add_up(counts: Tensor) -> Tensor:
    """Add up counts over the ranks that share the tokens of a micro-batch."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() > 1 and counts.numel():
        dist.all_reduce(counts, group=group)
    return counts


class Routers:
    """The routers of the layers of one stage. Without experts, it has none."""

    def __init__(self, decoder: Any, hf: Any, shape: Shape) -> None:
        self.layers: int = hf.num_hidden_layers
        self.experts, self._shape = experts_of(hf), shape
        self.k: int = hf.num_experts_per_tok if self.experts else 0
        self.replays = True
        """Whether passes use the experts of a batch. Those of a reference do not."""
        self.counts = False
        """Whether passes count for metrics."""
        self.record: Routed | None = None
        """What gets the experts of all tokens of the rows, if a pass is recorded."""
        self.balance = 0.0
        """The weight of the balance loss of one sequence, in passes that count."""
        self._sums = RouterSums(self.layers, self.experts) if self.experts else None
        for layer in decoder.layers if self.experts else ():
            own = layer.mlp.router
            own.router_replay = Router(layer.layer_number - 1, own.config.moe_router_pre_softmax)
            layer.self_attention.core_attention.router = own.router_replay

    def begin(self, batch: MicroBatch) -> Routing | None:
        """Return the pass over a micro-batch. Ranks of sequence parallelism divide its tokens."""
        if not self.experts:
            return None
        tokens, first = batch.layout.share.own, batch.layout.share.first
        if self._shape.sequence_parallel:
            tokens //= self._shape.tensor
            first += tokens * parallel_state.get_tensor_model_parallel_rank()
        experts = None
        if batch.experts is not None and self.replays:
            device = batch.experts.device
            # Padding needs k different experts: the dispatcher sends each token k times.
            experts = torch.arange(self.k, device=device).repeat(tokens, self.layers, 1)
            if batch.cells is not None:
                own = replayed(batch.experts, self.layers, self.k)[first : first + tokens]
                experts[: len(own)] = own
        select = sequences = None
        if self.counts:
            select = batch.select[(batch.select >= first) & (batch.select < first + tokens)] - first
            if self.balance:
                sequences = sequences_of(batch, first, tokens)
        return Routing(experts, select, first, sequences, self.balance)

    def end(self, batch: MicroBatch, routing: Routing | None) -> None:
        """Keep what a forward pass over a micro-batch chose."""
        if routing is None or self._sums is None:
            return
        self._sums.add(routing.counted)
        if self.record is not None and batch.cells is not None:
            token, position = batch.cells
            for layer, chosen in routing.chosen.items():
                at = (token >= routing.first) & (token < routing.first + len(chosen))
                own = chosen.cpu().numpy()[token[at] - routing.first]
                self.record[position[at], layer * self.k : (layer + 1) * self.k] = own

    def empty(self, tokens: int) -> Routed:
        return room(tokens, self.layers * self.k, self.experts)

    def take(self) -> Tensor | None:
        """Return the sums that `router_metrics` reads, since the last call. None without experts."""
        return self._sums.take() if self._sums is not None else None
