"""Rollouts in 8 bits against 16: tokens a second of vLLM, and a table of short runs.

    python benchmarks/bench_eight_bit.py decode MODEL [--quantization fp8] [--requests 64 256]
    python benchmarks/bench_eight_bit.py table OUT

`decode` prints a line of JSON for each number of requests. MODEL is a folder, or 7b for a random shape.
The weights are vLLM's random ones, with millrace's arguments and scheduler. A step counts if all
requests draw in it and none reads its prompt. `table` reads the runs of benchmarks/eight_bit.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPT, TOKENS, SKIPPED = 64, 192, 16
GAP, LIMIT = "actor/log_prob_gap_same_version", "actor/log_prob_gap_limit"
K3, REWARD = "actor/k3_to_sampler", "reward/mean"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    decode = parts.add_parser("decode")
    decode.add_argument("model")
    decode.add_argument("--quantization")
    decode.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    decode.set_defaults(run=measure)
    table = parts.add_parser("table")
    table.add_argument("out", type=Path)
    table.set_defaults(run=lambda options: print("\n".join(rows_of(options.out))))
    options = parser.parse_args()
    options.run(options)


def measure(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    engine = build(options)
    start_s = time.perf_counter() - begin
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    parameters = list(worker.model_runner.model.parameters())
    for requests in options.requests:
        drawn(engine, requests, SKIPPED, "warm")
        steps = drawn(engine, requests, TOKENS, "timed")
        median = statistics.median(steps)
        row = {
            "model": options.model if options.model == "7b" else Path(options.model).name,
            "quantization": options.quantization,
            "requests": requests,
            "tokens_per_s": requests / median,
            "step_ms": 1e3 * median,
            "steps": len(steps),
            "weights_gib": sum(p.numel() * p.element_size() for p in parameters) / 2**30,
            "start_s": start_s,
        }
        print(json.dumps(row), flush=True)


def build(options: argparse.Namespace) -> Any:
    """Return vLLM's engine, without the parts that exchange weights."""
    from bench_vllm import SHAPES, VOCABULARY
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from millrace.config import Config, ModelShape
    from millrace.config.serving_checks import HOST_PID
    from millrace.models.model import write_shape
    from millrace.serving.vllm.arguments import engine_arguments

    os.environ[HOST_PID] = str(os.getpid())
    folder = options.model
    if folder in SHAPES:
        folder = tempfile.mkdtemp()
        shape = ModelShape.model_validate(SHAPES[options.model])
        vocabulary = VOCABULARY[options.model]
        write_shape(Path(folder), shape, vocab_size=vocabulary, eos_token_id=0, dtype="bfloat16")
    rollout = {
        "engine": "vllm",
        "quantization": options.quantization,
        "max_num_seqs": max(options.requests),
        "max_prompt_length": PROMPT,
        "max_response_length": TOKENS,
        "gpu_memory_utilization": 0.5,
    }
    config = Config.model_validate(
        {"model": {"path": folder, "dtype": "bfloat16"}, "rollout": rollout}
    )
    arguments = engine_arguments(config.sides, config.model, folder)
    for key in ("weight_transfer_config", "worker_extension_cls"):
        del arguments[key]
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def drawn(engine: Any, requests: int, tokens: int, name: str) -> list[float]:
    """Draw responses of so many tokens. Return the seconds of the steps in which all draw."""
    from millrace.serving.vllm.requests import sampling_params
    from millrace.types import SamplingParams

    for k in range(requests):
        wanted = SamplingParams(max_tokens=tokens, seed=k, ignore_eos=True)
        prompt = [2 + (7 * k + i) % 400 for i in range(PROMPT)]
        one = {"prompt_token_ids": prompt, "cache_salt": f"{name} {requests}"}
        engine.add_request(f"{name} {requests} {k}", one, sampling_params(wanted, [0]))
    scheduler = engine.engine_core.engine_core.scheduler
    steps = []
    while engine.has_unfinished_requests():
        before = [len(r.output_token_ids) for r in scheduler.running]
        since = time.perf_counter()
        engine.step()
        took = time.perf_counter() - since
        if len(before) == requests and min(before) > 0:
            steps.append(took)
    return steps[:-1]  # The last one also ends all requests.


def rows_of(out: Path) -> Iterator[str]:
    """Yield a table of runs, with the means over their versions."""
    yield "| run | reward, last quarter | gap | limit | largest gap | k3 | s a version | proof at the start |"
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    for path in sorted(out.glob("*.metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]

        def of(key: str, rows: list[dict[str, Any]] = rows) -> list[float]:
            return [row[key] for row in rows if row.get(key) is not None] or [float("nan")]

        rewards, name = of(REWARD), path.name.removesuffix(".metrics.jsonl")
        log = (out / f"{name}.log").read_text(errors="replace")
        proof = re.findall(r"engines proven: .*|rollout engines and trainer give .*", log)
        figures = [
            statistics.fmean(rewards[-max(1, len(rewards) // 4) :]),
            *(statistics.fmean(of(GAP)), of(LIMIT)[0], max(of(GAP))),
            *(statistics.fmean(of(K3)), statistics.median(of("timing_s/step"))),
        ]
        cells = " | ".join(f"{x:.4g}" for x in figures)
        yield f"| {name} | {cells} | {proof[0][:160] if proof else 'none'} |"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
