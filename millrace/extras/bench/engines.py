"""`millrace bench train` and `sync`: optimizer steps with their FLOPs, and weight syncs."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from millrace.config import ModelConfig
from millrace.errors import DeadlineError, bad_value
from millrace.run.memory import estimate, size_of
from millrace.run.session import Session
from millrace.types import SamplingParams, Tokens, tokens_of

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


_READ = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vocab_size",
)


def train_flops(model_folder: Path, lengths: list[int], model: ModelConfig) -> float:
    """Return the FLOPs of training on rows of `lengths` tokens, forward and backward.

    Multiplications and additions both count.

    | part | FLOPs |
    |---|---|
    | each weight that a token uses | 6 |
    | each of the n x n / 2 causal pairs of n tokens | 12 x layers x heads x head size |
    | with model.lora_rank: each weight of an adapter | 6 |
    | with model.lora_rank: each weight of the model, which has no gradient | 4 |

    The formula is for dense models with gated MLPs (Qwen2, Qwen3, Llama, Mistral). These are model
    FLOPs: recomputation (checkpointing, old log-probs) does not count, and a shared prompt counts
    for each of its responses.
    """
    shape = shape_of(model_folder)
    hidden, layers, heads = (
        shape["hidden_size"],
        shape["num_hidden_layers"],
        shape["num_attention_heads"],
    )
    head = shape.get("head_dim") or hidden // heads
    keys = shape.get("num_key_value_heads") or heads
    layer = hidden * head * (2 * heads + 2 * keys) + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + hidden * shape["vocab_size"]
    per_token = 6.0 * weights
    if model.lora_rank:
        from millrace.train.fsdp.lora import num_trained

        per_token = 4.0 * weights + 6.0 * num_trained(model_folder, model)
    return sum(per_token * n + 6.0 * layers * heads * head * n * n for n in lengths)


def shape_of(model_folder: Path) -> dict[str, Any]:
    """Return config.json. Raises ConfigError if the formula of `train_flops` does not fit."""
    shape: dict[str, Any] = json.loads((model_folder / "config.json").read_text())
    if missing := [key for key in _READ if not shape.get(key)]:
        raise bad_value(
            "model.path",
            shape.get("model_type"),
            f"the model FLOPs are those of dense models with gated MLPs, and its config.json has "
            f"no {', '.join(missing)}",
            "a model such as Qwen2, Qwen3, Llama or Mistral",
        )
    return shape


@dataclass(frozen=True, slots=True)
class SyncFigures:
    """The figures of one sync."""

    load: str
    """The load of the engines: idle, or busy (every decode slot has a request)."""
    bytes: int
    transfer_s: float
    pause_s: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.transfer_s / 1e9


async def bench_sync(s: Session, repeats: int) -> dict[str, Any]:
    """Time `repeats` syncs of idle engines, `repeats` syncs of busy engines, and the bare link."""
    await s.engines.train.begin("rl", 1)
    await s.engines.publish(0)
    link = [await s.engines.sync.link() for _ in range(3)]
    ceiling = max(report.bytes / report.seconds for report in link)
    transport = await s.engines.sync.transport()
    s.progress.phase("syncing an idle engine")
    idle = [await _sync(s, 1 + k, "idle") for k in range(repeats)]
    s.progress.phase("syncing a busy engine")
    # Colocated replicas draw no tokens during a sync.
    busy = [] if s.config.schedule.colocated else await _under_load(s, 1 + repeats, repeats)
    figures: dict[str, Any] = {
        "transport": transport,
        "bytes": idle[0].bytes,
        "link_gb_per_s": ceiling / 1e9,
        "syncs": [asdict(f) for f in (*idle, *busy)],
    }
    for load, syncs in (("idle", idle), ("busy", busy)):
        if not syncs:
            continue
        figures[load] = {
            "transfer_s": statistics.median(f.transfer_s for f in syncs),
            "pause_s": statistics.median(f.pause_s for f in syncs),
            "gb_per_s": statistics.median(f.gb_per_s for f in syncs),
            "share_of_link": statistics.median(f.gb_per_s for f in syncs) * 1e9 / ceiling,
        }
    return figures | {"complete": True}


async def _sync(s: Session, version: int, load: str) -> SyncFigures:
    report, pause_s = await s.engines.publish(version)
    return SyncFigures(load, report.bytes, report.seconds, pause_s)


async def _under_load(s: Session, first: int, repeats: int) -> list[SyncFigures]:
    """Time syncs while every slot of every replica decodes responses of full length."""
    rollout = s.config.rollout
    syncs: list[SyncFigures] = []
    params = SamplingParams(rollout.max_response_length, rollout.temperature, ignore_eos=True)

    async def draw_for_ever(slot: int) -> None:
        prompt = s.problems.train[slot % len(s.problems.train)]
        while True:
            await s.engines.pool.generate(prompt.tokens, params, f"bench-{slot}")

    tasks = [
        asyncio.create_task(draw_for_ever(k)) for k in range((await s.engines.pool.stats()).slots)
    ]
    try:
        for k in range(repeats):
            await _one_more_each(s, tasks)
            syncs.append(await _sync(s, first + k, "busy"))
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    return syncs


async def _one_more_each(s: Session, drawers: Sequence[asyncio.Task[None]]) -> None:
    """Wait until the engines have drawn one more token for each of `drawers`, on average.

    Raises the error of a failed drawer, and DeadlineError after trainer.wait_deadline_s.
    """
    goal = (await s.engines.pool.stats()).tokens + len(drawers)
    clock, limit_s = asyncio.get_running_loop().time, s.config.trainer.wait_deadline_s
    end = clock() + limit_s
    while (await s.engines.pool.stats()).tokens < goal:
        for task in drawers:
            if task.done():
                task.result()
        if clock() > end:
            raise DeadlineError(
                f"the rollout engines drew fewer than {len(drawers)} tokens in "
                f"trainer.wait_deadline_s = {limit_s:g} s"
            )
        await asyncio.sleep(0.01)
