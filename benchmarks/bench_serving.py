"""One replica of a serving engine on one GPU: start, decoding, shared prefixes, pauses.

    python benchmarks/bench_serving.py {vllm,sglang} [--model FOLDER | --shape 1.5b] [--out FILE]

Run it with the Python of the engine's environment. It uses the engine as a rollout worker does, with
random weights unless --model has some, and temperature 1. Each line of the output is one figure.

| figure | content |
|---|---|
| start | seconds from the first import to an engine that serves, and its part after the imports |
| decode | tokens drawn per second with so many requests at once, `--tokens` each, log-probs on |
| prefix | seconds for 64 prompts of `--prompt` tokens, each drawn 8 times, 16 tokens each |
| interrupt | seconds from a call of interrupt() to its return, with 256 requests running |
| memory | GiB of the GPU in use at the end, of all processes |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_vllm import SHAPES, VOCABULARY

from millrace.config import Config, ModelShape, plugins
from millrace.types import SamplingParams, tokens_of


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--requests", default="64,256,512")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--kwargs", default="{}", help="rollout.engine_kwargs as JSON")
    parser.add_argument("--out", default="")
    return parser.parse_args()


async def main(given: argparse.Namespace) -> None:
    began = time.perf_counter()

    def report(figure: str, **values: Any) -> None:
        name = Path(given.model).name if given.model else given.shape
        line = json.dumps({"engine": given.engine, "model": name, "figure": figure} | values)
        print(line, flush=True)
        if given.out:
            with open(given.out, "a") as file:
                file.write(line + "\n")

    folder = given.model or tempfile.mkdtemp()
    if not given.model:
        from millrace.models.model import write_shape

        shape = ModelShape.model_validate(SHAPES[given.shape])
        words = VOCABULARY[given.shape]
        write_shape(Path(folder), shape, vocab_size=words, eos_token_id=0, dtype="bfloat16")
    config = Config.model_validate({
        "model": {"path": folder, "dtype": "bfloat16"},
        "rollout": {
            "engine": given.engine,
            "max_num_seqs": 512,
            "max_prompt_length": given.prompt,
            "max_response_length": max(given.tokens, 1024),
            "gpu_memory_utilization": given.share,
            "engine_kwargs": json.loads(given.kwargs),
        },
        "actor": {"ppo_max_token_len_per_gpu": given.prompt + max(given.tokens, 1024)},
    })  # fmt: skip
    from millrace.runtime.worker import _VARIABLES, _set_defaults

    _set_defaults(_VARIABLES[given.engine], folder)
    build = plugins.load("rollout.engine", given.engine, "rollout_engines")
    imported = time.perf_counter()
    engine = build(config.sides, config.model, folder)
    now = time.perf_counter()
    report("start", seconds=round(now - began, 1), after_imports=round(now - imported, 1))
    draw, top = random.Random(0), 500 if given.shape == "tiny" else 40000

    def prompt(length: int) -> Any:
        return tokens_of([draw.randrange(10, top) for _ in range(length)])

    async def draws(prompts: list[Any], tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        calls = [
            engine.generate(p, SamplingParams(params.max_tokens, seed=i, ignore_eos=True), str(i))
            for i, p in enumerate(prompts)
        ]
        await asyncio.gather(*calls)
        return time.perf_counter() - start

    for requests in map(int, given.requests.split(",")):
        rates = []
        for turn in range(4):
            seconds = await draws([prompt(32) for _ in range(requests)], given.tokens)
            if turn:
                rates.append(requests * given.tokens / seconds)
        report("decode", requests=requests, tokens_per_s=[round(rate) for rate in rates])
    shared = []
    for _ in range(4):
        prompts = [prompt(given.prompt - 1) for _ in range(64)]
        shared.append(round(await draws([p for p in prompts for _ in range(8)], 16), 3))
    stats = await engine.stats()
    report("prefix", seconds=shared[1:], reused_tokens=stats.reused_tokens)
    pauses = []
    for _ in range(5):
        calls = [
            asyncio.create_task(
                engine.generate(prompt(32), SamplingParams(512, seed=i, ignore_eos=True), str(i))
            )
            for i in range(256)
        ]
        before = (await engine.stats()).tokens
        while (await engine.stats()).tokens < before + 256 * 20:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        start = time.perf_counter()
        await engine.interrupt()
        pauses.append(time.perf_counter() - start)
        await asyncio.gather(*calls)
    report("interrupt", milliseconds=[round(1000 * p, 1) for p in pauses],
           median=round(1000 * statistics.median(pauses), 1))  # fmt: skip
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        report("memory", gib=round((total - free) / 2**30, 1))
    await engine.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    asyncio.run(main(options()))
