"""Tests of the proof by bit sums: live tensors may be fused, split, repeated or padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millrace.sync.proof import bit_sum, bit_sums, not_live

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def sent_weights(
    seed: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2
) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (8, 8),
        "layers.0.attn.q_proj.weight": (8, 8),
        "layers.0.attn.k_proj.weight": (2 * kv_heads, 8),
        "layers.0.attn.v_proj.weight": (2 * kv_heads, 8),
        "layers.0.attn.o_proj.weight": (8, 8),
        "layers.0.mlp.gate_proj.weight": (4, 8),
        "layers.0.mlp.up_proj.weight": (4, 8),
        "norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in shapes.items()}


def served(sent: dict[str, Tensor], devices: int, copies_of_kv: int = 1) -> list[dict[str, Tensor]]:
    """Lay out the weights on `devices` devices as vLLM does.

    Tensors are fused and split over the devices. Every device has the norms. Zeros pad the
    vocabulary.
    """
    out = []
    for d in range(devices):

        def rows(name: str, ways: int = devices, d: int = d) -> Tensor:
            return sent[name].chunk(ways)[d * ways // devices]

        kv = devices // copies_of_kv
        prefix = "layers.0."
        out.append(
            {
                "embed.weight": torch.cat(
                    [rows("embed.weight"), torch.zeros(2, 8, dtype=sent["embed.weight"].dtype)]
                ),
                f"{prefix}attn.qkv_proj.weight": torch.cat(
                    [
                        rows(f"{prefix}attn.q_proj.weight"),
                        *(rows(f"{prefix}attn.{x}_proj.weight", kv) for x in "kv"),
                    ]
                ),
                f"{prefix}attn.o_proj.weight": sent[f"{prefix}attn.o_proj.weight"].chunk(
                    devices, dim=1
                )[d],
                f"{prefix}mlp.gate_up_proj.weight": torch.cat(
                    [rows(f"{prefix}mlp.{x}_proj.weight") for x in ("gate", "up")]
                ),
                "norm.weight": sent["norm.weight"].clone(),
            }
        )
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_sum_of_bits_is_that_of_its_integers(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 7) * 40).to(dtype)
    integers = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[tensor.element_size()]
    raw = np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), integers)
    expected = sum(int(x) for x in raw)
    assert (int(bit_sum(tensor)) - expected) % 2**64 == 0
    # The memory layout does not matter.
    assert (int(bit_sum(tensor.t())) - expected) % 2**64 == 0


@given(
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
)
def test_fused_split_repeated_and_padded_weights_are_those_that_were_sent(
    seed: int, dtype: torch.dtype, layout: tuple[int, int]
) -> None:
    sent = sent_weights(seed, dtype)
    live = served(sent, *layout)
    assert not_live(bit_sums(sent), [bit_sums(device) for device in live], FUSED) == []


@given(st.integers(0, 99), st.sampled_from([(1, 1), (2, 1), (4, 2)]), st.data())
def test_one_bit_on_one_device_is_seen_and_named(
    seed: int, layout: tuple[int, int], data: st.DataObject
) -> None:
    sent = sent_weights(seed)
    live = served(sent, *layout)
    device = data.draw(st.sampled_from(live))
    name = data.draw(st.sampled_from(sorted(device)))
    # Without the copy, the change could also reach `sent`.
    flat = device[name] = device[name].clone(memory_format=torch.contiguous_format)
    raw = flat.view(-1).view(torch.int32)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert not_live(bit_sums(sent), [bit_sums(d) for d in live], FUSED) == [name]


def test_old_weights_under_a_new_version_are_seen() -> None:
    old, new = sent_weights(1), sent_weights(2)
    live = bit_sums(served(old, 1)[0])
    assert set(not_live(bit_sums(new), [live], FUSED)) == set(live)


def test_weights_that_an_engine_packed_away_are_seen() -> None:
    """vLLM on CPUs keeps a packed copy and leaves an empty parameter in its place."""
    sent = sent_weights(3)
    live = served(sent, 1)[0]
    live["layers.0.attn.o_proj.weight"] = torch.empty(0)
    assert not_live(bit_sums(sent), [bit_sums(live)], FUSED) == ["layers.0.attn.o_proj.weight"]


def test_tensors_under_names_of_their_own_are_proven_together_on_one_device() -> None:
    sent = {f"experts.{i}.{x}.weight": torch.randn(3, 4) for i in range(4) for x in ("w1", "w3")}
    block = torch.cat(list(sent.values()))[torch.randperm(24)]
    assert not_live(bit_sums(sent), [bit_sums({"experts.w13_weight": block})], {}) == []
    block[5, 1] += 1
    assert not_live(bit_sums(sent), [bit_sums({"experts.w13_weight": block})], {}) == [
        "experts.w13_weight"
    ]
    halves = [bit_sums({"experts.w13_weight": half}) for half in block.chunk(2)]
    assert not_live(bit_sums(sent), halves, {}) == ["experts.w13_weight"], (
        "what cannot be proven is not called live"
    )


def test_a_tensor_that_is_served_nowhere_is_named() -> None:
    sent = sent_weights(4)
    live = served(sent, 1)
    assert not_live(
        bit_sums(sent | {"lost.weight": torch.ones(2)}), [bit_sums(live[0])], FUSED
    ) == ["lost.weight"]
