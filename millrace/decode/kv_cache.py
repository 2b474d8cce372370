"""The KV cache of fixed decode slots, and the attention function that reads and writes it.

A forward pass is one packed row of tokens [1, prefill + extension + rows]. The contexts of new
requests come first, then the new tokens of contexts that are in the cache already, then one token
for each decode row (row i is slot i). Linear layers see one matrix, and only attention separates
the parts.

The function is registered with transformers as NAME, so it works for every causal model that uses
transformers' attention interface. There is no Cache object: the keyword `slot_forward` passes the
data of a forward pass. Without that keyword, the function is plain `sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from millrace.errors import bad_value

NAME = "millrace_slots"
ALIGN = 16
"""KV lengths are multiples of this number. Shapes are then few, and mask rows are aligned."""


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


class SlotCache:
    """K and V of every layer, [slots + 1, length, kv_heads, head_dim].

    The last row takes writes whose values are never read. A layer is allocated at its first write,
    because shapes come from the model's tensors, not from its config.

    Beside the slots there are `kept_pages` pages of ALIGN positions, for the K and V of idle
    sessions. No query attends to them.
    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kept_pages: int = 0,
    ) -> None:
        self.slots = slots
        self.max_len = max_len
        self.length = round_up(max_len, ALIGN)
        self.trash = slots * self.length
        """Flat position (slot * length + position) of the row that is never read."""
        self.dtype = dtype
        self.device = device
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.kept_pages = kept_pages
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """K and V of idle sessions, by layer: [kept_pages, ALIGN, kv_heads, head_dim]."""
        self.mask = torch.zeros(0)
        """[slots + 1, length]: 0 where a slot's queries attend, -inf elsewhere.

        It has the model's dtype, as sdpa requires.
        """

    def allocate(self) -> None:
        # Empty slots also attend to a position: a row that attends to nothing would give NaN.
        self.mask = torch.zeros(self.slots + 1, self.length, dtype=self.dtype, device=self.device)

    def free(self) -> None:
        self.layers.clear()
        self.kept.clear()
        self.mask = torch.zeros(0)

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V of layer `index`. `key` and `value` give the shapes.

        They are [tokens, kv_heads, head_dim].
        """
        pair = self.layers.get(index)
        if pair is None:
            shape = (self.slots + 1, self.length)
            # Zeros, because attention multiplies masked values by 0, and new memory may contain
            # NaN: 0 times NaN is NaN.
            pair = (
                key.new_zeros(*shape, *key.shape[1:]),
                value.new_zeros(*shape, *value.shape[1:]),
            )
            self.layers[index] = pair
            if self.kept_pages:
                pages = (self.kept_pages, ALIGN)
                self.kept[index] = (
                    key.new_zeros(*pages, *key.shape[1:]),
                    value.new_zeros(*pages, *value.shape[1:]),
                )
        return pair

    def open(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Let `slots` (int64 [n]) attend to exactly their first `lengths` positions."""
        closed = torch.arange(self.length, device=self.device) >= lengths[:, None]
        rows = torch.zeros(closed.shape, dtype=self.dtype, device=self.device).masked_fill_(
            closed, float("-inf")
        )
        self.mask.index_copy_(0, slots, rows)

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` over slots `target`, int64 [n]."""
        for pair in self.layers.values():
            for tensor in pair:
                front = tensor[:, :length]
                front.index_copy_(0, target, front.index_select(0, source))
        self.mask.index_copy_(0, target, self.mask.index_select(0, source))

    def keep(self, source: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy pages `source` of the slots over kept `pages`, int64 [n].

        Page p of the slots has the flat positions from p * ALIGN.
        """
        for slots, kept in self._pages():
            kept.index_copy_(0, pages, slots.index_select(0, source))

    def restore(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """Copy kept `pages` over pages `target` of the slots, int64 [n]."""
        for slots, kept in self._pages():
            slots.index_copy_(0, target, kept.index_select(0, pages))

    def _pages(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index, kept in self.kept.items():
            for slots, pages in zip(self.layers[index], kept, strict=True):
                yield slots.view(-1, ALIGN, *slots.shape[2:]), pages


@dataclass(slots=True)
class Extension:
    """The new tokens of contexts whose first tokens are in the cache."""

    slots: torch.Tensor
    """int64 [contexts]."""
    tokens: int
    longest: int
    """New tokens of the context that has the most."""
    padded_from: torch.Tensor
    """int64 [contexts * longest]: the packed token at each place of the padded batch."""
    packed_from: torch.Tensor
    """int64 [tokens]: the place of each packed token in the padded batch."""
    mask: torch.Tensor
    """bool [contexts, 1, longest, positions]: the positions of its slot that a token attends to."""


@dataclass(slots=True)
class Prefill:
    """The packed contexts at the front of a forward pass. Each attends only to itself, causally."""

    prompts: int
    longest: int
    padded_from: torch.Tensor | None
    """int64 [prompts * longest]: the packed token at each place of the padded batch.

    None if packed and padded tokens are the same.
    """
    packed_from: torch.Tensor | None
    """int64 [tokens]: the place of each packed token in the padded batch."""


@dataclass(slots=True)
class Forward:
    """The data of one forward pass that attention needs."""

    cache: SlotCache
    rows: int
    """Decode rows at the end of the pass. Row i is slot i."""
    kv_length: int
    """Number of positions that decode rows attend to."""
    write_to: torch.Tensor
    """int64 [writes]: flat cache positions."""
    write_from: torch.Tensor | None
    """int64 [writes]: the token of the forward pass whose K and V are written.

    Siblings share the tokens of their prompt. None: write i takes token i.
    """
    prefill: Prefill | None
    extension: Extension | None = None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_forward: Forward | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write `key` and `value` into the cache, and return the attention of `query`.

    `query` is [1, heads, tokens, head_dim]. `key` and `value` are [1, kv_heads, tokens, head_dim].
    The result is [1, tokens, heads, head_dim].
    """
    if slot_forward is None:
        kwargs["sliding_window"] = sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    forward = slot_forward
    _refuse_unsupported(forward, sliding_window, kwargs)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    keys, values = forward.cache.layer(module.layer_idx, k, v)  # type: ignore[arg-type]
    for cached, new in ((keys, k), (values, v)):
        chosen = new if forward.write_from is None else new.index_select(0, forward.write_from)
        cached.flatten(0, 1).index_copy_(0, forward.write_to, chosen)
    end = q.shape[0] - forward.rows
    front = end - (forward.extension.tokens if forward.extension is not None else 0)
    parts = []
    if forward.prefill is not None:
        parts.append(_prefill_attention(forward.prefill, q[:front], k[:front], v[:front], scaling))
    if forward.extension is not None:
        parts.append(_extension_attention(forward.extension, q[front:end], keys, values, scaling))
    if forward.rows:
        parts.append(_decode_attention(forward, q[end:], keys, values, scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _prefill_attention(
    p: Prefill, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Compute causal attention within each context.

    Padding is at the end, so the causal mask alone excludes it.
    """
    if p.padded_from is not None:
        q, k, v = (t.index_select(0, p.padded_from) for t in (q, k, v))
    q, k, v = (t.view(p.prompts, p.longest, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if p.packed_from is None else out.index_select(0, p.packed_from)


def _extension_attention(
    e: Extension,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of new tokens to their slots, which already have their K and V."""
    groups = q.shape[1] // keys.shape[2]
    k, v = (
        t[:, : e.mask.shape[-1]].index_select(0, e.slots).repeat_interleave(groups, dim=2)
        for t in (keys, values)
    )
    padded = q.index_select(0, e.padded_from).view(len(e.slots), e.longest, *q.shape[1:])
    q, k, v = (t.transpose(1, 2) for t in (padded, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=e.mask, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, e.packed_from)


def _decode_attention(
    forward: Forward,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of each decode row's query to its slot.

    The query heads of one KV head act as query positions, so no K and V are repeated.
    """
    rows, length, kv_heads = forward.rows, forward.kv_length, keys.shape[2]
    out = F.scaled_dot_product_attention(
        q.reshape(rows, kv_heads, -1, q.shape[-1]),
        keys[:rows, :length].transpose(1, 2),
        values[:rows, :length].transpose(1, 2),
        attn_mask=forward.cache.mask[:rows, None, None, :length].expand(
            -1, 1, q.shape[1] // kv_heads, -1
        ),
        scale=scaling,
    )
    return out.flatten(1, 2)


def _refuse_unsupported(
    forward: Forward, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    if sliding_window is not None and sliding_window < forward.cache.max_len:
        raise bad_value(
            "model.path",
            f"a model with a sliding window of {sliding_window}",
            "the torch rollout engine attends to all positions",
            "rollout.max_prompt_length + rollout.max_response_length within the window, "
            "or another model",
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise bad_value(
                "model.path",
                f"a model whose attention has {name}",
                "the torch rollout engine has no such term",
                "another model",
            )


def register() -> None:
    """Register NAME with transformers. Forward passes without slots use the masks of sdpa."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, slot_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
