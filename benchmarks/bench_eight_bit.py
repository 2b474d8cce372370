"""Rollouts in 8 bits against 16: tokens a second of vLLM, and a table of short runs.

    python benchmarks/bench_eight_bit.py decode MODEL [--quantization fp8] [--requests 64 256]
    python benchmarks/bench_eight_bit.py table OUT
    python benchmarks/bench_eight_bit.py gap MODEL

`decode` prints a line of JSON for each number of requests. MODEL is a folder, or 7b for a random shape.
The weights are vLLM's random ones, with millrace's arguments and scheduler. A step counts if all
requests draw in it and none reads its prompt. `table` reads the runs of benchmarks/eight_bit.sh.
`gap` draws sums with transformers' own model in 8 bits, on a CPU, and prints what a trainer in float32
thinks of the tokens: the gap, and statistics that may say whether learning dies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
    gap = parts.add_parser("gap")
    gap.add_argument("model")
    gap.add_argument("--requests", type=int, default=48)
    gap.add_argument("--tokens", type=int, default=96)
    gap.set_defaults(run=compare)
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


def compare(options: argparse.Namespace) -> None:
    """Print a line of JSON for each kind of rollouts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from millrace.sync.eight_bit import rounded

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def model(dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(dtype)

    def in_eight_bits(*, inputs: bool = True, layers: int = 1) -> Any:
        """Return a model with 8 bits in the first of each group of so many layers."""
        made = model()
        for layer in made.model.layers[::layers]:
            for linear in (m for m in layer.modules() if isinstance(m, torch.nn.Linear)):
                linear.weight.data = rounded(linear.weight.data)
                if inputs:
                    linear.register_forward_pre_hook(lambda _, read: (rounded(read[0]),))
        return made

    dice = random.Random(0)
    texts = [
        f"What is {dice.randint(10, 98)} + {dice.randint(10, 98)}?" for _ in range(options.requests)
    ]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([p for p in prompts if len(p) == len(prompts[0])])
    trainer = model()
    torch.manual_seed(0)
    kinds = {
        "bfloat16": lambda: model(torch.bfloat16),
        "8 bits, a third of the layers": lambda: in_eight_bits(layers=3),
        "8 bits, half of the layers": lambda: in_eight_bits(layers=2),
        "8 bits, weights alone": lambda: in_eight_bits(inputs=False),
        "8 bits": in_eight_bits,
    }
    for kind, build in kinds.items():
        engine = build()
        with torch.no_grad():
            drawn = engine.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                temperature=1.0, max_new_tokens=options.tokens, pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            response = drawn[:, ids.shape[1] :]
            ended = (response == tokenizer.eos_token_id).cumsum(1)
            mask = ended - (response == tokenizer.eos_token_id).long() == 0
            own, true = (
                one(drawn[:, :-1])
                .logits[:, ids.shape[1] - 1 :]
                .double()
                .log_softmax(-1)
                .gather(2, response[..., None])[..., 0]
                for one in (engine, trainer)
            )
        change = torch.where(mask, true - own, 0.0)
        delta, ratio = change[mask], change[mask].exp()
        whole = change.sum(1).exp()
        row = {
            "drawn in": kind,
            "tokens": len(delta),
            "gap": float(delta.abs().mean()),
            "k3": float((ratio - 1 - delta).mean()),
            "beyond 0.8 to 1.28": float(((ratio < 0.8) | (ratio > 1.28)).double().mean()),
            "ess of tokens": float(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)),
            "ess of responses": float(whole.sum() ** 2 / (whole**2).sum() / len(whole)),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
