"""The rotary embedding of vLLM's kernels, in place, in plain torch."""

from typing import Any


def rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> None:
    """Rotate the first and the second half of each head of `query` and `key` by its position."""
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, -1)
    size = cos.shape[-1]
    for heads in (query, key):
        if heads is None:
            continue
        rows = heads.view(heads.shape[0], -1, head_size)
        first, second = rows[..., :size].clone(), rows[..., size : 2 * size].clone()
        c, s = cos.unsqueeze(1).to(rows.dtype), sin.unsqueeze(1).to(rows.dtype)
        rows[..., :size] = first * c - second * s
        rows[..., size : 2 * size] = second * c + first * s
