"""Throughput of the torch rollout engine, compared with plain loops over the same model.

    python benchmarks/bench_rollout.py [--model large] [--repeats 7] [--threads 1] [--json out.json]

| workload | requests | goal |
|---|---|---|
| equal | 64 of one length | >= 0.75 of the plain loop |
| tail | 256 with a long tail of lengths (mean about 22, longest 96), 64 at a time | > 1 of it |
| quick | 256 trajectories of 5 to 7 tokens after prompts of 5 to 7, 8 for each prompt | > 3000/s |

The plain loop of `equal` is one lock-step batch with a transformers KV cache, without padding and
mask. It samples and records log-probs with the engine's own draw(). The faster of its two caches is
the baseline. The plain loop of `tail` runs static batches of 64 in order of arrival, each until its
longest response is complete. Tokens past a request's own length do not count. `quick` is one RL
step of the quickstart, and its goal is in trajectories on one thread.

Arms take turns within each repetition, so that other work on the machine affects all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from millrace.config import ModelShape
from millrace.decode.engine import TorchRolloutEngine
from millrace.decode.sampling import draw
from millrace.models.model import load_model, write_shape
from millrace.types import SamplingParams, Tokens, tokens_of

MODELS = {
    "tiny": ModelShape(),
    "large": ModelShape(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=768,
    ),
}
Job = tuple[Tokens, int]
"""A prompt and the length of its response."""


@torch.inference_mode()
def plain_batch(model: PreTrainedModel, jobs: list[Job], static: bool) -> int:
    """Decode prompts of one length in lock-step, until the longest response is complete.

    Returns the number of requested tokens.
    """
    ids = torch.tensor([job[0].tolist() for job in jobs])
    prompt, steps = ids.shape[1], max(job[1] for job in jobs)
    cache = (
        StaticCache(model.config, max_cache_len=prompt + steps)
        if static
        else DynamicCache(config=model.config)
    )
    tokens, log_probs = [], []
    for _ in range(steps):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token, log_prob = draw(out.logits[:, -1], torch.rand(len(jobs), dtype=torch.float64))
        tokens.append(token)
        log_probs.append(log_prob)
        ids = token[:, None]
    all_tokens, all_log_probs = torch.stack(tokens, 1).tolist(), torch.stack(log_probs, 1).tolist()
    results = [
        (t[: job[1]], p[: job[1]])
        for t, p, job in zip(all_tokens, all_log_probs, jobs, strict=True)
    ]
    return sum(len(t) for t, _ in results)


def run_plain(model: PreTrainedModel, jobs: list[Job], batch: int, static: bool) -> int:
    return sum(plain_batch(model, jobs[i : i + batch], static) for i in range(0, len(jobs), batch))


class EngineArm:
    """The engine on one event loop. Repetitions share it, as the steps of a run do."""

    def __init__(
        self, model: PreTrainedModel, slots: int, max_len: int, deterministic: bool = False
    ) -> None:
        self.engine = TorchRolloutEngine(
            model, eos_ids=(1,), slots=slots, max_len=max_len, deterministic=deterministic
        )
        self.loop = asyncio.new_event_loop()

    def run(self, jobs: list[Job]) -> int:
        return self.loop.run_until_complete(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> int:
        calls = (
            self.engine.generate(prompt, SamplingParams(length, seed=i, ignore_eos=True), "bench")
            for i, (prompt, length) in enumerate(jobs)
        )
        return sum(
            len(segment.tokens) for segments in await asyncio.gather(*calls) for segment in segments
        )


def equal_jobs(rng: random.Random) -> list[Job]:
    return [(_prompt(rng, 8), 64) for _ in range(64)]


def tail_jobs(rng: random.Random) -> list[Job]:
    """Return jobs with log-normal lengths, cut at 96: the mean is about 22."""
    return [
        (_prompt(rng, 8), min(96, max(1, int(rng.lognormvariate(2.75, 0.8))))) for _ in range(256)
    ]


def quick_jobs(rng: random.Random) -> list[Job]:
    prompts = [_prompt(rng, rng.choice((5, 6, 7))) for _ in range(32)]
    return [(prompt, rng.choice((5, 6, 7))) for prompt in prompts for _ in range(8)]


def _prompt(rng: random.Random, length: int) -> Tokens:
    return tokens_of(rng.randrange(2, 20) for _ in range(length))


def measure(arms: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Return tokens per second of every arm in every repetition.

    The arms of one repetition run one after the other.
    """
    for run in arms.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            start = perf_counter()
            tokens = run()
            rates[name].append(tokens / (perf_counter() - start))
    return rates


def report(
    title: str,
    rates: dict[str, list[float]],
    base: str | None,
    per: float = 1.0,
    unit: str = "tok/s",
) -> dict:
    print(
        f"\n{title}\n  {'arm':<26}{'median ' + unit:>18}{'min':>10}{'max':>10}{'ratio':>8}{'min':>7}{'max':>7}"
    )
    rows = {}
    for name, values in rates.items():
        row = {
            "median": statistics.median(values) / per,
            "min": min(values) / per,
            "max": max(values) / per,
            "unit": unit,
        }
        line = f"  {name:<26}{row['median']:>18,.0f}{row['min']:>10,.0f}{row['max']:>10,.0f}"
        if base is not None:
            ratios = [v / b for v, b in zip(values, rates[base], strict=True)]
            row |= {
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
            line += f"{row['ratio']:>8.2f}{row['ratio_min']:>7.2f}{row['ratio_max']:>7.2f}"
        print(line)
        rows[name] = row
    return rows


def best_plain(rates: dict[str, list[float]]) -> str:
    return max(
        (name for name in rates if name.startswith("plain")),
        key=lambda name: statistics.median(rates[name]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--vocab", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_shape(folder, MODELS[options.model], vocab_size=options.vocab, eos_token_id=1)
        # Two copies of the same weights: the engine's copy runs its own attention function, and the
        # plain loop's copy runs stock sdpa.
        plain, own = (load_model(folder, seed=0, dtype="float32") for _ in range(2))
    size = sum(p.numel() for p in own.parameters())
    print(
        f"{options.model}: {size / 1e6:.2f}M parameters, {options.threads} thread(s), {options.repeats} repetitions"
    )
    out: dict = {
        "model": options.model,
        "parameters": size,
        "threads": options.threads,
        "repeats": options.repeats,
    }

    rng = random.Random(0)
    jobs, arm, strict = (
        equal_jobs(rng),
        EngineArm(own, 64, 80),
        EngineArm(own, 64, 80, deterministic=True),
    )
    arms: dict[str, Callable[[], int]] = {
        "plain, DynamicCache": lambda: run_plain(plain, jobs, 64, static=False),
        "plain, StaticCache": lambda: run_plain(plain, jobs, 64, static=True),
        "engine": lambda: arm.run(jobs),
        "engine, deterministic": lambda: strict.run(jobs),
    }
    rates = measure(arms, options.repeats)
    out["equal"] = report("equal: 64 requests of 64 tokens", rates, best_plain(rates))

    tail, tail_arm, tail_strict = (
        tail_jobs(rng),
        EngineArm(own, 64, 112),
        EngineArm(own, 64, 112, deterministic=True),
    )
    lengths = [length for _, length in tail]
    arms = {
        "static batches, Dynamic": lambda: run_plain(plain, tail, 64, static=False),
        "static batches, Static": lambda: run_plain(plain, tail, 64, static=True),
        "engine": lambda: tail_arm.run(tail),
        "engine, deterministic": lambda: tail_strict.run(tail),
    }
    rates = {
        ("plain " + k if k.startswith("static") else k): v
        for k, v in measure(arms, options.repeats).items()
    }
    title = f"tail: 256 requests, mean {statistics.mean(lengths):.1f}, longest {max(lengths)}, through 64 slots"
    out["tail"] = report(title, rates, best_plain(rates))

    quick = quick_jobs(rng)
    quick_arms = {f"{slots} slots": EngineArm(own, slots, 16) for slots in (64, 128, 256)}
    rates = measure(
        {name: (lambda a=a: a.run(quick)) for name, a in quick_arms.items()},  # type: ignore[misc]
        options.repeats * 3,
    )
    mean = statistics.mean(length for _, length in quick)
    out["quick"] = report(
        "quick: 256 trajectories of 5 to 7 tokens", rates, None, per=mean, unit="traj/s"
    )
    if options.json:
        options.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
