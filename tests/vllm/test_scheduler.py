"""millrace's scheduler does what vLLM's own does, for less work."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from millrace.models.model import write_shape
from millrace.serving.vllm.scheduler import LOG_PROBS, _AsyncLogProbScheduler, _LogProbScheduler
from tests.serving.replica import EOS, SHAPE, VOCABULARY
from tests.vllm.scheduling import drawn, make_request, make_scheduler

OURS_AND_VLLMS = {0: (_LogProbScheduler, Scheduler), 1: (_AsyncLogProbScheduler, AsyncScheduler)}
"""By the number of steps in flight while the next one is scheduled."""


def history(scheduler: Scheduler, seed: int, lag: int) -> Iterator[Any]:
    """Yield all that a scheduler decides and sends, for the requests and aborts of a seed."""
    luck, pending, count = random.Random(seed), [], 0
    log_probs: dict[str, array[float]] = defaultdict(lambda: array("f"))
    most = luck.choice((1, 30))
    for _ in range(120):
        for _ in range(luck.randrange(4)):
            prompt = [luck.randrange(3, 9)] * luck.choice((1, 15, 16, 17, 31, 32, 50))
            streams = luck.random() < 0.3
            name, length = f"r{count}", luck.choice((1, 2, 15, 16, 17, 40))
            scheduler.add_request(make_request(name, prompt, length, streams=streams))
            count += 1
        if luck.randrange(12) == 0:
            gone = (
                [f"r{luck.randrange(count)}" for _ in range(luck.randrange(most))] if count else []
            )
            scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        step = scheduler.schedule()
        news = [(n.req_id, n.block_ids, n.num_computed_tokens) for n in step.scheduled_new_reqs]
        old = step.scheduled_cached_reqs
        yield step.num_scheduled_tokens, news, old.req_ids, old.new_block_ids, old.resumed_req_ids
        if step.total_num_scheduled_tokens:
            pending.append((step, drawn(scheduler, step)))
        while len(pending) > (lag if step.total_num_scheduled_tokens else 0):
            batches = scheduler.update_from_output(*pending.pop(0))
            for output in (o for batch in batches.values() for o in batch.outputs):
                own = log_probs[output.request_id]
                if output.new_logprobs is not None:
                    own.frombytes(output.new_logprobs.logprobs[:, 0].tobytes())
                own.frombytes((output.kv_transfer_params or {}).get(LOG_PROBS, b""))
                ended = output.finish_reason is not None
                yield output.request_id, output.new_token_ids, ended and (output.finish_reason, own)
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        yield pool.get_num_free_blocks(), sorted(map(repr, pool.cached_block_hash_to_block._cache))


@pytest.mark.parametrize("lag", OURS_AND_VLLMS)
def test_it_decides_and_draws_as_vllms_own(lag: int, tmp_path: Path) -> None:
    write_shape(tmp_path, SHAPE, vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=0)
    preempted = 0
    for seed in range(25):
        # Few blocks: requests are preempted, and begin again.
        size = {"blocks": 12 + seed * 2, "requests": 8, "batch": 24 + seed}
        ours, vllms = (make_scheduler(kind, tmp_path, **size) for kind in OURS_AND_VLLMS[lag])
        for step, (own, theirs) in enumerate(
            zip(history(ours, seed, lag), history(vllms, seed, lag), strict=True)
        ):
            assert own == theirs, (seed, step)
        preempted += sum(r.num_preemptions for r in vllms.requests.values())
    assert preempted


def test_it_asks_vllm_for_two_tokens_of_a_block(tmp_path: Path) -> None:
    """The first and the last token of 16 need work. The others take none."""
    write_shape(tmp_path, SHAPE, vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=0)
    calls = 0

    class Counting(_LogProbScheduler):
        def _skip_open_blocks(self) -> None:
            allocate = self.kv_cache_manager.allocate_slots

            def counted(*args: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                return allocate(*args, **more)

            self.kv_cache_manager.allocate_slots = counted
            super()._skip_open_blocks()

    scheduler = make_scheduler(Counting, tmp_path, blocks=100, requests=2, batch=64)
    scheduler.add_request(make_request("r", [5] * 16, 33))
    while scheduler.has_requests():
        step = scheduler.schedule()
        scheduler.update_from_output(step, drawn(scheduler, step))
    assert calls == 1 + 2 * 2
