"""The routers of a mixture of experts: replay, records and metrics, for transformers' models."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millrace.models.mixtures import MODEL_TYPES, experts_of
from millrace.train.balance import Sequences, balance_loss, sequences_of, with_loss
from millrace.train.packing import MicroBatch
from millrace.train.routing import Routed, RouterSums, counts, replayed, room

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Routers:
    """The routers of one model. They compute what transformers computes, bit for bit.

    In a pass over a micro-batch with experts, each token goes to those experts. Its gates are the
    probabilities that the router gives them, so gradients reach the router. Other models than
    MODEL_TYPES keep their own routers, and `found` is then false.
    """

    def __init__(self, model: nn.Module) -> None:
        config = cast(Any, model).config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.experts = experts_of(config)
        self.found = config.model_type in MODEL_TYPES
        self._experts: Tensor | None = None
        self._select: Tensor | None = None
        """The tokens that predict trained tokens, if this pass counts for metrics."""
        self._sequences: Sequences | None = None
        """The sequences of the pass, if it has a balance loss."""
        self._add_up: Callable[[Tensor], Tensor] = torch.clone
        """Adds up counts over the ranks that share the tokens."""
        self.balance = 0.0
        """The weight of the balance loss of one sequence, in passes with gradients."""
        self._chosen: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        self._sums = RouterSums(self.layers, self.experts)
        if not self.found:
            return
        self.k: int = config.num_experts_per_tok
        for name, module in model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                layer = _LAYER.search(name)
                assert layer is not None
                cast(Any, module).routers, cast(Any, module).layer = self, int(layer[1])
                module.forward = MethodType(_route, module)  # type: ignore[method-assign]

    def begin(self, batch: MicroBatch) -> None:
        """Begin a pass over a micro-batch. A recomputed layer belongs to the last pass."""
        self._fold()
        share = batch.layout.share
        self._experts, self._chosen = None, {}
        if batch.experts is not None and self.found:
            self._experts = replayed(share.part(batch.experts), self.layers, self.k)
        trains = torch.is_grad_enabled()
        self._select = share.selected(batch.select)[0] if trains else None
        balances = trains and self.found and self.balance > 0
        self._sequences = sequences_of(batch, share.first, share.own) if balances else None
        self._add_up = share.added

    def choose(self, layer: int, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities [T, experts] of a router, and the experts [T, k] of each token."""
        own = torch.topk(probs.detach(), self.k, dim=-1).indices
        chosen = own if self._experts is None else self._experts[:, layer]
        self._chosen[layer], loss = chosen, None
        if self._sequences is not None:
            loss = balance_loss(probs, own, self._sequences, self._add_up)
            probs = with_loss(probs, loss, self.balance)
        if self._select is not None:
            # A recomputed layer gives the same numbers again, so they replace the first ones.
            self._counted[layer] = counts(probs.detach(), own, chosen, self._select, loss)
        return probs, chosen

    def empty(self, tokens: int) -> Routed:
        """Return room for the experts of `tokens` tokens, in the smallest type."""
        return room(tokens, self.layers * self.k, self.experts)

    def chosen(self) -> Routed:
        """Return the experts of this rank's tokens in the last pass, [T, layers x k].

        Layers without a router have 0.
        """
        one = next(iter(self._chosen.values()))
        layers = [self._chosen.get(i, torch.zeros_like(one)) for i in range(self.layers)]
        return cast(Routed, torch.cat(layers, 1).cpu().numpy())

    def take(self) -> Tensor:
        """Return the sums [layers, experts + 4] float64 since the last call, and forget them."""
        self._fold()
        return self._sums.take()

    def _fold(self) -> None:
        self._sums.add(self._counted)
        self._counted = {}


# A compiled layer calls this function without compiling it: a pass has its own tensors.
@torch.compiler.disable
def _route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return transformers' logits, gates and experts of each token."""
    logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    probs, chosen = self.routers.choose(self.layer, probs)
    gates = probs.gather(-1, chosen)
    normalised = getattr(self, "norm_topk_prob", None)
    if normalised is not False:
        gates = gates / gates.sum(-1, keepdim=True)
    # Mixtral's gates stay in float32, and it always normalises them.
    return logits, gates if normalised is None else gates.to(logits.dtype), chosen
