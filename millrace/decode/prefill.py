"""Prefill plans: the tokens to read, their sources, and their cache positions. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The contexts to read into slots. Equal contexts are read once.

    Siblings, the requests of one prompt, therefore share its K and V.
    """

    tokens: np.ndarray
    """int64 [tokens]: the distinct contexts, one after the other."""
    positions: np.ndarray
    """int64 [tokens]."""
    write_from: np.ndarray
    """int64 [writes]: index into `tokens`."""
    write_to: np.ndarray
    """int64 [writes]: flat cache position."""
    prompts: int
    longest: int
    padded_from: np.ndarray | None
    """int64 [prompts * longest]: index into `tokens`. None if `tokens` is already padded."""
    packed_from: np.ndarray | None
    """int64 [tokens]: index into the padded batch."""


def plan_prefill(
    contexts: Sequence[np.ndarray],
    slots: Sequence[int],
    slot_length: int,
    fixed: tuple[int, int] | None = None,
) -> PrefillPlan | None:
    """Plan the read of `contexts` (int32 [length] each) into `slots`.

    Return None if all contexts are empty. With `fixed` = (prompts, longest), every plan has the
    shape of that batch, padded with zeros. The shape then does not depend on the contexts.
    """
    first: dict[bytes, int] = {}
    chosen = np.array([first.setdefault(c.tobytes(), len(first)) for c in contexts])
    distinct = [np.frombuffer(key, dtype=np.int32) for key in first]
    lengths = np.array([len(d) for d in distinct])
    if not lengths.any():
        return None
    ends = lengths.cumsum()
    starts = ends - lengths
    total, longest = int(ends[-1]), int(lengths.max())
    positions = np.arange(total) - np.repeat(starts, lengths)
    tokens = np.concatenate(distinct).astype(np.int64)
    prompts, padded_from, packed_from = len(distinct), None, None
    if fixed is not None:
        prompts, longest = fixed
        starts = np.arange(len(distinct)) * longest
        padded = np.zeros(prompts * longest, dtype=np.int64)
        padded[np.repeat(starts, lengths) + positions] = tokens
        tokens, positions = padded, np.tile(np.arange(longest), prompts)
    elif total != prompts * longest:
        # Places after a context's end repeat some token of the forward pass. The causal mask hides
        # them from real tokens.
        padded_from = np.minimum(starts[:, None] + np.arange(longest), total - 1).ravel()
        packed_from = np.repeat(np.arange(prompts) * longest, lengths) + positions
    write_lengths = lengths[chosen]
    shift = write_lengths.cumsum() - write_lengths
    ramp = np.arange(int(write_lengths.sum()))
    return PrefillPlan(
        tokens=tokens,
        positions=positions,
        write_from=ramp + np.repeat(starts[chosen] - shift, write_lengths),
        write_to=ramp + np.repeat(np.asarray(slots) * slot_length - shift, write_lengths),
        prompts=prompts,
        longest=longest,
        padded_from=padded_from,
        packed_from=packed_from,
    )


@dataclass(frozen=True, slots=True)
class ExtensionPlan:
    """The tokens to read after the contexts that slots already have."""

    tokens: np.ndarray
    """int64 [tokens]: the new tokens, one context after the other."""
    positions: np.ndarray
    """int64 [tokens]."""
    write_to: np.ndarray
    """int64 [tokens]: flat cache position."""
    slots: np.ndarray
    """int64 [contexts]."""
    longest: int
    padded_from: np.ndarray
    """int64 [contexts * longest]: index into `tokens`. Padding repeats the last token."""
    packed_from: np.ndarray
    """int64 [tokens]: index into the padded batch."""


def plan_extension(
    contexts: Sequence[np.ndarray], known: Sequence[int], slots: Sequence[int], slot_length: int
) -> ExtensionPlan | None:
    """Plan the read of `contexts` (int32 [length] each) after their first `known` tokens.

    Return None if there is nothing to read.
    """
    rows = [
        (context[n:], n, slot)
        for context, n, slot in zip(contexts, known, slots, strict=True)
        if len(context) > n
    ]
    if not rows:
        return None
    new, first, at = zip(*rows, strict=True)
    lengths = np.array([len(part) for part in new])
    starts = lengths.cumsum() - lengths
    longest = int(lengths.max())
    place = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    positions = place + np.repeat(first, lengths)
    last = (lengths - 1)[:, None]
    return ExtensionPlan(
        tokens=np.concatenate(new).astype(np.int64),
        positions=positions,
        write_to=positions + np.repeat(np.array(at) * slot_length, lengths),
        slots=np.array(at),
        longest=longest,
        padded_from=(starts[:, None] + np.minimum(np.arange(longest), last)).ravel(),
        packed_from=np.repeat(np.arange(len(rows)) * longest, lengths) + place,
    )
