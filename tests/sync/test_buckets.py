"""Tests of buckets and checksums: no gap, no overlap, and every change of a tensor is detected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.sync import buckets
from millrace.sync.buckets import ALIGN, Spec, checksum, checksums, plan, specs_of
from millrace.sync.proof import bit_sums

DTYPES = ["float32", "bfloat16", "float16", "float64", "int8", "int64"]
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12).map(
    lambda kinds: [Spec(f"layer.{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
)


def values(spec: Spec, seed: int) -> Tensor:
    noise = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)) * 50
    return noise.to(getattr(torch, spec.dtype))


@given(models, st.integers(1, 400))
def test_a_plan_covers_every_tensor_once_in_order(specs: list[Spec], limit: int) -> None:
    assert [s for bucket in plan(specs, limit) for s in bucket.specs] == specs


@given(models, st.integers(1, 400))
def test_tensors_of_a_bucket_are_aligned_and_do_not_overlap(specs: list[Spec], limit: int) -> None:
    for bucket in plan(specs, limit):
        ends = [o + s.num_bytes for o, s in zip(bucket.offsets, bucket.specs, strict=True)]
        assert all(o % ALIGN == 0 for o in bucket.offsets) and bucket.num_bytes % ALIGN == 0
        assert all(
            end <= start
            for end, start in zip(ends, [*bucket.offsets[1:], bucket.num_bytes], strict=True)
        )


@given(models, st.integers(1, 400))
def test_a_bucket_is_over_its_limit_only_with_a_tensor_that_needs_one_of_its_own(
    specs: list[Spec], limit: int
) -> None:
    for bucket in plan(specs, limit):
        assert len(bucket.specs) == 1 or bucket.offsets[-1] + bucket.specs[-1].num_bytes <= limit


@settings(deadline=None)
@given(models, st.integers(1, 400))
def test_what_is_written_through_the_views_is_read_from_the_bytes(
    specs: list[Spec], limit: int
) -> None:
    for bucket in plan(specs, limit):
        sent = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for i, view in enumerate(bucket.views(sent).values()):
            view.copy_(values(bucket.specs[i], i))
        arrived = bucket.views(sent.clone())
        for i, spec in enumerate(bucket.specs):
            found = arrived[spec.name]
            assert tuple(found.shape) == spec.shape and str(found.dtype) == f"torch.{spec.dtype}"
            assert torch.equal(found, values(spec, i))


@settings(deadline=None)
@given(models, st.integers(1, 20_000))
def test_sums_of_a_bucket_are_those_of_its_tensors(specs: list[Spec], limit: int) -> None:
    for bucket in plan(specs, limit):
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        views = bucket.views(buffer)
        for i, view in enumerate(views.values()):
            view.copy_(values(bucket.specs[i], i))
        sums = bucket.sums(buffer, bits=True)
        assert torch.equal(bucket.sums(buffer), sums[:, :2])
        assert torch.equal(sums[:, :2], torch.stack([checksum(v) for v in views.values()]))
        assert sums[:, 2].tolist() == list(bit_sums(views).values())


@settings(deadline=None)
@given(models, st.integers(1, 20_000))
def test_sums_of_packed_tensors_are_those_of_each(specs: list[Spec], limit: int) -> None:
    """Columns of a matrix are not contiguous, and have the sums of their own values."""
    tensors = {s.name: values(s, i) for i, s in enumerate(specs)}
    tensors["columns"] = torch.arange(60.0).view(6, 10)[:, ::3]
    names = [*reversed(tensors)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_PACKED", limit)
        found = checksums(tensors, names)
    assert torch.equal(found, torch.stack([checksum(tensors[name]) for name in names]))


@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 5000])
def test_a_checksum_is_the_sum_of_words_and_of_words_by_position(length: int) -> None:
    words = torch.randint(
        -(2**31),
        2**31,
        (length,),
        dtype=torch.int64,
        generator=torch.Generator().manual_seed(length),
    )
    expected = [sum(words.tolist()), sum(w * (i + 1) for i, w in enumerate(words.tolist()))]
    found = checksum(words.to(torch.int32)).tolist()
    assert [(a - b) % 2**64 for a, b in zip(found, expected, strict=True)] == [0, 0]


def test_specs_are_those_of_the_live_tensors() -> None:
    live = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros(())}
    assert specs_of(live) == [Spec("b", (2, 3), "bfloat16"), Spec("a", (), "float32")]
    assert [s.num_bytes for s in specs_of(live)] == [12, 4]


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from(["float32", "bfloat16", "int8"]), st.data())
def test_any_flipped_bit_changes_the_checksum(length: int, dtype: str, data: st.DataObject) -> None:
    """This includes the last word, which an odd number of 16-bit values fills only half."""
    tensor = values(Spec("", (length,), dtype), length)
    flipped = tensor.clone()
    raw = flipped.view(torch.uint8)
    bit = data.draw(st.integers(0, raw.numel() * 8 - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    assert not torch.equal(checksum(tensor), checksum(flipped))


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=30), st.data())
def test_any_two_words_swapped_change_the_checksum(words: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, len(words) - 1))
    tensor = torch.tensor(words, dtype=torch.int32)
    swapped = tensor.clone()
    swapped[[i, j]] = swapped[[j, i]]
    assert torch.equal(checksum(tensor), checksum(swapped)) == (words[i] == words[j])


@pytest.mark.parametrize("distance", [1_048_573, 1 << 20, 1 << 22, (1 << 22) + 5])
def test_words_swapped_far_apart_change_the_checksum(distance: int) -> None:
    """The checksum's position weights have no period within a tensor, and they differ by chunk."""
    tensor = torch.zeros(distance + 1, dtype=torch.int32)
    tensor[0] = 7
    swapped = torch.zeros_like(tensor)
    swapped[distance] = 7
    assert not torch.equal(checksum(tensor), checksum(swapped))


def test_changes_that_make_up_for_each_other_in_one_sum_are_seen_in_the_other() -> None:
    tensor = torch.tensor([10, 10, 10], dtype=torch.int32)
    for change in ([2, -1, 0], [1, -1, 0]):  # equal sum by position; equal plain sum
        assert not torch.equal(
            checksum(tensor), checksum(tensor + torch.tensor(change, dtype=torch.int32))
        )


def test_shifted_and_reordered_rows_change_the_checksum() -> None:
    matrix = torch.randn(6, 5)
    assert not torch.equal(checksum(matrix), checksum(matrix.roll(1)))
    assert not torch.equal(checksum(matrix), checksum(matrix.flip(0)))
    assert torch.equal(checksum(matrix), checksum(matrix.clone()))


def test_a_checksum_is_that_of_the_values_not_of_their_layout() -> None:
    matrix = torch.randn(4, 6)
    assert torch.equal(checksum(matrix.t().contiguous().t()), checksum(matrix))
    assert torch.equal(checksum(torch.zeros(0)), torch.zeros(2, dtype=torch.int64))
