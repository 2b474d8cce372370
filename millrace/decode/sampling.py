"""Token sampling: one random stream for each request, inverse CDF, exact log-probs.

The uniform number of a token is a hash of (request seed, position in the response), so there is no
state. A resumed response continues its own stream, and other requests in the batch have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.errors import MillraceError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


def _mix(z: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 to uint64.

    (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.)
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def stream_keys(seeds: Sequence[int]) -> np.ndarray:
    """Return the start of each seed's stream, uint64 [n].

    Seeds are mixed, because callers use consecutive seeds: 0, 1, 2.
    """
    return _mix(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return each stream's number at its position, float64 [n] in [0, 1).

    `keys` are uint64 [n], and `positions` are int64 [n].
    """
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits, not 53: the rounded product u * total must be below any total.
    fractions: np.ndarray = (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return fractions


@dataclass(frozen=True, slots=True)
class Nucleus:
    """top-p and top-k of each row.

    These are for validation only. Training needs the full distribution.
    """

    top_p: torch.Tensor
    """float32 [rows]; 1 keeps everything."""
    top_k: torch.Tensor
    """int64 [rows]; the vocabulary's size keeps everything."""

    def apply(self, probs: torch.Tensor) -> torch.Tensor:
        """Set `probs` [rows, vocabulary] outside top-p or top-k to 0.

        The most likely token always stays.
        """
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        rank = torch.arange(probs.shape[-1], device=probs.device)
        cut = (before >= self.top_p[:, None]) | (rank >= self.top_k[:, None])
        cut[:, 0] = False
        return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(cut, 0.0))


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    nucleus: Nucleus | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row, and return (tokens int64 [rows], log-probs float32 [rows]).

    logits       [rows, vocabulary] of any float dtype
    uniform      float64 [rows]
    temperature  float32 [rows]; None: all 1
    greedy       bool [rows]; None: no row is greedy. A greedy row needs temperature 1

    The log-probs are of the full distribution at `temperature`. The CDF is summed in float64, so a
    drawn token has p > 0. Raises MillraceError for logits that are not finite.
    """
    z = logits.float()
    if temperature is not None:
        z = z / temperature[:, None]
    log_probs = torch.log_softmax(z, dim=-1)
    probs = log_probs.exp()
    if nucleus is not None:
        probs = nucleus.apply(probs)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    if not torch.isfinite(cdf[:, -1]).all():
        raise MillraceError(
            "the live weights give logits that are not finite. "
            "Fix: a lower actor.optim.lr, or model.dtype=float32"
        )
    target = (uniform * cdf[:, -1]).unsqueeze(-1)
    tokens = torch.searchsorted(cdf, target, right=True)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], z.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)
