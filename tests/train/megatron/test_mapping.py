"""Tests of the table of weights: the parameters of all ranks tile every tensor of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from millrace.extras.megatron.mapping import Kind, boxes, in_files, names_of
from millrace.extras.megatron.shape import RankCoordinates, Shape
from millrace.models.mixtures import experts_of
from tests.train.megatron.cases import MODELS

SHAPES = {
    "one rank": Shape(world_size=1),
    "TP4": Shape(world_size=4, tensor=4),
    "TP2 x PP2": Shape(world_size=4, tensor=2, pipeline=2),
    "TP2 x PP2 x DP2": Shape(world_size=8, tensor=2, pipeline=2),
    "TP2 x CP2 x DP2": Shape(world_size=8, tensor=2, context=2),
    "EP2 x PP2": Shape(world_size=4, pipeline=2, expert=2),
    "TP2 x EP4, ETP1": Shape(world_size=8, tensor=2, expert=4),
    "TP2 x EP2, ETP2": Shape(world_size=8, tensor=2, expert=2, expert_tensor=2),
}


def parameters(
    hf: Any, shape: Shape, place: RankCoordinates
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the parameters that Megatron gives a rank."""
    first, last = place.pipeline == 0, place.pipeline == shape.pipeline - 1
    head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    wide, tp = hf.hidden_size, shape.tensor
    vocab = shape.padded_vocab(hf.vocab_size) // tp
    fused = (hf.num_attention_heads + 2 * hf.num_key_value_heads) * head // tp
    if first:
        yield "embedding.word_embeddings.weight", (vocab, wide)
    for i in range(hf.num_hidden_layers // shape.pipeline):
        layer = f"decoder.layers.{i}."
        yield f"{layer}input_layernorm.weight", (wide,)
        yield f"{layer}pre_mlp_layernorm.weight", (wide,)
        yield f"{layer}self_attention.linear_qkv.weight", (fused, wide)
        yield (
            f"{layer}self_attention.linear_proj.weight",
            (wide, hf.num_attention_heads * head // tp),
        )
        if hf.model_type == "qwen2":
            yield f"{layer}self_attention.linear_qkv.bias", (fused,)
        if hf.model_type.startswith("qwen3"):
            yield f"{layer}self_attention.q_layernorm.weight", (head,)
            yield f"{layer}self_attention.k_layernorm.weight", (head,)
        if not experts_of(hf):
            inner = hf.intermediate_size // tp
            yield f"{layer}mlp.linear_fc1.weight", (2 * inner, wide)
            yield f"{layer}mlp.linear_fc2.weight", (wide, inner)
            continue
        yield f"{layer}mlp.router.weight", (experts_of(hf), wide)
        inner = getattr(hf, "moe_intermediate_size", hf.intermediate_size) // shape.expert_tensor
        for j in range(experts_of(hf) // shape.expert):
            expert = f"{layer}mlp.experts.local_experts.{j}."
            yield f"{expert}linear_fc1.weight", (2 * inner, wide)
            yield f"{expert}linear_fc2.weight", (wide, inner)
    if last:
        yield "decoder.final_layernorm.weight", (wide,)
        if not hf.tie_word_embeddings or not first:
            yield "output_layer.weight", (vocab, wide)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_all_ranks_tile_every_tensor(model: str, name: str) -> None:
    hf, shape = MODELS[model], SHAPES[name]
    if shape.expert > 1 and not experts_of(hf):
        pytest.skip("the model has no experts")
    count = {key: torch.zeros(size) for key, size in names_of(hf).items()}
    in_folder: dict[str, int] = {}
    for rank in range(shape.world_size):
        place, seen = shape.place(rank), set()
        first_layer = place.pipeline * hf.num_hidden_layers // shape.pipeline
        for parameter, size in parameters(hf, shape, place):
            parts = boxes(parameter, size[-1], hf, shape, place, first_layer)
            rows = [box.row + i for box in parts for i in range(box.rows)]
            assert rows == list(range(len(rows))), "in the order of its rows, without a gap"
            padded = parameter in ("embedding.word_embeddings.weight", "output_layer.weight")
            assert len(rows) <= size[0] if padded else len(rows) == size[0]
            for box in parts:
                copies = place.expert_data if len(box.sizes) > 2 else place.data + place.context
                copies += place.tensor if box.kind is Kind.WHOLE else 0
                copy = parameter == "output_layer.weight" and hf.tie_word_embeddings
                if copies or copy:
                    continue
                at = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
                count[box.name][at] += 1
                assert (box.name, box.offsets) not in seen
                seen.add((box.name, box.offsets))
                file, _ = in_files(box, hf)
                in_folder[file] = in_folder.get(file, 0) + torch.Size(box.sizes).numel()
    assert all(bool((tensor == 1).all()) for tensor in count.values())
    assert sum(in_folder.values()) == sum(tensor.numel() for tensor in count.values())


@pytest.mark.parametrize("model", MODELS)
def test_flat_ranges_of_a_parameter_tile_its_rectangles(model: str) -> None:
    """The distributed optimizer cuts a parameter anywhere, also within a row."""
    hf, shape = MODELS[model], Shape(world_size=2, tensor=2, expert_tensor=2)
    place = shape.place(1)
    for parameter, size in parameters(hf, shape, place):
        total = torch.Size(size).numel()
        values = torch.arange(total)
        for cuts in ([0, total], [0, 1, total // 3, total // 3 + 1, total - 2, total]):
            for box in boxes(parameter, size[-1], hf, shape, place, 0):
                whole = torch.full(
                    tuple(a + n for a, n in zip(box.offsets, box.sizes, strict=True)), -1
                )
                for start, stop in itertools.pairwise(cuts):
                    for offsets, sizes, at in box.within(start, stop):
                        count = torch.Size(sizes).numel()
                        assert start <= at and at + count <= stop
                        place_of = tuple(
                            slice(a, a + n) for a, n in zip(offsets, sizes, strict=True)
                        )
                        assert bool((whole[place_of] == -1).all())
                        whole[place_of] = values[at : at + count].view(sizes)
                own = tuple(slice(a, None) for a in box.offsets)
                want = values.view(size)[box.row : box.row + box.rows].reshape(box.sizes)
                assert torch.equal(whole[own], want)


def test_a_parameter_that_is_not_in_the_table_is_an_error() -> None:
    shape = Shape(world_size=1)
    for name in ("decoder.layers.0.mlp.linear_fc3.weight", "extra.weight"):
        with pytest.raises(KeyError):
            boxes(name, 1, MODELS["qwen2"], shape, shape.place(0), 0)
