"""`millrace bench train`: optimizer steps on full micro-batches, relative to the matmul rate."""

from __future__ import annotations

import random
import statistics
from time import perf_counter
from typing import Any

from millrace.extras.bench.flops import shape_of, train_flops
from millrace.run.memory import estimate, size_of
from millrace.run.session import Session
from millrace.types import Tokens, tokens_of

WARM_UP_STEPS = 3
"""Steps that are not timed: kernels compile, and the optimizer state is allocated."""


async def bench_train(s: Session, *, length: int, steps: int) -> dict[str, Any]:
    """Time `steps` supervised steps.

    Each step has one micro-batch on every rank, or one for each pipeline stage: as many documents
    of `length` random tokens as fit in actor.ppo_max_token_len_per_gpu. The time includes forward,
    backward, gradient norm and optimizer step. The estimate of memory is that of a dry run.
    """
    config = s.config
    micros, ranks = config.trainer.megatron.pipeline_model_parallel_size, config.trainer.ranks
    rows = config.max_tokens // length * config.data_ranks * micros
    shape, engine = shape_of(s.run.model), s.engines.train
    await engine.begin("sft", steps + WARM_UP_STEPS)
    rate = min(await engine.matmul_rates())
    draw, seconds = random.Random(config.trainer.seed), list[float]()
    for k in range(steps + WARM_UP_STEPS):
        documents = [_document(draw, length, shape["vocab_size"]) for _ in range(rows)]
        start = perf_counter()
        await engine.sft_step(documents)
        seconds.append(perf_counter() - start)
        s.progress.phase("training", k + 1, steps + WARM_UP_STEPS, f"{seconds[-1]:.2f} s")
    memory = max(await engine.peak_memory())
    flops = train_flops(s.run.model, [length - 1] * rows, config.model)
    size = size_of(config.model.model_copy(update={"path": str(s.run.model)}))
    assert size is not None
    parts = estimate(config, size, micro_batches=micros)["trainer"]
    middle = statistics.median(seconds[WARM_UP_STEPS:])
    return {
        "ranks": ranks,
        "tokens_per_step": rows * (length - 1),
        "step_s": middle,
        "steps_s": seconds,
        "tokens_per_s_per_device": rows * (length - 1) / middle / ranks,
        "model_tflops_per_device": flops / middle / ranks / 1e12,
        "matmul_tflops": rate / 1e12,
        "mfu": flops / middle / ranks / rate,
        "peak_memory_gib": memory / 2**30,
        "estimated_memory_gib": sum(parts.values()) / 2**30,
        "complete": True,
    }


def _document(draw: random.Random, length: int, vocabulary: int) -> tuple[Tokens, ...]:
    """Return a prompt of one token and the tokens to predict. The last token is not an input."""
    tokens = [draw.randrange(vocabulary) for _ in range(length)]
    return tokens_of(tokens[:1]), tokens_of(tokens[1:])
