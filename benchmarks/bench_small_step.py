"""An optimizer step of many short rows: seconds, and GPU kernels, with and without `model.compile`.

    python benchmarks/bench_small_step.py FOLDER [--device cuda] [--steps 14] [--turns 2] [--json OUT]

FOLDER has a model, or its shape alone (config.json). A step trains 256 answers, mean 12 tokens, to
32 prompts of 45 tokens in bf16. Eager and compiled engines take turns, because a host's speed
changes. `start_s` is the time to build the engine, in which layers are compiled, and `first_s` that
of the first step. Kernels and GPU seconds are of one more step, under torch's profiler.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from millrace.config import Config
from millrace.ports import TrainBatch
from millrace.train.fsdp import engine as fsdp
from millrace.types import (
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)

WARM_UP = 4
"""Steps that do not count."""


def batch(seed: int, vocabulary: int) -> TrainBatch:
    rng = random.Random(seed)

    def drawn(count: int) -> Tokens:
        return tokens_of(rng.randrange(vocabulary) for _ in range(count))

    def answer() -> Trajectory:
        tokens = drawn(max(2, min(96, int(rng.lognormvariate(2.4, 0.6)))))
        log_probs = floats_of(-rng.uniform(1, 3) for _ in tokens)
        segment = Segment(tokens, version=0, log_probs=log_probs, stop=Stop.EOS)
        return Trajectory.of((segment,), Score(float(rng.random() < 0.4)))

    prompts = [Prompt(i, drawn(rng.randint(40, 50)), "", "test") for i in range(32)]
    return TrainBatch(tuple(Sample(p, tuple(answer() for _ in range(8))) for p in prompts), seed)


def build(folder: str, device: str, *, compiled: bool) -> fsdp.FsdpTrainEngine:
    tree = {
        "model": {"path": folder, "dtype": "bfloat16", "compile": compiled},
        "rollout": {"n": 8, "max_prompt_length": 128, "max_response_length": 96},
        "actor": {"ppo_mini_batch_size": 32, "ppo_max_token_len_per_gpu": 32768},
        "trainer": {"device": device, "offload": False},
    }
    engine = fsdp.build(Config.model_validate(tree), folder, rank=0, world_size=1)
    asyncio.run(engine.begin("rl", 1000))
    return engine


def measure(folder: str, device: str, steps: int, *, compiled: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    engine = build(folder, device, compiled=compiled)
    start, seconds = time.perf_counter() - begin, list[float]()
    vocabulary = json.loads(Path(folder, "config.json").read_text())["vocab_size"]

    def step(seed: int) -> None:
        data, begin = batch(seed, vocabulary), time.perf_counter()
        asyncio.run(engine.step(data))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)

    for seed in range(WARM_UP + steps):
        step(seed)
    timed = list(seconds)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(steps)
    kernels = [e for e in seen.key_averages() if e.device_type.name == "CUDA"]
    asyncio.run(engine.close())
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    return {
        "compiled": compiled,
        "start_s": round(start, 2),
        "first_s": round(timed[0], 3),
        "median_s": round(statistics.median(timed[WARM_UP:]), 4),
        "least_s": round(min(timed[WARM_UP:]), 4),
        "kernels": sum(e.count for e in kernels),
        "gpu_s": round(sum(e.self_device_time_total for e in kernels) / 1e6, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for turn in range(2 * options.turns):
        row = measure(options.folder, options.device, options.steps, compiled=turn % 2 == 1)
        print(json.dumps(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
