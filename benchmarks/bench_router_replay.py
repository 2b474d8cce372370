"""Router replay: the gap of log-probs with and without it, and what the experts cost rollouts.

    python benchmarks/bench_router_replay.py [--model tiny] [--dtype bfloat16] [--requests 64]
        [--prompt 32] [--tokens 64] [--repeats 5] [--eager] [--json out.json]

| part | content |
|---|---|
| gap | mean abs(vLLM's - trainer's log-prob) of the same tokens, with their experts and without |
| cost | tokens/s, and processor seconds of all processes, with R3 and without, in turns |

Both parts use one device. A model of a shape is drawn and saved, so both sides load one folder.
Each arm of the cost has a trainer and a vLLM replica of its own, in workers, as in a run. The gap
is the same for every token but for the experts, because both passes read the same samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_vllm
import psutil

from millrace.config import Config, recipe
from millrace.run.engines import build_engines, open_runtime
from millrace.run.folder import RunDir
from millrace.types import Prompt, Sample, SamplingParams, Segment, Thread, Trajectory, tokens_of

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
    },
    "0.7b": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
    "1.3b": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
    },
}


def write_model(options: argparse.Namespace, folder: Path) -> None:
    from transformers import Qwen3MoeConfig

    from millrace.models.model import load_model

    shape = SHAPES[options.model]
    Qwen3MoeConfig(
        **shape,
        intermediate_size=shape["moe_intermediate_size"],
        initializer_range=0.5 / shape["hidden_size"] ** 0.5,
        norm_topk_prob=True,
        eos_token_id=0,
        max_position_embeddings=32768,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)
    load_model(folder, seed=1, dtype="float32").save_pretrained(folder)


def configuration(options: argparse.Namespace, folder: Path, mode: str) -> Config:
    tree = {
        "mode": "colocate_sync",
        "trainer": {"offload": False},
        "model": {"path": str(folder / "model"), "dtype": options.dtype, "router_replay": mode},
        "rollout": {
            "engine": "vllm",
            "max_num_seqs": options.slots,
            "max_prompt_length": options.prompt,
            "max_response_length": options.tokens,
            "gpu_memory_utilization": 0.2,
            "free_cache_engine": False,
            "enforce_eager": options.eager,
        },
        "actor": {"ppo_max_token_len_per_gpu": max(16384, options.prompt + options.tokens)},
    }
    return recipe.parse(recipe.resolve([tree]))


def processor_s() -> float:
    """Return the processor seconds of this process and its descendants so far."""
    me = psutil.Process()
    times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


class Arm:
    """A trainer and a replica, with R3 or without replay."""

    def __init__(self, options: argparse.Namespace, folder: Path, mode: str) -> None:
        self.options, self.mode = options, mode
        self.run = RunDir(folder / mode, None)
        self.run.logs.mkdir(parents=True)
        self.config = configuration(options, folder, mode)

    async def start(self, stack: AsyncExitStack) -> None:
        runtime = await stack.enter_async_context(open_runtime(self.config.sides, self.run.logs))
        self.engines = await build_engines(runtime, self.config, self.run)
        await self.engines.train.begin("rl", 10)
        await self.engines.publish(0)

    async def draw(self, asked: list[list[int]]) -> list[tuple[Segment, ...]]:
        first = 0 if self.mode == "R3" else None
        calls = (
            self.engines.pool.generate(
                tokens_of(prompt),
                SamplingParams(self.options.tokens, ignore_eos=True, seed=i, experts_from=first),
                f"{i}",
            )
            for i, prompt in enumerate(asked)
        )
        return list(await asyncio.gather(*calls))

    async def turn(self, asked: list[list[int]]) -> tuple[float, float]:
        """Return (tokens/s, processor seconds)."""
        start, used = time.perf_counter(), processor_s()
        drawn = sum(len(s.tokens) for segments in await self.draw(asked) for s in segments)
        return drawn / (time.perf_counter() - start), processor_s() - used


def prompts(options: argparse.Namespace, turn: int) -> list[list[int]]:
    """Return different prompts in each turn, so that none is in the prefix cache."""
    draw, most = random.Random(turn), SHAPES[options.model]["vocab_size"]
    return [
        [draw.randrange(1, most) for _ in range(options.prompt)] for _ in range(options.requests)
    ]


async def gap(arm: Arm, asked: list[list[int]]) -> dict[str, Any]:
    """Return the mean gaps of one batch of responses, with their experts and without."""
    results = await arm.draw(asked)
    samples = tuple(
        Sample(Prompt(i, tokens_of(asked[i]), "", "bench"), (Trajectory.of(segments),))
        for i, segments in enumerate(results)
    )
    plain = tuple(
        replace(sample, trajectories=tuple(map(without_experts, sample.trajectories)))
        for sample in samples
    )
    said = [x for segments in results for s in segments for x in s.log_probs]
    found: dict[str, Any] = {"tokens": len(said)}
    for name, batch in (("with_replay", samples), ("without", plain)):
        rows = await arm.engines.train.log_probs(batch)
        gaps = [abs(a - b) for a, b in zip(said, (x for r in rows for x in r), strict=True)]
        found[name] = {"mean": statistics.mean(gaps), "max": max(gaps)}
    found["ratio"] = found["with_replay"]["mean"] / found["without"]["mean"]
    experts = sum(len(s.experts) * s.experts.itemsize for r in results for s in r if s.experts)
    found["bytes_per_token"] = experts / (len(asked) * (len(asked[0]) + arm.options.tokens))
    return found


def without_experts(trajectory: Trajectory) -> Trajectory:
    segments = tuple(replace(s, experts=None) for s in trajectory.segments)
    return replace(trajectory, threads=(Thread(segments),))


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_model(options, folder / "model")
    arms = {mode: Arm(options, folder, mode) for mode in ("R3", "disabled")}
    turns: dict[str, list[tuple[float, float]]] = {mode: [] for mode in arms}
    async with AsyncExitStack() as stack:
        for arm in arms.values():
            await arm.start(stack)
        found: dict[str, Any] = {"gap": await gap(arms["R3"], prompts(options, 0))}
        print(json.dumps(found), file=sys.stderr, flush=True)
        for k in range(options.repeats + 1):  # the first turn does not count
            for mode in list(arms)[:: 1 if k % 2 else -1]:
                turns[mode].append(await arms[mode].turn(prompts(options, k + 1)))
        for arm in arms.values():
            await arm.engines.pool.close()
    cost: dict[str, Any] = {}
    for place, name in enumerate(("tokens_per_s", "processor_s")):
        own = {mode: [turn[place] for turn in all_[1:]] for mode, all_ in turns.items()}
        pairs = zip(own["R3"], own["disabled"], strict=True)
        cost[name] = own | {"R3_to_disabled": statistics.median(a / b for a, b in pairs)}
    return found | {"cost": cost}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="no graphs: a quick start")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(bench_vllm.ENVIRONMENT)
    found = {"options": {k: v for k, v in vars(options).items() if k != "json"}}
    with tempfile.TemporaryDirectory(prefix="bench-router-replay-") as folder:
        found |= asyncio.run(measure(options, Path(folder)))
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
