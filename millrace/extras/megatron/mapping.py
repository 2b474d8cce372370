"""Which part of which Hugging Face tensor each Megatron parameter of a rank has.

A Hugging Face tensor has the name and the shape that it has in transformers' model, where the
experts of a layer are one tensor [experts, rows, columns].
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.extras.megatron.shape import RankCoordinates, Shape
from millrace.models.mixtures import experts_of

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


Sizes = tuple[int, ...]


class Kind(Enum):
    """How the ranks of a tensor group share a tensor."""

    ROWS = "each has some rows"
    COLUMNS = "each has some columns"
    WHOLE = "each has all of it"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a Hugging Face tensor. It is all columns of some rows of a parameter."""

    name: str
    offsets: tuple[int, ...]
    """The first index of each dimension."""
    sizes: tuple[int, ...]
    row: int
    """The parameter's first row of these."""
    kind: Kind

    @property
    def rows(self) -> int:
        """Return the number of the parameter's rows."""
        return self.sizes[-2] if len(self.sizes) > 1 else self.sizes[0]

    def within(self, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes, int]]:
        """Yield (offsets, sizes, first element) of the rectangles of a flat range.

        The range is one of the parameter's elements. It may begin and end within a row.
        """
        width = self.sizes[-1] if len(self.sizes) > 1 else 1
        at, end = max(start, self.row * width), min(stop, (self.row + self.rows) * width)
        while at < end:
            row, column = divmod(at - self.row * width, width)
            rows = 1 if column else max((end - at) // width, 1)
            columns = min(width - column, end - at)
            if len(self.sizes) > 1:
                *lead, top, left = self.offsets
                places, sizes = (*lead, top + row, left + column), (*self.sizes[:-2], rows, columns)
            else:
                places, sizes = (self.offsets[0] + row,), (rows,)
            yield places, sizes, at
            at += rows * columns


def boxes(
    name: str, width: int, hf: Any, shape: Shape, place: RankCoordinates, first_layer: int
) -> list[Box]:
    """Return the rectangles of a parameter, in the order of its rows. Padded rows have none.

    name         the parameter's name in its stage
    width        the size of its last dimension
    first_layer  the number of the stage's first layer in the model, from 0

    Raises KeyError for a name that is not in the table.
    """
    if name in _TOP:
        return _of_the_top(name, width, hf, shape, place)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, own = f"model.layers.{first_layer + int(match[1])}.", match[2]
    if own == "mlp.router.weight":
        size = (experts_of(hf), width)
        return [Box(layer + "mlp.gate.weight", (0, 0), size, 0, Kind.WHOLE)]
    if own in _NORMS:
        return [Box(layer + _NORMS[own], (0,), (width,), 0, Kind.WHOLE)]
    if own in _COLUMNS:
        at = (0, place.tensor * width)
        return [Box(layer + _COLUMNS[own], at, (hf.hidden_size, width), 0, Kind.COLUMNS)]
    if own.startswith("self_attention.linear_qkv."):
        return list(_of_qkv(layer, own.rpartition(".")[2], width, hf, shape, place))
    if own == "mlp.linear_fc1.weight":
        rows = hf.intermediate_size // shape.tensor
        at, size = (place.tensor * rows, 0), (rows, width)
        names = (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight")
        return [Box(n, at, size, i * rows, Kind.ROWS) for i, n in enumerate(names)]
    expert = _EXPERT.fullmatch(own)
    if expert is None:
        raise KeyError(name)
    return _of_an_expert(layer, int(expert[1]), expert[2], width, hf, shape, place)


def _of_the_top(name: str, width: int, hf: Any, shape: Shape, place: RankCoordinates) -> list[Box]:
    if name == "decoder.final_layernorm.weight":
        return [Box(_TOP[name], (0,), (hf.hidden_size,), 0, Kind.WHOLE)]
    rows = shape.padded_vocab(hf.vocab_size) // shape.tensor
    first = place.tensor * rows
    count = min(rows, hf.vocab_size - first)
    # With pipeline stages, the last one has a copy of tied embeddings.
    tied = name == "output_layer.weight" and hf.tie_word_embeddings
    whole = _TOP["embedding.word_embeddings.weight"] if tied else _TOP[name]
    return [Box(whole, (first, 0), (count, width), 0, Kind.ROWS)] if count > 0 else []


def _of_qkv(
    layer: str, which: str, width: int, hf: Any, shape: Shape, place: RankCoordinates
) -> Iterator[Box]:
    """Yield the parts of fused rows. Each head of keys has its query heads, its key, its value."""
    head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    queries = hf.num_attention_heads // hf.num_key_value_heads
    own = hf.num_key_value_heads * (queries + 2) * head // shape.tensor
    low, position = place.tensor * own, 0
    for group in range(hf.num_key_value_heads):
        for part, heads in (("q", queries), ("k", 1), ("v", 1)):
            rows = heads * head
            start, stop = max(position, low), min(position + rows, low + own)
            if start < stop:
                first = group * rows + start - position
                at, size = (
                    ((first, 0), (stop - start, width))
                    if which == "weight"
                    else (
                        (first,),
                        (stop - start,),
                    )
                )
                name = f"{layer}self_attn.{part}_proj.{which}"
                yield Box(name, at, size, start - low, Kind.ROWS)
            position += rows


def _of_an_expert(
    layer: str, number: int, part: str, width: int, hf: Any, shape: Shape, place: RankCoordinates
) -> list[Box]:
    expert = place.expert * (experts_of(hf) // shape.expert) + number
    inner = getattr(hf, "moe_intermediate_size", hf.intermediate_size)
    rows = inner // shape.expert_tensor
    at = place.expert_tensor * rows
    if part == "linear_fc2":
        name, size = f"{layer}mlp.experts.down_proj", (1, hf.hidden_size, width)
        return [Box(name, (expert, 0, at), size, 0, Kind.COLUMNS)]
    name, size = f"{layer}mlp.experts.gate_up_proj", (1, rows, width)
    return [Box(name, (expert, i * inner + at, 0), size, i * rows, Kind.ROWS) for i in range(2)]


def in_files(box: Box, hf: Any) -> tuple[str, tuple[int, ...]]:
    """Return the name of the tensor in a model folder that contains the box, and its offsets.

    In folders, each expert has tensors of its own.
    """
    mixtral = hf.model_type == "mixtral"
    if len(box.offsets) < 3:
        return box.name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else box.name, (
            box.offsets
        )
    expert, row, column = box.offsets
    layer, _, part = box.name.rpartition(".mlp.experts.")
    inner = getattr(hf, "moe_intermediate_size", hf.intermediate_size)
    if part == "down_proj":
        name = "w2" if mixtral else "down_proj"
    elif row < inner:
        name = "w1" if mixtral else "gate_proj"
    else:
        name, row = "w3" if mixtral else "up_proj", row - inner
    room = "block_sparse_moe" if mixtral else "mlp"
    return f"{layer}.{room}.experts.{expert}.{name}.weight", (row, column)


def names_of(hf: Any) -> dict[str, Sizes]:
    """Return the shape of every tensor of the model, in its order. Tied tensors come once."""
    return dict(_names_of(json.dumps(hf.to_dict(), sort_keys=True, default=str)))


@functools.lru_cache(maxsize=4)
def _names_of(config: str) -> tuple[tuple[str, Sizes], ...]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    return tuple((name, tuple(p.shape)) for name, p in model.named_parameters())
