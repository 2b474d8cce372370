"""Measure a reward model in the workers of millrace against direct calls of the model.

Both arms score the same responses with the same model, in the same number of processes with one
thread each, and in batches of the same size. Models are loaded, and warm, before the clock starts.

    direct  each process has every second response, as text. It tokenises all of them, sorts them
            by length once, and calls the model on one batch after the other.
    pool    a RewardPool. Each response is a call of its own, and all calls wait at once.

The direct arm knows all of its responses from the start, so its batches have the least padding.
Repetitions alternate the order of the arms. Each ratio is that of one repetition: `ratio` of the
seconds on the clock, and `cpu_ratio` of the CPU seconds of all processes, with the driver's. Other
work on the machine changes the first and hardly changes the second.

    python benchmarks/bench_reward_model.py --repeats 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from millrace.config import RewardConfig, RewardModelConfig
from millrace.rewards.batches import plan
from millrace.rewards.pool import RewardPool
from millrace.rewards.wire import Call
from millrace.types import Completion, Prompt, tokens_of

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
MESSAGES = [{"role": "user", "content": "write something with digits " * 4}]
PROMPT = Prompt(0, tokens_of([1]), "", "bench", columns={"prompt": MESSAGES})


def write_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a Qwen2 classifier of this shape with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from millrace.data.tokenizer import make_tokenizer

    torch.manual_seed(1)
    tokenizer = make_tokenizer("chars", [LETTERS], 0)
    labels: Any = {"num_labels": 1}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=3 * hidden,
        pad_token_id=tokenizer.pad_token_id,
        **labels,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(count: int) -> list[str]:
    """Return responses with a long tail of lengths: the median is 90 characters."""
    rng = random.Random(2)
    lengths = [min(600, int(rng.lognormvariate(4.5, 0.7))) for _ in range(count)]
    return ["".join(rng.choices(LETTERS, k=n)) for n in lengths]


def score_direct(pipe: Connection, config: RewardModelConfig) -> None:
    """Answer each list of texts with the scores, until None comes."""
    import torch

    os.setsid()  # like a worker of the pool: Linux may share its cores fairly between sessions
    torch.set_num_threads(1)
    from millrace.rewards.model import RewardModel

    model = RewardModel.load("reward.model", config.model_dump(mode="json"))
    pipe.send("ready")
    while (mine := pipe.recv()) is not None:
        call = Call(0, "", "bench", None, {}, {"prompt": MESSAGES}, [])
        encoded = [model.encode(call, text) for text in mine]
        scores = [0.0] * len(mine)
        for batch in plan([len(ids) for ids in encoded], config.batch_size):
            for i, value in zip(batch, model.score([encoded[i] for i in batch]), strict=True):
                scores[i] = value
        pipe.send(scores)


class Direct:
    """Processes that call the model directly."""

    def __init__(self, config: RewardModelConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Any] = []
        self.processes = []
        for _ in range(config.num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=score_direct, args=(theirs, config))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def score(self, responses: Sequence[str]) -> tuple[float, list[float]]:
        """Return the seconds and the scores."""
        count, start = len(self.pipes), time.perf_counter()
        for i, pipe in enumerate(self.pipes):
            pipe.send(list(responses[i::count]))
        scores = [0.0] * len(responses)
        for i, pipe in enumerate(self.pipes):
            scores[i::count] = pipe.recv()
        return time.perf_counter() - start, scores

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


async def score_pool(pool: RewardPool, responses: Sequence[str]) -> tuple[float, list[float]]:
    """Return the seconds and the scores."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(pool.score(PROMPT, [Completion(text)]) for text in responses))
    return time.perf_counter() - start, [score.value for (score,) in answers]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children so far."""
    driver = psutil.Process()
    each = [p.cpu_times() for p in (driver, *driver.children())]
    return sum(times.user + times.system for times in each)


async def measure(config: RewardModelConfig, responses: Sequence[str], repeats: int) -> Any:
    """Return the seconds of each arm in each repetition. Check that the scores agree."""
    direct, pool = Direct(config), RewardPool(RewardConfig(model=config))
    try:
        await pool.start()
        await score_pool(pool, responses)  # every worker has loaded and is warm
        direct.score(responses)
        rows = []
        for repeat in range(repeats):
            for arm in ("direct", "pool") if repeat % 2 else ("pool", "direct"):
                before = cpu_seconds()
                if arm == "direct":
                    plain, expected = direct.score(responses)
                    plain_cpu = cpu_seconds() - before
                else:
                    pooled, scores = await score_pool(pool, responses)
                    pooled_cpu = cpu_seconds() - before
            assert max(abs(a - b) for a, b in zip(scores, expected, strict=True)) < 1e-3
            ratios = {"ratio": pooled / plain, "cpu_ratio": pooled_cpu / plain_cpu}
            rows.append({"direct_s": plain, "pool_s": pooled} | ratios)
            print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        await pool.close()
        direct.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), a.hidden, a.layers)
        config = RewardModelConfig(
            path=folder, num_workers=a.workers, batch_size=a.batch_size, device=a.device
        )
        rows = asyncio.run(measure(config, texts(a.responses), a.repeats))
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(json.dumps({"median": medians} | vars(a)))


if __name__ == "__main__":
    main()
