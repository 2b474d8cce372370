"""Numbers of 8 bits against the definition of float8_e4m3fn, number by number, and their bit sums."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.sync.eight_bit import (
    LARGEST,
    SCALE,
    in_eight_bits,
    quantise,
    quantised_names,
    rounded,
    sums_of,
)
from millrace.sync.proof import bit_sums, not_live

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
CPU = torch.device("cpu")


def grid() -> np.ndarray:
    """Return all finite numbers of e4m3: 4 bits of exponent with a bias of 7, 3 of mantissa."""
    found = []
    for bits in range(127):  # 127 is NaN
        exponent, mantissa = bits >> 3, bits & 7
        found.append(
            mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
    return np.array(found, np.float64)


def nearest(values: np.ndarray) -> np.ndarray:
    """Round to the nearest number of the grid. A tie goes to the one with an even mantissa."""
    numbers = grid()
    above = np.clip(np.searchsorted(numbers, np.abs(values)), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    left, right = np.abs(values) - low, high - np.abs(values)
    up = (right < left) | ((right == left) & (above % 2 == 0))
    return np.sign(values) * np.where(up, high, low)


def weights(rows: int = 64, columns: int = 48) -> torch.Tensor:
    dice = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 2, rows)[:, None]
    return (torch.randn(rows, columns, generator=dice) * sizes).bfloat16()


def test_numbers_are_the_nearest_of_the_format() -> None:
    exact = weights().float().numpy()
    numbers, scale = quantise(weights())
    want = (np.abs(exact).max(1, keepdims=True) / np.float32(448)).astype(np.float32)
    assert np.array_equal(scale.numpy(), want)
    assert np.array_equal(numbers.double().numpy(), nearest((exact / want).astype(np.float64)))
    assert float(numbers.double().abs().max()) == LARGEST == grid().max()
    assert np.array_equal(rounded(weights().float()).numpy(), numbers.float().numpy() * want)


def test_zeros_and_extreme_numbers_stay_finite() -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-38, -3e-39], [3e38, 1.0], [1e-45, 0.0]])
    numbers, scale = quantise(rows)
    assert numbers.float().isfinite().all() and scale.isfinite().all()
    assert not numbers[0].float().any()
    assert (numbers[2].float() * scale[2])[0] == rows[2, 0]


def test_the_weights_in_8_bits_are_those_whose_live_tensors_have_scales() -> None:
    live = ["a.qkv_proj.weight", "a.qkv_proj.weight_scale", "b.weight", "norm.weight"]
    assert not quantised_names(["a.qkv_proj.weight"], FUSED)
    names = quantised_names(live, FUSED)
    assert names == {f"a.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "qkv_proj")}


def test_sums_prove_fused_and_transposed_weights() -> None:
    parts = {f"a.{n}.weight": weights(rows) for n, rows in zip("qkv", (32, 16, 16), strict=True)}
    sent = {n.replace(".weight", "_proj.weight"): t for n, t in parts.items()}
    sent["norm.weight"] = weights(1, 48)[0]
    names = quantised_names(["a.qkv_proj.weight_scale"], FUSED)
    staged = in_eight_bits(sent, names, CPU)
    assert list(staged) == [
        *(f"a.{n}_proj.weight{end}" for n in "qkv" for end in ("", SCALE)), "norm.weight"
    ]  # fmt: skip

    def live(change: float = 1.0) -> dict[str, int]:
        fused = {
            end: torch.cat([staged[f"a.{n}_proj.weight{end}"] for n in "qkv"])
            for end in ("", SCALE)
        }
        fused[SCALE][40] *= change
        return bit_sums(
            {
                "a.qkv_proj.weight": fused[""].T,
                "a.qkv_proj.weight_scale": fused[SCALE],
                "norm.weight": staged["norm.weight"],
            }
        )

    assert not not_live(bit_sums(staged), [live()], FUSED)
    assert not_live(bit_sums(staged), [live(2.0)], FUSED) == ["a.qkv_proj.weight_scale"]
    assert not_live(bit_sums(sent), [live()], FUSED)


def test_sums_of_pairs_see_scales_that_change_places() -> None:
    """As a loader may stack parts of a fused weight. Devices may have rows or columns of it."""
    parts = {f"a.{n}_proj.weight": weights(16)[:, k : k + 16] for k, n in enumerate("qkv")}
    staged = in_eight_bits(parts, parts, CPU)
    sent = sums_of(staged)
    whole = {end: torch.cat([staged[name + end] for name in parts]) for end in ("", SCALE)}

    def wrong(*devices: tuple[Tensor, Tensor]) -> list[str]:
        name = "a.qkv_proj.weight"
        live = [sums_of({name: w.contiguous().T, name + SCALE: s}) for w, s in devices]
        return not_live(sent, live, FUSED)

    numbers, scale = whole[""], whole[SCALE]
    assert not wrong((numbers, scale))
    rows, columns = slice(0, 24), slice(24, 48)
    assert not wrong((numbers[rows], scale[rows]), (numbers[columns], scale[columns]))
    assert not wrong((numbers[:, :8], scale), (numbers[:, 8:], scale))
    for order in (scale.roll(16, 0), scale[[1, 0, *range(2, 48)]]):
        assert wrong((numbers, order)) == ["a.qkv_proj.weight_pairs"]


def test_a_later_version_takes_the_memory_of_the_first() -> None:
    """A replica repeats the copies of its first load, from the same addresses."""
    first = in_eight_bits({"a.weight": weights()}, {"a.weight"}, CPU)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    later = in_eight_bits({"a.weight": 3 * weights()}, {"a.weight"}, CPU, first)
    assert {name: tensor.data_ptr() for name, tensor in later.items()} == places
    numbers, scale = quantise(3 * weights())
    assert torch.equal(later["a.weight"].float(), numbers.float())
    assert torch.equal(later["a.weight_scale"], scale)
