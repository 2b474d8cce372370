"""Micro-batches of packed tokens from rows. NumPy works on whole arrays, not token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.errors import bad_value
from millrace.models.mixtures import experts_of
from millrace.models.shape import mlp_width
from millrace.train.layout import Ints, Layout, make_layout
from millrace.train.routing import Routed
from millrace.train.rows import Rows
from millrace.train.ulysses import Division

SMALL_UNIT = 4
"""Rows of a sample stay together if each sample fills at most 1 / SMALL_UNIT of a rank's share."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of a forward pass: T packed tokens, and the positions that predict M of them."""

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, position of each token in its row."""
    layout: Layout
    select: Tensor
    """[M] int64 positions in input_ids that predict a trained token.

    The last position of a shared prompt predicts a token for several rows.
    """
    targets: Tensor
    """[M] int64 the trained tokens."""
    source: Tensor
    """[M] int64 on the host: index of each target among the trained tokens of Rows."""
    sequence: Tensor
    """[M] int64 on the host: trajectory of each trained token, numbered in this micro-batch.

    The numbers are in the order of the rows. They never decrease if each trajectory has one row.
    """
    num_sequences: int
    """Number of trajectories of this micro-batch."""
    experts: Tensor | None = None
    """[T, layers x k] the experts of each token, for router replay. None lets routers choose."""
    candidates: Tensor | None = None
    """[M, C] further tokens whose log-probs the pass returns, beside that of the target."""
    cells: tuple[Ints, Ints] | None = None
    """[C] token of each cell, and [C] its position in Rows.tokens. None without cells."""


Outputs = tuple[Tensor, ...]
"""The outputs of a model for the trained tokens of a micro-batch, each [M]."""


def attention_length(hf: Any) -> float:
    """Return the length at which attention costs a row as much as all matrices of the model.

    A row of n tokens then costs n + n^2 / attention_length tokens' passes through the matrices. `hf`
    is config.json. Causal attention has as many multiplications as a matrix of n x width weights.
    """
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    head = getattr(hf, "head_dim", None) or hidden // heads
    keys = getattr(hf, "num_key_value_heads", None) or heads
    chosen = hf.num_experts_per_tok if experts_of(hf) else 1
    layer = 2 * head * (heads + keys) + 3 * chosen * mlp_width(hf)
    return float(hidden * (layer + hf.vocab_size / hf.num_hidden_layers) / (heads * head))


def split(
    rows: Rows,
    members: Ints,
    *,
    max_tokens: int,
    world_size: int,
    attention_length: float = math.inf,
) -> list[list[Ints]]:
    """Return the rows that each rank reads: result[micro-batch][rank] is an array of row numbers.

    Every row of `members` with a trained token is in exactly one array. The rows of one array have
    at most `max_tokens` tokens. The ranks' shares of a micro-batch cost about the same time, because
    they wait for each other, and some may be empty. There is at least one micro-batch. The rows of a
    trajectory are in one array if they have at most `max_tokens` tokens together. The result is the
    same on every rank.

    Raises ConfigError if a single row exceeds `max_tokens`.
    """
    members = members[rows.inputs[members] > 0]
    lengths = rows.inputs[members]
    if len(members) and int(lengths.max()) > max_tokens:
        raise bad_value(
            "actor.ppo_max_token_len_per_gpu",
            max_tokens,
            f"a trajectory has {int(lengths.max())} tokens before its last one, and must fit",
            f"actor.ppo_max_token_len_per_gpu={int(lengths.max())} or more",
        )
    units, sizes = _units(rows, members, max_tokens, world_size)
    squares = np.array([np.square(rows.inputs[unit]).sum() for unit in units], dtype=np.float64)
    costs = sizes + squares / attention_length
    # Most costly first: `_fill` is greedy and then gives the most even bins.
    order = np.argsort(-costs, kind="stable")
    micro_batches = max(-(-int(sizes.sum()) // (max_tokens * world_size)), 1)
    limits = sizes[order], costs[order], max_tokens
    while (bins := _fill(*limits, micro_batches * world_size)) is None:
        micro_batches += 1
    none = np.zeros(0, dtype=np.int64)
    shares = [np.concatenate([none, *(units[order[i]] for i in bin_)]) for bin_ in bins]
    # By descending length: rows of equal length are then adjacent.
    shares = [share[np.argsort(-rows.inputs[share], kind="stable")] for share in shares]
    return [shares[i * world_size : (i + 1) * world_size] for i in range(micro_batches)]


def check_whole(rows: Rows, max_tokens: int) -> None:
    """Raise ConfigError if the threads of a trajectory do not fit in one micro-batch together."""
    if rows.num_trajectories == len(rows.trajectory):
        return
    totals = np.bincount(rows.trajectory, rows.inputs, minlength=rows.num_trajectories)
    if int(totals.max(initial=0)) > max_tokens:
        raise bad_value(
            "actor.ppo_max_token_len_per_gpu",
            max_tokens,
            f"the threads of a trajectory have {int(totals.max())} tokens together, and this loss "
            "reads all tokens of a trajectory at once",
            f"actor.ppo_max_token_len_per_gpu={int(totals.max())} or more, or a loss by token",
        )


def _units(rows: Rows, members: Ints, max_tokens: int, world_size: int) -> tuple[list[Ints], Ints]:
    """Return the units that a split keeps whole, and the tokens of each unit.

    A unit is all rows of a sample if the ranks' shares then stay even. Otherwise it is the rows of
    one trajectory, or a single row if those are too long together. Rows of one sample share a
    prompt, and a micro-batch reads that prompt once.
    """
    lengths = rows.inputs[members]
    if not len(members):
        return [], lengths
    cuts = np.flatnonzero(np.diff(rows.sample[members])) + 1
    sizes = np.add.reduceat(lengths, np.concatenate([[0], cuts]))
    total = int(lengths.sum())
    fits_one = world_size == 1 and total <= max_tokens
    if fits_one or int(sizes.max()) * SMALL_UNIT <= min(max_tokens, total // world_size):
        return np.split(members, cuts), sizes
    ends = np.flatnonzero(np.diff(rows.trajectory[members])) + 1
    if len(ends) + 1 == len(members):  # each trajectory has one row
        return list(members[:, None]), lengths
    units: list[Ints] = []
    for rows_of_one in np.split(members, ends):
        fits = int(rows.inputs[rows_of_one].sum()) <= max_tokens
        units += [rows_of_one] if fits else list(rows_of_one[:, None])
    return units, np.array([rows.inputs[unit].sum() for unit in units], dtype=np.int64)


def _fill(
    sizes: Ints, costs: NDArray[np.float64], limit: int, num_bins: int
) -> list[list[int]] | None:
    """Put each unit in turn into the cheapest bin with room, and return the bins, costly ones first.

    A bin is a list of indices into `sizes`. Return None if a unit finds no room within `limit`.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled, spent = np.zeros(num_bins, dtype=np.int64), np.zeros(num_bins)
    for i, size in enumerate(sizes):
        fits = filled + size <= limit
        bin_ = int(np.where(fits, spent, math.inf).argmin())
        if not fits[bin_]:
            return None
        bins[bin_].append(i)
        filled[bin_] += size
        spent[bin_] += costs[i]
    return [bins[bin_] for bin_ in np.argsort(-spent, kind="stable")]


def pack(
    rows: Rows,
    members: Ints,
    device: torch.device,
    *,
    padded: bool,
    division: Division = Division(),  # noqa: B008 - immutable
) -> MicroBatch:
    """Return the rows `members`, longest first, as one micro-batch.

    An opening that several rows share appears once. `padded` is the argument of `make_layout`. The
    ranks of `division` share the tokens.

    Without members, return a dummy of one token that predicts nothing. A rank without work runs it
    forward and backward, and so takes part in every collective.
    """
    if not len(members):
        return _dummy(device, rows, division, padded=padded)
    lengths = rows.inputs[members]
    _, first, group = np.unique(rows.opening[members], return_index=True, return_inverse=True)
    # Rows of different openings share nothing.
    shared = rows.opening_lengths[members] if len(first) < len(members) else np.zeros_like(lengths)
    shared_ends = np.cumsum(shared[first])
    own = lengths - shared
    own_starts = shared_ends[-1] + np.cumsum(own) - own
    shared_starts = (shared_ends - shared[first])[group]

    column = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    from_prompt = column < np.repeat(shared, lengths)
    token = column + np.where(
        from_prompt, np.repeat(shared_starts, lengths), np.repeat(own_starts - shared, lengths)
    )
    source = column + np.repeat(rows.starts[members], lengths)
    num_tokens = int(shared_ends[-1] + own.sum())
    input_ids, position_ids = (
        np.empty(num_tokens, dtype=np.int64),
        np.empty(num_tokens, dtype=np.int64),
    )
    input_ids[token], position_ids[token] = rows.tokens[source], column

    _, first, index = np.unique(rows.trajectory[members], return_index=True, return_inverse=True)
    sequence, num_sequences = np.argsort(np.argsort(first))[index], len(first)
    predicts = np.flatnonzero(rows.trained[source + 1])
    targets = source[predicts] + 1
    candidates = None if rows.candidates is None else rows.candidates[rows.order[targets]]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        layout=make_layout(lengths, token, division.share(num_tokens), device, padded=padded),
        select=torch.from_numpy(token[predicts]).to(device),
        targets=torch.from_numpy(rows.tokens[targets]).to(device),
        source=torch.from_numpy(rows.order[targets]),
        sequence=torch.from_numpy(np.repeat(sequence, lengths)[predicts]),
        num_sequences=num_sequences,
        experts=_packed_experts(rows.experts, token, source, num_tokens, device),
        candidates=None if candidates is None else torch.from_numpy(candidates).to(device),
        cells=(token, source),
    )


def _packed_experts(
    experts: Routed | None, token: Ints, source: Ints, num_tokens: int, device: torch.device
) -> Tensor | None:
    """Return the experts of packed tokens. Rows that share a token give it those of one of them."""
    if experts is None:
        return None
    packed = np.zeros((num_tokens, experts.shape[1]), dtype=experts.dtype)
    packed[token] = experts[source]
    return torch.from_numpy(packed).to(device).long()


def _dummy(device: torch.device, rows: Rows, division: Division, *, padded: bool) -> MicroBatch:
    none, zero = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    one = np.ones(1, dtype=np.int64)
    layout = make_layout(one, zero.numpy(), division.share(1), device, padded=padded)
    on_device = none.to(device)
    ids = zero.to(device)
    experts, candidates = (
        None if of is None else zero.new_zeros(count, of.shape[1]).to(device)
        for of, count in ((rows.experts, 1), (rows.candidates, 0))
    )
    return MicroBatch(ids, ids, layout, on_device, on_device, none, none, 0, experts, candidates)
