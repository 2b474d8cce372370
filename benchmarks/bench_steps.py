"""The time of vLLM's steps, with and without requests that wait for a slot.

    python benchmarks/bench_steps.py [--model 1.5b] [--slots 256] [--requests 700]
        [--engine '{"compilation_config": {"cudagraph_mode": "FULL"}}'] [--json OUT]

The engine and its core are in this process, with millrace's arguments and scheduler, and random
weights. All requests come at once, with prompts of 8 tokens and log-normal lengths (median 250, sigma
0.8, cut at 1,024). So all slots are busy and requests wait at first, and later neither. A step that
draws only is told from one that also reads a prompt. `--engine` has further arguments of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

from bench_vllm import SHAPES, configuration
from millrace.config.vllm_checks import HOST_PID

from millrace.types import SamplingParams

WARM_UP = 20
"""Steps that do not count."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(SHAPES), default="1.5b")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--requests", type=int, default=700)
    parser.add_argument("--limit", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument("--engine", type=json.loads, default={})
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.gpus, options.dtype, options.eager, options.bucket_mb = 1, None, False, 512
    options.prompt, options.tokens = 64, options.limit
    os.environ[HOST_PID] = str(os.getpid())
    engine = build(options)
    begin = time.perf_counter()
    steps = run(engine, options)
    result = summary(steps[WARM_UP:]) | {"seconds": time.perf_counter() - begin}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"engine": options.engine} | result) + "\n")


def build(options: argparse.Namespace) -> Any:
    """Return vLLM's engine, without the parts that exchange weights."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from millrace.serving.vllm.arguments import engine_arguments

    folder = Path(tempfile.mkdtemp())
    config = configuration(options, folder)
    arguments = engine_arguments(config.sides, config.model, str(folder / "model"))
    for key in ("weight_transfer_config", "worker_extension_cls"):
        del arguments[key]
    arguments |= {"gpu_memory_utilization": 0.5} | options.engine
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def run(engine: Any, options: argparse.Namespace) -> list[tuple[float, int, int, int]]:
    """Draw all requests.

    Return for each step its seconds, and how many requests run, wait and begin in it.
    """
    from millrace.serving.vllm.requests import sampling_params

    scheduler = engine.engine_core.engine_core.scheduler
    schedule, scheduled = scheduler.schedule, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            new = len(output.scheduled_new_reqs)
            scheduled.append((len(scheduler.running), len(scheduler.waiting), new))
        return output

    scheduler.schedule = watched
    draw = random.Random(1)
    for k in range(options.requests):
        tokens = min(options.limit, max(1, round(draw.lognormvariate(5.52, 0.8))))
        wanted = SamplingParams(max_tokens=tokens, seed=k, ignore_eos=True)
        prompt = [draw.randrange(1, 500) for _ in range(8)]
        one = {"prompt_token_ids": prompt, "cache_salt": "1"}
        engine.add_request(str(k), one, sampling_params(wanted, [0]))
    steps = []
    while engine.has_unfinished_requests():
        seen, start = len(scheduled), time.perf_counter()
        engine.step()
        took = time.perf_counter() - start
        steps += [(took, *one) for one in scheduled[seen:]]
    return steps


def summary(steps: list[tuple[float, int, int, int]]) -> dict[str, Any]:
    """Return tokens a second and the milliseconds of a step, by what happens in it."""
    took: dict[str, list[float]] = defaultdict(list)
    drawn: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for seconds, running, waiting, new in steps:
        drawn["requests wait" if waiting else "none waits"].append((seconds, running))
        kind = "reads a prompt" if new else "draws only"
        wait = "requests wait" if waiting else f"{running // 64 * 64} and more run"
        took[f"{wait}, {kind}"].append(1e3 * seconds)
    rates = {k: sum(n for _, n in v) / sum(s for s, _ in v) for k, v in drawn.items()}
    medians = {
        k: {"steps": len(v), "median": statistics.median(v), "mean": statistics.fmean(v)}
        for k, v in sorted(took.items())
    }
    return {"tokens_per_s": rates, "step_ms": medians}


if __name__ == "__main__":
    main()
