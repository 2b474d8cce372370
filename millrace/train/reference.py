"""Log-probs of an independent model: transformers' own, unpacked, whole, and in a wider dtype."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.models.device import free_memory
from millrace.models.model import empty_model, unfilled_model
from millrace.sync.eight_bit import rounded
from millrace.train.layout import Ints
from millrace.train.rows import Rows
from millrace.waits.registry import count, doing

_CELLS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits of one pass, unless a single row has more. A GPU takes as long for few as for many."""
_ROOM = 1.5
"""The model takes this many times the memory of its weights, with activations."""


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose rounding does not count beside that of `dtype`."""
    return torch.float64 if dtype == torch.float32 else torch.float32


@torch.no_grad()
def log_probs_and_ranks(
    folder: str,
    weights: Iterator[tuple[str, Tensor]],
    rows: Rows,
    temperature: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    computes: bool,
    seconds: float,
    eight_bit: bool = False,
) -> Tensor:
    """Return log p and the rank of each trained token, and a last column of 1, [2, K + 1].

    They are float64 on the host. All ranks call this and iterate over `weights`. One of them
    `computes`, and the others return zeros. If the model finds no room there, all elements are 0.
    Tokens that it does not read within `seconds` are NaN. It reads at least one batch of rows.
    With `eight_bit`, its linear layers compute as those of an engine in 8 bits.
    """
    cells = _CELLS[device.type]
    flat = torch.zeros(2, len(rows.versions) + 1, dtype=torch.float64)
    model = None
    if computes:
        shape = empty_model(folder, trust_remote_code=trust_remote_code)
        size = sum(p.numel() for p in shape.parameters()) * dtype.itemsize
        if size * _ROOM + cells * dtype.itemsize < free_memory(device):
            model = unfilled_model(folder, dtype, device, trust_remote_code=trust_remote_code)
    own = {} if model is None else dict(model.named_parameters())
    quantised = _in_eight_bits(model) if model is not None and eight_bit else set[str]()
    for name, tensor in weights:
        if model is not None:
            own.pop(name).copy_(rounded(tensor.float()) if name in quantised else tensor)
    if model is None:
        return flat
    assert not own, f"the train engine lacks {sorted(own)[:3]}"
    flat[:, :-1], flat[:, -1] = torch.nan, 1.0
    batches = _batches(rows, cells // model.config.get_text_config().vocab_size)
    until = time.perf_counter() + seconds
    # Lengths in a mixed order: time may end before all of them were read.
    for k, at in enumerate(np.random.default_rng(0).permutation(len(batches)), 1):
        if k > 1 and time.perf_counter() > until:
            break
        members = batches[at]
        count("passes")
        with doing(f"reference log-probs of batch {k}"):
            _read(model, rows, members, temperature, flat)
    return flat


def _in_eight_bits(model: torch.nn.Module) -> set[str]:
    """Let linear layers round what they read as 8 bits do. Return the names of their weights.

    The head is none of them. Each token has a scale of its own.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    found = set[str]()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head:
            layer.register_forward_pre_hook(lambda _, arguments: (rounded(arguments[0]),))
            found.add(f"{name}.weight")
    return found


def _batches(rows: Rows, tokens: int) -> list[Ints]:
    """Return the rows in batches of like lengths, which have so many tokens at most."""
    batches = []
    order = np.argsort(rows.inputs, kind="stable")
    order = order[rows.inputs[order] > 0]
    while len(order):
        widths = rows.inputs[order]
        fits = max(1, int((widths * np.arange(1, len(order) + 1) <= tokens).sum()))
        batches.append(order[:fits])
        order = order[fits:]
    return batches


def _read(
    model: torch.nn.Module, rows: Rows, members: Ints, temperature: float, flat: Tensor
) -> None:
    """Read rows as a batch that is padded at the end. Nothing attends to the padding."""
    device = next(model.parameters()).device
    width = int(rows.inputs[members].max())
    ids = np.zeros((len(members), width), dtype=np.int64)
    places = []
    for i, row in enumerate(members):
        start, length = rows.starts[row], rows.inputs[row]
        ids[i, :length] = rows.tokens[start : start + length]
        places.append(np.flatnonzero(rows.trained[start + 1 : start + 1 + length]))
    # The logits of a long prompt would take more memory than the model.
    first = int(min(at[0] for at in places))
    tokens = torch.from_numpy(ids).to(device)
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=width - first).logits
    for i, (row, at) in enumerate(zip(members, places, strict=True)):
        start = int(rows.starts[row])
        z = logits[i, torch.from_numpy(at - first).to(device)].double() / temperature
        targets = torch.from_numpy(rows.tokens[start + 1 + at]).to(device)[:, None]
        z = z.log_softmax(-1)
        found = z.gather(1, targets)[:, 0]
        p = z.exp_()
        own = p.gather(1, targets)
        rank = p.where(p > own, 0.0).sum(1) + p.where(p == own, 0.0).sum(1) / 2
        flat[:, torch.from_numpy(rows.order[start + 1 + at])] = torch.stack((found, rank)).cpu()
