r"""Rows divided among ranks by tokens and by cost: how long ranks wait for each other.

    .venv/bin/python benchmarks/bench_balance.py            # computed, in two minutes
    .venv/bin/python benchmarks/bench_balance.py --measure  # two ranks on this CPU

Ranks of FSDP2 wait for each other in each layer, so a micro-batch takes as long as its slowest
rank. Both arms use `millrace.train.packing.split`, `tokens` without the cost of attention.
The cost of a row of n tokens is n + n^2 / attention_length.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from millrace.config import ModelShape
from millrace.models.model import load_model, write_shape
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.packing import attention_length, pack, split
from millrace.train.rows import Rows, rows_of_examples
from millrace.types import tokens_of

MODELS = {
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
    "30B-A3B": {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}
"""The shapes of Qwen2.5-7B and Qwen3-30B-A3B."""
LENGTHS = {"median 2k": (2000, 1.2), "median 4k": (4000, 0.9), "median 8k": (8000, 0.9)}
"""Median and sigma of a lognormal distribution, cut at 1k and 32k tokens."""
LONGEST = 32768
SMALL = ModelShape(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=768
)


def rows_of(seed: int, count: int, median: float, sigma: float, least: int, most: int) -> Rows:
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, count)
    lengths = drawn.astype(int).clip(least, most)
    rng = np.random.default_rng(seed)
    one = tokens_of([3])
    return rows_of_examples([(one, tokens_of(rng.integers(4, 60, n).tolist())) for n in lengths])


def over_ideal(rows: Rows, ranks: int, limit: int, square: float, by: float) -> dict[str, float]:
    """Return the cost of a step over that of ranks that never wait, with rows divided by `by`."""
    members = np.arange(len(rows.starts))
    shares = split(rows, members, max_tokens=limit, world_size=ranks, attention_length=by)
    n = [[rows.inputs[share].astype(float) for share in batch] for batch in shares]
    costs = np.array([[(x + x**2 / square).sum() for x in batch] for batch in n])
    tokens = np.array([[x.sum() for x in batch] for batch in n])
    return {
        "tokens": tokens.max(1).sum() / (tokens.sum() / ranks),
        "step": costs.max(1).sum() / (costs.sum() / ranks),
        "sums": costs.sum(0).max() / (costs.sum() / ranks),
    }


def compute(seeds: int) -> None:
    print("| model | lengths | rows | ranks | tokens | step, by tokens | by cost | saved |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for kind, (median, sigma) in LENGTHS.items():
        for count in (128, 512):
            drawn = [rows_of(s, count, median, sigma, 1000, LONGEST) for s in range(seeds)]
            for model, keys in MODELS.items():
                square = attention_length(SimpleNamespace(**keys))
                for ranks in (2, 4, 8):
                    arms = [
                        [over_ideal(rows, ranks, LONGEST, square, by) for rows in drawn]
                        for by in (math.inf, square)
                    ]
                    tokens = statistics.mean(run["tokens"] for run in arms[0])
                    now, new = (statistics.mean(run["step"] for run in arm) for arm in arms)
                    print(
                        f"| {model} | {kind} | {count} | {ranks} | {tokens:.3f} | {now:.3f} | "
                        f"{new:.3f} | {1 - new / now:.1%} |"
                    )


def rank_steps(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Take the processor's seconds of each micro-batch of this rank. Other work does not count."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    policy = PackedPolicy(load_model(folder, seed=1, dtype="float32"))
    device = torch.device("cpu")
    rows = rows_of(0, options.rows, 400, 1.0, 32, options.limit)
    members = np.arange(len(rows.starts))
    arms = {"tokens": math.inf, "cost": policy.attention_length}
    found: dict[str, list[Any]] = {name: [] for name in arms}
    for turn in range(options.turns + 1):
        for name, by in arms.items():
            seconds, tokens = [], []
            limits = {"max_tokens": options.limit, "world_size": 2}
            for shares in split(rows, members, attention_length=by, **limits):
                dist.barrier()
                since = time.process_time()
                policy(pack(rows, shares[rank], device, padded=True), 1.0)[0].sum().backward()
                seconds.append(time.process_time() - since)
                tokens.append(int(rows.inputs[shares[rank]].sum()))
            policy.zero_grad()
            both: list[Any] = [None, None]
            dist.all_gather_object(both, (tokens, seconds))
            if turn:  # the first one warms up
                found[name].append(both)
    if not rank:
        print(f"attention_length {policy.attention_length:.0f}, tokens {int(rows.inputs.sum())}")
        for name, turns in found.items():
            # [turns, ranks, tokens or seconds, micro-batches]
            tokens, seconds = np.array(turns).transpose(2, 0, 3, 1)
            step = seconds.max(2).sum(1)
            shown = {
                "arm": name,
                "micro-batches": tokens.shape[1],
                "tokens of a rank, largest / mean": tokens.max(2).sum(1)[0]
                / tokens[0].mean(1).sum(),
                "seconds of a rank": np.median(seconds.mean(2).sum(1)),
                "seconds of a step": np.median(step),
                "share of a step that ranks wait": np.median(1 - seconds.mean(2).sum(1) / step),
            }
            print(
                json.dumps(
                    {key: v if key == "arm" else round(float(v), 4) for key, v in shown.items()}
                )
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="time two ranks on this CPU")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--limit", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    if not options.measure:
        compute(options.seeds)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        write_shape(folder, SMALL, vocab_size=64)
        mp.start_processes(rank_steps, args=(folder, options), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
