"""Tiny real models and reference log-probs for the tests of the torch rollout engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from millrace.config import ModelShape
from millrace.decode.engine import TorchRolloutEngine
from millrace.models.model import load_model
from millrace.types import SamplingParams, Segment, tokens_of
from tests.random_models import sharp, write_random

VOCABULARY = 24
EOS = 1
SHAPE = ModelShape(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)


WIDE = ModelShape()
"""A shape so wide that matrix products of different batch shapes give different bits.

Deterministic mode must remove this difference.
"""


@cache
def folder(shape: ModelShape = SHAPE) -> Path:
    path = Path(mkdtemp())
    write_random(path, shape, vocab_size=VOCABULARY, eos_token_id=EOS, max_position_embeddings=256)
    return path


def qwen(seed: int = 0, dtype: str = "float32", shape: ModelShape = SHAPE) -> PreTrainedModel:
    return load_model(folder(shape), seed=seed, dtype=dtype)  # type: ignore[arg-type]


def llama() -> PreTrainedModel:
    """Build a model of another architecture.

    It has no biases and three query heads for each KV head. Its head size does not follow from
    hidden_size.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, max_position_embeddings=256, initializer_range=sharp(48),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def engine(model: PreTrainedModel | None = None, **changes: Any) -> TorchRolloutEngine:
    settings = {"eos_ids": (EOS,), "slots": 8, "max_len": 96}
    return TorchRolloutEngine(model or qwen(), **{**settings, **changes})


def prompt(seed: int, length: int | None = None) -> Any:
    """Return random token ids without EOS: `length` of them, or 1 to 20."""
    draw = random.Random(seed)
    return tokens_of(draw.randrange(2, VOCABULARY) for _ in range(length or draw.randrange(1, 21)))


def long(max_tokens: int = 60, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


@torch.inference_mode()
def full_log_probs(
    model: PreTrainedModel,
    context: Sequence[int],
    response: Sequence[int],
    temperature: float = 1.0,
) -> Any:
    """Return float32 [response]: log p of the response tokens, in one full forward pass."""
    ids = torch.tensor([[*context, *response]])
    log_probs = torch.log_softmax(
        model(ids, use_cache=False).logits[0].float() / temperature, dim=-1
    )
    return log_probs[len(context) - 1 : -1].gather(1, ids[0, len(context) :, None])[:, 0]


def error(
    model: PreTrainedModel, context: Sequence[int], segment: Segment, temperature: float = 1.0
) -> float:
    """Return the largest difference of a segment's log-probs from a full forward pass."""
    return (
        (
            full_log_probs(model, context, segment.tokens, temperature)
            - torch.tensor(segment.log_probs)
        )
        .abs()
        .max()
        .item()
    )


async def turns(n: int) -> None:
    """Give the decode loop `n` steps."""
    for _ in range(n):
        await asyncio.sleep(0)
