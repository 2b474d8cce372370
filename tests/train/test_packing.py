"""Tests of packing.

Every trained token is predicted once, from its own row. Micro-batches keep the token limit and
spread tokens evenly over ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from millrace.errors import ConfigError
from millrace.train.layout import EXACT_LENGTHS
from millrace.train.packing import attention_length, pack, split
from millrace.train.rows import rows_of_examples, rows_of_samples
from millrace.types import Author, Prompt, Sample, Segment, Trajectory, floats_of, tokens_of
from tests.train.samples import random_samples

CPU = torch.device("cpu")
COUNTS = st.lists(st.integers(0, 6), max_size=6)


def plain_rows(samples: Any) -> Any:
    """Return (tokens, trained, log-probs, versions) of each trajectory, token by token."""
    rows = []
    for sample in samples:
        for trajectory in sample.trajectories:
            tokens, trained, log_probs = (
                list(sample.prompt.tokens),
                [False] * len(sample.prompt.tokens),
                [],
            )
            log_probs += [0.0] * len(tokens)
            versions = [-1] * len(tokens)
            for segment in trajectory.segments:
                policy = segment.author is Author.POLICY
                tokens += segment.tokens
                trained += [policy] * len(segment.tokens)
                log_probs += segment.log_probs if policy else [0.0] * len(segment.tokens)
                versions += [segment.version] * len(segment.tokens)
            rows.append((tokens, trained, log_probs, versions))
    return rows


@given(COUNTS, st.integers(0, 99))
def test_rows_hold_every_token_in_order(counts: Any, seed: int) -> None:
    samples = random_samples(seed, counts)
    rows, want = rows_of_samples(samples), plain_rows(samples)
    assert rows.first_row.tolist() == np.cumsum([0, *counts]).tolist()
    assert rows.sample.tolist() == [i for i, n in enumerate(counts) for _ in range(n)]
    assert len(rows.starts) == len(want)
    for i, (tokens, trained, log_probs, versions) in enumerate(want):
        at = slice(rows.starts[i], rows.starts[i] + rows.lengths[i])
        assert rows.tokens[at].tolist() == tokens
        assert rows.trained[at].tolist() == trained
        own = rows.order[at][rows.trained[at]]
        assert rows.rollout_log_probs[own].tolist() == [
            p for p, t in zip(log_probs, trained, strict=True) if t
        ]
        assert rows.versions[own].tolist() == [
            v for v, t in zip(versions, trained, strict=True) if t
        ]
        assert rows.trained_tokens[i] == sum(trained)
        assert rows.inputs[i] == max((p for p, t in enumerate(trained) if t), default=0)


@settings(max_examples=60)
@given(
    COUNTS,
    st.integers(0, 99),
    st.sampled_from([21, 40, 1000]),
    st.integers(1, 4),
    st.sampled_from([5.0, 1000.0, math.inf]),
)
def test_shares_cover_each_trained_row_once_within_the_limit(
    counts: Any, seed: int, limit: Any, world_size: Any, length: float
) -> None:
    rows = rows_of_samples(random_samples(seed, counts))
    members = np.arange(len(rows.starts))
    keys = {"max_tokens": limit, "world_size": world_size, "attention_length": length}
    shares = split(rows, members, **keys)
    assert shares and all(len(ranks) == world_size for ranks in shares)
    dealt = [row for ranks in shares for share in ranks for row in share.tolist()]
    assert sorted(dealt) == np.flatnonzero(rows.trained_tokens).tolist()
    for ranks in shares:
        loads = [int(rows.inputs[share].sum()) for share in ranks]
        assert max(loads) <= limit
    again = split(rows, members, **keys)
    assert [[s.tolist() for s in ranks] for ranks in again] == [
        [s.tolist() for s in ranks] for ranks in shares
    ]


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    rows = rows_of_samples(random_samples(3, [8] * 32, longest=60))
    for world_size in (1, 2, 3, 8):
        for ranks in split(rows, np.arange(256), max_tokens=1000, world_size=world_size):
            loads = [int(rows.inputs[share].sum()) for share in ranks]
            assert max(loads) - min(loads) <= 70  # about one row


@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_of_a_micro_batch_get_rows_that_cost_about_the_same(world_size: int) -> None:
    """A step takes as long as the slowest rank of each micro-batch."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 512).astype(int).clip(20, 2000)
    one = tokens_of([1])
    rows = rows_of_examples([(one, tokens_of([2] * n)) for n in lengths])
    costs = rows.inputs + rows.inputs**2 / 1000

    def waiting(length: float) -> float:
        keys: Any = {"max_tokens": 4000, "world_size": world_size, "attention_length": length}
        loads = [[costs[s].sum() for s in ranks] for ranks in split(rows, np.arange(512), **keys)]
        return float(1 - costs.sum() / world_size / np.max(loads, 1).sum())

    assert waiting(1000.0) < 0.4 * waiting(math.inf) and waiting(1000.0) < 0.1


@pytest.mark.parametrize(
    "kind",
    [
        Qwen2Config(hidden_size=64, intermediate_size=160),
        LlamaConfig(hidden_size=32, intermediate_size=80, head_dim=24),
        Qwen3MoeConfig(
            hidden_size=64,
            head_dim=32,
            moe_intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=3,
        ),
    ],
    ids=lambda kind: str(kind.model_type),
)
def test_at_the_length_of_attention_its_products_cost_as_much_as_the_matrices(kind: Any) -> None:
    kind.update(
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"vocab_size": 50, "max_position_embeddings": 512}
    )
    model: Any = AutoModelForCausalLM.from_config(kind, attn_implementation="eager")
    model.set_experts_implementation("eager")

    def flops(n: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, n, dtype=torch.long), use_cache=False)
        return int(counter.get_total_flops())

    # a n + b n^2, without causality: half of the products are masked.
    one, two = flops(100), flops(200)
    square = (two - 2 * one) / 20_000
    matrices = (one - 10_000 * square) / 100
    assert attention_length(kind) == pytest.approx(matrices / (square / 2), rel=0.03)


def test_a_row_over_the_limit_is_refused() -> None:
    rows = rows_of_samples(random_samples(0, [4]))
    with pytest.raises(ConfigError, match="ppo_max_token_len_per_gpu = 2"):
        split(rows, np.arange(4), max_tokens=2, world_size=1)


@settings(max_examples=60)
@given(COUNTS, st.integers(0, 99), st.sampled_from([9, 60]), st.booleans())
def test_micro_batches_give_back_the_rows_and_their_trained_tokens(
    counts: Any, seed: int, longest: Any, padded: Any
) -> None:
    samples = random_samples(seed, counts, longest)
    rows, plain = rows_of_samples(samples), plain_rows(samples)
    ((share,),) = split(rows, np.arange(len(rows.starts)), max_tokens=10**6, world_size=1)
    micro = pack(rows, share, CPU, padded=padded)
    if not len(share):
        assert micro.input_ids.tolist() == [0] and len(micro.targets) == 0
        return
    layout = micro.layout
    cells = np.arange(len(micro.input_ids)) if layout.unpack is None else layout.unpack.numpy()
    repack = np.arange(len(micro.input_ids)) if layout.repack is None else layout.repack.numpy()
    assert cells[repack].tolist() == list(range(len(micro.input_ids)))
    shapes = layout.buckets if padded else [(1, n) for n in layout.lengths]
    assert sum(n * length for n, length in shapes) == len(cells)
    start, seen = 0, 0
    for n, length in shapes:
        for _ in range(n):
            row = int(share[seen])
            real = int(rows.inputs[row])
            tokens = cells[start : start + length]
            assert micro.input_ids[tokens[:real]].tolist() == plain[row][0][:real]
            assert micro.position_ids[tokens[:real]].tolist() == list(range(real))
            assert set(tokens[real:]) <= {tokens[real - 1]}
            start, seen = start + length, seen + 1
    at = np.flatnonzero(rows.trained)[micro.source.numpy()]
    assert micro.targets.tolist() == rows.tokens[at].tolist()
    assert sorted(micro.source.tolist()) == list(range(len(rows.versions)))
    # Each trained token is predicted from the token before it, at the position before it.
    before = at - 1
    assert micro.input_ids[micro.select].tolist() == rows.tokens[before].tolist()
    assert (
        micro.position_ids[micro.select].tolist()
        == (before - rows.starts[share[micro.sequence.numpy()]]).tolist()
    )
    assert micro.num_sequences == len(share) and (np.diff(micro.sequence.numpy()) >= 0).all()


def test_a_shared_prompt_is_read_once_and_padding_is_small() -> None:
    prompt = Prompt(0, tokens_of([1, 2, 3]), "", "test")

    def trajectory(n: Any) -> Trajectory:
        return Trajectory.of((Segment(tokens_of([5] * n), log_probs=floats_of([-1.0] * n)),))

    lengths = [2, 4, 4]
    rows = rows_of_samples([Sample(prompt, tuple(trajectory(n) for n in lengths))])
    ((share,),) = split(rows, np.arange(3), max_tokens=100, world_size=1)
    micro = pack(rows, share, CPU, padded=True)
    assert len(micro.input_ids) == 3 + 1 + 3 + 3
    assert micro.layout.num_cells == 3 * 3 + 1 + 3 + 3
    assert micro.layout.num_padded_cells == micro.layout.num_cells  # few lengths: no padding
    many = rows_of_samples(
        [Sample(prompt, tuple(trajectory(n) for n in range(20, 21 + 2 * EXACT_LENGTHS)))]
    )
    ((share,),) = split(many, np.arange(1 + 2 * EXACT_LENGTHS), max_tokens=10**4, world_size=1)
    layout = pack(many, share, CPU, padded=True).layout
    assert 0 < layout.num_padded_cells / layout.num_cells - 1 < 0.1
    assert len(layout.buckets) < 2 * EXACT_LENGTHS


def test_demonstrations_train_the_response_alone() -> None:
    rows = rows_of_examples(
        [(tokens_of([1, 2]), tokens_of([3, 4])), (tokens_of([5]), tokens_of([6]))]
    )
    assert rows.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert rows.trained.tolist() == [False, False, True, True, False, True]
    assert rows.inputs.tolist() == [3, 1]
    talk = [tokens_of(part) for part in ([1], [2, 3], [4], [5], [6])]
    rows = rows_of_examples([tuple(talk), (tokens_of([7]), tokens_of([8])), tuple(talk[:4])])
    assert rows.lengths.tolist() == [6, 2, 5]
    trained = [[False, True, True, False, True, False], [False, True], [False, True, True]]
    assert rows.trained.tolist() == [*trained[0], *trained[1], *trained[2], False, True]
    assert rows.inputs.tolist() == [4, 1, 4] and rows.trained_tokens.tolist() == [3, 1, 3]
    with pytest.raises(ValueError, match="prompt has no tokens"):
        rows_of_examples([(tokens_of(), tokens_of([1]))])
    with pytest.raises(ValueError, match="prompt of sample 7"):
        rows_of_samples([Sample(Prompt(7, tokens_of(), "", "test"), (Trajectory(),))])
