"""The CPU time that vLLM's core takes to schedule a token, without a model.

millrace's scheduler and vLLM's own take turns. It needs vLLM, for a CPU or a GPU.

    python -m benchmarks.bench_scheduler [--requests 512] [--tokens 40] [--repeats 6]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from millrace.models.model import write_shape
from millrace.serving.vllm.scheduler import _AsyncLogProbScheduler
from tests.serving.replica import EOS, SHAPE, VOCABULARY
from tests.vllm.scheduling import drawn, make_request, make_scheduler


def turn(scheduler: Scheduler, options: argparse.Namespace, k: int) -> float:
    """Draw all requests, one step ahead. Return the microseconds of this thread for each token."""
    for i in range(options.requests):
        length = options.tokens // 2 + i * 7919 % options.tokens
        scheduler.add_request(make_request(f"{k}-{i}", [3 + (i // 8 + k) % 40] * 48, length))
    used, tokens, pending = 0.0, 0, []
    while scheduler.has_requests():
        start = time.thread_time()
        step = scheduler.schedule()
        used += time.thread_time() - start
        if step.total_num_scheduled_tokens:
            pending.append((step, drawn(scheduler, step)))
        if pending and (len(pending) > 1 or not step.total_num_scheduled_tokens):
            done, found = pending.pop(0)
            start = time.thread_time()
            scheduler.update_from_output(done, found)
            used += time.thread_time() - start
            tokens += sum(map(len, found.sampled_token_ids))
    return 1e6 * used / tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(folder, SHAPE, vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=0)
        size = {"blocks": 20_000, "requests": options.requests, "batch": 8192}
        kinds = {"millrace": _AsyncLogProbScheduler, "vllm": AsyncScheduler}
        made = {name: make_scheduler(kind, Path(folder), **size) for name, kind in kinds.items()}
        turns = [{n: turn(s, options, k) for n, s in made.items()} for k in range(options.repeats)]
    for each in turns[1:]:  # the first turn imports and allocates
        print("  ".join(f"{name} {used:.1f}" for name, used in each.items()), "us/token")
    print(
        f"ratio of the least: {min(t['millrace'] for t in turns) / min(t['vllm'] for t in turns):.2f}"
    )


if __name__ == "__main__":
    main()
