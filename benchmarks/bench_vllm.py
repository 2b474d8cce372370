"""vLLM rollouts through millrace compared with bare vLLM, and the weight sync to vLLM.

It runs on one device or two.

    python benchmarks/bench_vllm.py [--gpus 1] [--model 1.5b] [--requests 512] [--tokens 256]
        [--repeats 5] [--json out.json]

| part | content |
|---|---|
| rollout | all requests at once, with `--prompt` random tokens, `--tokens` new ones and log-probs |
| sync | transfer and pause, idle; with two devices also with all requests in flight |
| gap | mean and maximum abs(vLLM's - trainer's log-prob), with the same weights |
| resume | whether interrupted and resumed greedy responses equal uninterrupted ones |

`rollout` compares two paths on the same GPU. One goes through the pool and the worker, as in the
pipeline. The other is AsyncLLM in its own process, with the same engine arguments but vLLM's own
scheduler. Both engines stay on the GPU and take turns on the same requests. Bare vLLM runs with the
same seeds, and in further turns without seeds, like vLLM without RL. No tokens are decoded during
the pause of `sync`. On one device, the sides are colocated and nothing is offloaded.

Models are shapes with random weights.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from millrace.config import Config, ModelShape, recipe
from millrace.run.engines import build_engines, open_runtime
from millrace.run.folder import RunDir
from millrace.types import Prompt, Sample, SamplingParams, Segment, Tokens, Trajectory, tokens_of

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
}
RATE = "rate "
# millrace starts its workers with this too. With a thread for every core, vLLM's small host
# operations are slower by a quarter.
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
    "OMP_WAIT_POLICY": "PASSIVE",
}
ENVIRONMENT |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
VOCABULARY = {"tiny": 512, "1.5b": 151936, "7b": 152064}


def configuration(options: argparse.Namespace, folder: Path) -> Config:
    from millrace.models.model import write_shape

    shape = ModelShape.model_validate(SHAPES[options.model])
    dtype: Literal["float32", "bfloat16"] = options.dtype or (
        "float32" if options.model == "tiny" else "bfloat16"
    )
    write_shape(
        folder / "model", shape, vocab_size=VOCABULARY[options.model], eos_token_id=0, dtype=dtype
    )
    length = options.prompt + options.tokens
    tree = {
        "mode": "colocate_sync" if options.gpus == 1 else "async_partial",
        "trainer": {"offload": False},
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "rollout": {
            "engine": "vllm",
            "max_num_seqs": options.slots,
            "max_prompt_length": options.prompt,
            "max_response_length": options.tokens,
            # Two engines and a trainer share the GPU.
            "gpu_memory_utilization": 0.25,
            "free_cache_engine": False,
            "enforce_eager": options.eager,
        },
        "actor": {"ppo_max_token_len_per_gpu": max(16384, length)},
        "sync": {"bucket_mb": options.bucket_mb},
    }
    return recipe.parse(recipe.resolve([tree]))


def prompts(options: argparse.Namespace, turn: int = 0) -> list[list[int]]:
    """Return different prompts in each turn, so that none is in the prefix cache."""
    draw = random.Random(turn)
    return [
        [draw.randrange(1, VOCABULARY[options.model]) for _ in range(options.prompt)]
        for _ in range(options.requests)
    ]


def params(options: argparse.Namespace, i: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=i, **changes)


async def through_millrace(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = configuration(options, folder)
    run = RunDir(folder, None)
    run.logs.mkdir()
    asked = prompts(options)
    figures_of_run: dict[str, Any] = {"sync": []}
    start = time.perf_counter()
    async with open_runtime(config.sides, run.logs) as runtime:
        engines = await build_engines(runtime, config, run)
        figures_of_run["start_s"] = time.perf_counter() - start
        await engines.train.begin("rl", 10)

        async def publish(version: int, load: str) -> None:
            transfer, pause = await engines.publish(version)
            figures = {
                "load": load,
                "bytes": transfer.bytes,
                "transfer_s": transfer.seconds,
                "pause_s": pause,
            }
            figures_of_run["sync"].append(
                figures | {"gb_per_s": transfer.bytes / transfer.seconds / 1e9}
            )

        async def ask(
            prepared: list[Tokens], name: str, **changes: Any
        ) -> list[tuple[Segment, ...]]:
            calls = (
                engines.pool.generate(p, params(options, i, **changes), f"{name}/{i}")
                for i, p in enumerate(prepared)
            )
            return list(await asyncio.gather(*calls))

        async def ask_all(**changes: Any) -> list[tuple[Segment, ...]]:
            return await ask([tokens_of(p) for p in asked], "0", **changes)

        for version in range(options.syncs):
            await publish(version, "first" if version == 0 else "idle")

        async def turn(name: str, k: int) -> float:
            prepared = [tokens_of(p) for p in prompts(options, k)]
            start = time.perf_counter()
            drawn = sum(len(s.tokens) for segments in await ask(prepared, f"{k}") for s in segments)
            return drawn / (time.perf_counter() - start)

        arms: dict[str, Callable[[str, int], Awaitable[float]]] = {"millrace": turn}
        async with AsyncExitStack() as stack:
            if options.arm == "both":
                other = await stack.enter_async_context(bare_engine(options, folder))
                arms |= dict.fromkeys(("bare_seeded", "bare_unseeded"), other)
            rates: dict[str, list[float]] = {name: [] for name in arms}
            for k in range(options.repeats + 1):  # the first turn does not count
                for name in list(arms)[:: 1 if k % 2 else -1]:
                    rates[name].append(await arms[name](name, k + 1))
                print(
                    " ".join(
                        f"{name} {found_rates[-1]:.0f}" for name, found_rates in rates.items()
                    ),
                    file=sys.stderr,
                    flush=True,
                )
        figures_of_run |= {
            f"{name}_tokens_per_s": found_rates[1:] for name, found_rates in rates.items()
        }
        for name in list(arms)[1:]:
            pairs = zip(rates["millrace"][1:], rates[name][1:], strict=True)
            figures_of_run[f"millrace_to_{name}"] = statistics.median(a / b for a, b in pairs)
        rate = statistics.median(rates["millrace"][1:])
        write(options, figures_of_run)  # at once, because the next part may fail

        if options.gpus == 2:
            busy = asyncio.create_task(ask_all())
            for version in range(options.syncs, 2 * options.syncs):
                await asyncio.sleep(0.3)
                await publish(version, "busy" if not busy.done() else "idle")
            spans = [len({s.version for s in segments}) for segments in await busy]
            figures_of_run["versions_in_a_response_max"] = max(spans)
            await publish(100, "idle")

        results = (await ask_all())[:64]
        samples = tuple(
            Sample(Prompt(i, tokens_of(asked[i]), "", "bench"), (Trajectory.of(segments),))
            for i, segments in enumerate(results)
        )
        trainer_log_probs = await engines.train.log_probs(samples)
        gaps = [
            abs(a - b)
            for of_sample, segments in zip(trainer_log_probs, results, strict=True)
            for a, b in zip(of_sample, [x for s in segments for x in s.log_probs], strict=True)
        ]
        figures_of_run["gap"] = {
            "mean": statistics.mean(gaps),
            "max": max(gaps),
            "tokens": len(gaps),
        }

        whole = [segments[0].tokens for segments in (await ask_all(temperature=0.0))[:16]]
        task = asyncio.create_task(ask_all(temperature=0.0))
        await asyncio.sleep(0.25 * options.requests * options.tokens / rate)
        await engines.pool.interrupt()
        parts = [tokens_of([t for s in segments for t in s.tokens]) for segments in await task][:16]
        cut = [len(p) for p in parts]
        rest = await asyncio.gather(
            *(
                engines.pool.generate(
                    tokens_of(asked[i]) + part,
                    SamplingParams(
                        max_tokens=options.tokens - len(part),
                        ignore_eos=True,
                        temperature=0.0,
                        seed=i,
                        offset=len(part),
                    ),
                    f"r{i}",
                )
                for i, part in enumerate(parts)
                if len(part) < options.tokens
            )
        )
        resumed = iter(rest)
        joined = [p if len(p) == options.tokens else p + next(resumed)[0].tokens for p in parts]
        first = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), -1)
            for x, y in zip(joined, whole, strict=True)
        ]
        # A difference before the cut, or without a cut, does not come from resuming. Two runs of
        # the same request differ too.
        resumed_ones = [
            k for k in range(len(cut)) if cut[k] < options.tokens and not 0 <= first[k] < cut[k]
        ]
        same = [first[k] == -1 for k in resumed_ones]
        figures_of_run["resume"] = {
            "cut_at": cut,
            "first_difference": first,
            "equal": sum(same),
            "of": len(same),
        }
        await engines.pool.close()
    return figures_of_run


@asynccontextmanager
async def bare_engine(
    options: argparse.Namespace, folder: Path
) -> AsyncIterator[Callable[[str, int], Awaitable[float]]]:
    """Start bare vLLM in its own process, on the replica's GPU.

    It gets requests as lines and returns rates as lines.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    alone = ENVIRONMENT | {
        "CUDA_VISIBLE_DEVICES": visible[options.gpus - 1],
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    (folder / "bare").mkdir()
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--arm",
        "bare",
        "--folder",
        str(folder / "bare"),
    ]
    pipe = asyncio.subprocess.PIPE
    with (folder / "bare" / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=log, env=os.environ | alone
        )
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        async def next_rate() -> float:
            while line := (await answers.readline()).decode():
                if line.startswith(RATE):
                    return float(line.removeprefix(RATE))
            raise SystemExit((folder / "bare" / "log").read_text()[-3000:])

        async def ask(name: str, k: int) -> float:
            asked.write(f"{name} {k}\n".encode())
            return await next_rate()

        await next_rate()
        try:
            yield ask
        finally:
            asked.close()
            await process.wait()


async def bare(options: argparse.Namespace, folder: Path) -> None:
    """Run AsyncLLM alone, with millrace's engine arguments but vLLM's own scheduler."""
    from millrace.serving.vllm import arguments as vllm_arguments
    from millrace.serving.vllm import engine as vllm_rollout
    from millrace.serving.vllm.requests import sampling_params

    vllm_arguments.SCHEDULER = None
    config = configuration(options, folder)
    engine = vllm_rollout.build(config.sides, config.model, str(folder / "model"))
    llm = engine._llm
    number = iter(range(1 << 30))

    async def one(prompt: list[int], i: int, seeded: bool) -> int:
        sampling = sampling_params(params(options, i), engine._eos)
        if not seeded:
            sampling.seed = None
        last: Any = None
        async for output in llm.generate(
            {"prompt_token_ids": prompt}, sampling, f"b{next(number)}"
        ):
            last = output
        return len(last.outputs[0].token_ids)

    print(f"{RATE}0", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, k = line.split()
        seeded = name == "bare_seeded"
        asked = prompts(
            options, int(k) + 1000 * (not seeded)
        )  # otherwise the second arm finds the prompts of the first in its prefix cache
        start = time.perf_counter()
        drawn = sum(await asyncio.gather(*(one(p, i, seeded) for i, p in enumerate(asked))))
        print(f"{RATE}{drawn / (time.perf_counter() - start)}", flush=True)
    await engine.close()


def write(options: argparse.Namespace, figures_of_run: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(figures_of_run, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2)
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="bfloat16, unless the model is tiny"
    )
    parser.add_argument(
        "--eager", action="store_true", help="no graphs: a quick start, where rates do not matter"
    )
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", choices=("both", "millrace", "bare"), default="both")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bench-vllm-"))
    if options.arm == "bare":
        asyncio.run(bare(options, folder))
        return
    figures_of_run = {
        "options": {k: v for k, v in vars(options).items() if k not in ("json", "folder", "arm")}
    }
    figures_of_run |= asyncio.run(through_millrace(options, folder))
    print(json.dumps(figures_of_run, indent=1))
    write(options, figures_of_run)


if __name__ == "__main__":
    main()
