"""Small mixtures of experts, samples with experts, and the forced routing of transformers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, Qwen3MoeConfig

from millrace.types import Author, Sample, Thread, Trajectory
from tests.random_models import sharp
from tests.train.samples import VOCAB

LAYERS, EXPERTS, K = 2, 4, 2
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": sharp(32),
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


WRITTEN = ("qwen3_moe", "mixtral")


def write_mixtures(folder: str) -> None:
    """Write the folders qwen3_moe and mixtral, without weights."""
    qwen = Qwen3MoeConfig(
        **WIDTHS | {"head_dim": 8},
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )
    qwen.save_pretrained(f"{folder}/qwen3_moe")
    MixtralConfig(
        **WIDTHS, num_local_experts=EXPERTS, architectures=["MixtralForCausalLM"]
    ).save_pretrained(f"{folder}/mixtral")


def routing(sample: Sample, j: int, length: int) -> list[list[int]]:
    """Return random experts of `length` tokens. Siblings have those of the prompt in common."""
    rows = []
    for at in range(length):
        own = 0 if at < len(sample.prompt.tokens) else 1 + j
        rng = random.Random(f"{sample.prompt.index} {own} {at}")
        rows.append([e for _ in range(LAYERS) for e in rng.sample(range(EXPERTS), K)])
    return rows


def routed(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the samples with the experts that a rollout engine returns."""
    return tuple(
        replace(s, trajectories=tuple(_routed(s, j, t) for j, t in enumerate(s.trajectories)))
        for s in samples
    )


def _routed(sample: Sample, j: int, trajectory: Trajectory) -> Trajectory:
    if not trajectory.threads:
        return trajectory
    (thread,) = trajectory.threads
    rows = routing(sample, j, 100)
    segments, known, end = [], 0, len(sample.prompt.tokens)
    for segment in thread.segments:
        end += len(segment.tokens)
        if segment.author is Author.POLICY:
            own = array("B", [e for row in rows[known : end - 1] for e in row])
            segment, known = replace(segment, experts=own), end - 1
        segments.append(segment)
    return replace(trajectory, threads=(Thread(tuple(segments)),))


def forced(model: Any) -> Callable[[list[list[int]] | None], None]:
    """Return a function that forces the experts of the next passes: [tokens, layers x k].

    A hook replaces what each router returns, so this shares no code with the engine. Passes that
    are not forced leave their own experts in `model.seen`, by layer.
    """
    state: dict[str, Any] = {"rows": None}
    model.seen = [[] for _ in range(LAYERS)]

    def hook(layer: int) -> Callable[..., Any]:
        def force(router: nn.Module, inputs: Any, output: Any) -> Any:
            logits, gates, own = output
            if state["rows"] is None:
                model.seen[layer] = own.tolist()
                return None
            experts = state["rows"][: len(own), layer * K : (layer + 1) * K]
            probs = logits.float().softmax(-1)[torch.arange(len(own))[:, None], experts]
            return logits, (probs / probs.sum(-1, keepdim=True)).to(gates.dtype), experts

        return force

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(hook(layer))

    def set_rows(rows: list[list[int]] | None) -> None:
        state["rows"] = None if rows is None else torch.tensor(rows)

    return set_rows
