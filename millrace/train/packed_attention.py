"""Attention over packed rows, registered with transformers as "millrace_packed".

It never builds a T x T mask. The model reads T tokens. A prompt that several rows share appears
among them once. Only attention needs whole rows: it gathers them from the T tokens, and afterwards
gathers one result for each of the T tokens.

On CUDA in half precision, it uses torch's varlen attention. Otherwise, rows of similar length form
padded batches. Causal attention needs no mask for them: padding is on the right, and its results
are discarded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from millrace.train.layout import Layout

NAME = "millrace_packed"


# A compiled layer calls this function without compiling it, because shapes and Python numbers
# change with each batch.
@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed_layout: Layout,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, T, heads, D], in transformers' convention.

    query is [1, heads, T, D]. key and value are [1, KV heads, T, D]. If ranks share the tokens, T
    is this rank's number of them. Dropout, one of the other arguments, is never applied.
    """
    share = packed_layout.share
    q, k, v = share.whole(*(x[0].transpose(0, 1) for x in (query, key, value)))
    if packed_layout.unpack is not None:
        q, k, v = (x.index_select(0, packed_layout.unpack) for x in (q, k, v))
    if packed_layout.buckets:
        out = _padded(q, k, v, packed_layout, scaling, sliding_window)
    else:
        out = _varlen(q, k, v, packed_layout, scaling, sliding_window)
    if packed_layout.repack is not None:
        out = out.index_select(0, packed_layout.repack)
    return share.all_heads(out).unsqueeze(0), None


def _padded(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float, sliding_window: int | None
) -> Tensor:
    """Return attention on q, k and v [cells, heads, D], in batches of [rows, heads, length, D].

    Raises NotImplementedError for a row that is longer than the sliding window.
    """
    if sliding_window is not None and max(layout.lengths) > sliding_window:
        raise NotImplementedError(
            f"a sliding window of {sliding_window} tokens on rows of {max(layout.lengths)} "
            "needs CUDA and model.dtype=bfloat16"
        )
    sizes = [rows * length for rows, length in layout.buckets]
    gqa = q.shape[1] != k.shape[1]
    parts = []
    for *qkv, shape in zip(
        torch.split(q, sizes),
        torch.split(k, sizes),
        torch.split(v, sizes),
        layout.buckets,
        strict=True,
    ):
        a, b, c = (x.reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scaling, enable_gqa=gqa)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float, sliding_window: int | None
) -> Tensor:
    # torch.nn.attention.varlen runs this operator in Python code, forward and backward. A small
    # model's step is bound by the host. The kernels share key heads among query heads.
    cu, longest = layout.cu_seqlens, max(layout.lengths)
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest),
        0.0,  # dropout
        sliding_window is None,  # causal
        False,  # the debug mask
        scale=scaling,
        window_size_left=-1 if sliding_window is None else sliding_window - 1,
        window_size_right=0,
    )
    return cast(Tensor, out)


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask. transformers calls this function for the attention's mask."""


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
