"""The cost of log-probs for the process that sends requests to vLLM.

vLLM's own scheduler and millrace's scheduler take turns.

    python benchmarks/bench_log_probs.py [--model 1.5b] [--requests 256] [--tokens 256]
        [--repeats 5] [--json out.json]

The figures are tokens/s of all `--requests` at once, and processor time of this process for each
token. One core of the host does all this work, so it limits the replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_vllm

from millrace.types import SamplingParams, tokens_of


async def turn(engine: Any, options: argparse.Namespace, k: int) -> tuple[float, float]:
    """Return (tokens/s, microseconds of this process for each token)."""
    asked = [tokens_of(p) for p in bench_vllm.prompts(options, k)]
    params = [
        SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=i)
        for i in range(len(asked))
    ]
    start, used = time.perf_counter(), time.process_time()
    found = await asyncio.gather(
        *(engine.generate(p, s, "") for p, s in zip(asked, params, strict=True))
    )
    drawn = sum(len(segment.log_probs) for segments in found for segment in segments)
    assert drawn == options.requests * options.tokens
    return drawn / (time.perf_counter() - start), 1e6 * (time.process_time() - used) / drawn


async def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from millrace.serving.vllm import arguments as vllm_arguments
    from millrace.serving.vllm import engine as vllm_rollout

    config = bench_vllm.configuration(options, folder)
    engines = {"millrace": vllm_rollout.build(config.sides, config.model, str(folder / "model"))}
    vllm_arguments.SCHEDULER = None
    engines["vllm"] = vllm_rollout.build(config.sides, config.model, str(folder / "model"))
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for k in range(options.repeats + 1):  # the first turn does not count
        for name in list(engines)[:: 1 if k % 2 else -1]:
            turns[name].append(await turn(engines[name], options, k))
    for engine in engines.values():
        await engine.close()
    rates = {name: [rate for rate, _ in found[1:]] for name, found in turns.items()}
    return {
        "tokens_per_s": rates,
        "host_us_per_token": {
            name: [used for _, used in found[1:]] for name, found in turns.items()
        },
        "millrace_to_vllm": statistics.median(
            a / b for a, b in zip(rates["millrace"], rates["vllm"], strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=bench_vllm.SHAPES, default="1.5b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vars(options).update(gpus=1, dtype=None, eager=False, bucket_mb=64)
    os.environ.update(bench_vllm.ENVIRONMENT)
    found = asyncio.run(compare(options, Path(tempfile.mkdtemp(prefix="bench-log-probs-"))))
    text = json.dumps(
        {"options": {k: v for k, v in vars(options).items() if k != "json"}} | found, indent=1
    )
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
