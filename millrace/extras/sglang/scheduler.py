"""SGLang's scheduler process, with the calls of a weight sync and a seed for each request.

`run` takes the place of SGLang's own entry of the process. With `experts.py`, it replaces fourteen of
SGLang's names, and `serving_checks.SGLANG_RELEASES` says of which releases.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import multiprocessing
import os
import struct
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import PauseGenerationReqInput, RpcReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from millrace.extras.sglang import experts
from millrace.process.death import die_with, ignore_stop_signals
from millrace.serving.live_weights import LiveWeights
from millrace.sync.store import bound_store
from millrace.waits.registry import Start, began, take_starts
from millrace.waits.wait_server import start_in_worker

METHOD = "millrace"
"""The method of an RPC that `SchedulerExtension` answers."""
RECEIVED = "millrace_received"
"""Name of a scheduler's number of received requests."""
COUNTER = "MILLRACE_SGLANG_COUNTER"
"""Environment variable: a file of 8 bytes that has the number of drawn tokens."""
_MASK = (1 << 63) - 1


class SchedulerExtension(LiveWeights):
    """The calls of a replica's host, between two steps of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        runner = scheduler.tp_worker.model_runner
        self.model = runner.model
        on_gpu = runner.device == "cuda"
        self.device = torch.device(f"cuda:{runner.gpu_id}" if on_gpu else runner.device)
        self.shard = scheduler.ps.tp_rank
        self._kept: dict[str, Tensor] = {}

    def start_times(self) -> list[Start]:
        return take_starts()

    def check_health(self) -> None:
        """Answer."""

    def is_idle(self) -> bool:
        """Return whether the scheduler has processed all of its steps."""
        return bool(self.scheduler.is_fully_idle())

    def pause(self, extra_key: str | None, sent: int) -> dict[str, int] | None:
        """Stop between two steps. Return how many tokens each request has drawn.

        `extra_key` is a new name in the prefix cache: all requests then compute their K and V anew
        under it. None keeps them. `sent` is the number of requests so far. They come through another
        socket than this call. If it has overtaken one, return None, and go on.
        """
        scheduler = self.scheduler
        if scheduler.__dict__.get(RECEIVED, 0) < sent:
            return None
        scheduler._engine_paused = True
        if extra_key is not None:
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            for request in scheduler.waiting_queue:
                request.extra_key = extra_key
        elif self.device.type == "cuda":
            scheduler.forward_stream.synchronize()
        counts = {request.rid: len(request.output_ids) for request in self._requests()}
        for batch, _ in getattr(scheduler, "result_queue", ()):  # drawn, but not yet processed
            for request in batch.reqs:
                counts[request.rid] += draws(batch, request)
        return counts

    def _requests(self) -> Iterator[Any]:
        scheduler = self.scheduler
        for batch in (scheduler.running_batch, scheduler.last_batch):
            yield from batch.reqs if batch is not None else ()
        yield from scheduler.waiting_queue
        if scheduler.chunked_req is not None:
            yield scheduler.chunked_req
        for batch, _ in getattr(scheduler, "result_queue", ()):
            yield from batch.reqs

    def resume(self) -> None:
        """Go on after `pause`."""
        self.scheduler._engine_paused = False

    def keep_weights(self) -> None:
        """Copy the parameters to host memory, before their memory is freed."""
        self._kept = {n: p.detach().to("cpu", copy=True) for n, p in self.model.named_parameters()}

    def restore_weights(self) -> None:
        """Copy kept parameters back, if there are any. SGLang itself keeps the buffers."""
        for name, parameter in self.model.named_parameters() if self._kept else ():
            parameter.data.copy_(self._kept[name])
        self._kept = {}


def draws(batch: Any, request: Any) -> bool:
    """Return whether a step draws a token of a request that the response will have."""
    if request.finished() or request.is_retracted:
        return False
    return batch.forward_mode.is_decode() or request.inflight_middle_chunks <= 0


def _answer(scheduler: Any, call: Any) -> RpcReqOutput:
    """Answer an RPC of METHOD with the JSON of every rank's report, and others as SGLang does."""
    if call.method != METHOD:
        return _handle_rpc(scheduler, call)
    try:
        if (extension := scheduler.__dict__.get(METHOD)) is None:
            extension = scheduler.__dict__[METHOD] = SchedulerExtension(scheduler)
        with torch.inference_mode():
            method = getattr(extension, call.parameters["method"])
            report: Any = {"value": method(*json.loads(call.parameters["args"]))}
    except Exception as error:  # noqa: BLE001 - the report carries the failure
        report = {"error": str(error), "type": type(error).__name__}
    reports = [report]
    if scheduler.tp_group.world_size > 1:
        reports = [None] * scheduler.tp_group.world_size
        torch.distributed.all_gather_object(reports, report, group=scheduler.tp_group.cpu_group)
    return RpcReqOutput(success=True, message=json.dumps((call.parameters["number"], reports)))


def _receive(scheduler: Any, request: Any, **options: Any) -> None:
    """Take a request, and count it."""
    scheduler.__dict__[RECEIVED] = scheduler.__dict__.get(RECEIVED, 0) + 1
    _handle_request(scheduler, request, **options)


def _abort(scheduler: Any, call: Any) -> None:
    """Abort requests. Those that wait after a retraction return the tokens that they have.

    SGLang forgets these tokens, or returns only the last one.
    """
    for request in list(scheduler.waiting_queue):
        if request.output_ids and (call.abort_all or request.rid == call.rid):
            scheduler.waiting_queue.remove(request)
            request.finished_reason = FINISH_ABORT()
            experts.collect_kept(scheduler, request)
            scheduler.output_streamer.stream_output([request], request.return_logprob)
    _abort_request(scheduler, call)


def _abort_chunked(scheduler: Any) -> None:
    """Abort the request whose prompt is read in parts. After a retraction, it returns its tokens.

    SGLang sends an abort without tokens, through another socket than an output. So an output alone
    is sent.
    """
    request = scheduler._pending_chunked_abort_req
    if request is None or request is not scheduler.chunked_req or not request.output_ids:
        _process_chunked_abort(scheduler)
        return
    request.finished_reason, request.to_finish = FINISH_ABORT(), None
    experts.collect_kept(scheduler, request)
    release_kv_cache(request, scheduler.tree_cache, is_insert=False)
    scheduler.chunked_req = scheduler._pending_chunked_abort_req = None
    scheduler.output_streamer.stream_output([request], request.return_logprob)


def _process_and_count(scheduler: Any, batch: Any, result: Any) -> None:
    """Add the tokens of a step to the counter, and process its result, which the host then reads."""
    if scheduler.ps.tp_rank == 0:
        drawn, counter = sum(draws(batch, request) for request in batch.reqs), _counter()
        struct.pack_into("q", counter, 0, struct.unpack_from("q", counter)[0] + drawn)
    _process(scheduler, batch, result)


@functools.cache
def _counter() -> mmap.mmap:
    with open(os.environ[COUNTER], "r+b") as file:
        return mmap.mmap(file.fileno(), 8)


def _with_seeds(batch: Any, vocab_size: int) -> SamplingBatchInfo:
    """Return the sampling of a batch, with the seed of each request.

    SGLang uses seeds only with batch-invariant kernels.
    """
    info = _from_batch(batch, vocab_size)
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def draw(probs: Tensor, sampling_seed: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row of `probs` [n, vocabulary]. Return int32 indices [n].

    A token is where the number of its seed and its position falls in the sum of the row. SGLang's
    own seeds add Gumbel noise of 32 random bits, and one of its 2^32 values is infinite: one token
    of about 2^32 / vocabulary is drawn whatever its probability.
    """
    edges = probs.double().cumsum(-1)
    point = uniform(sampling_seed, positions)[:, None] * edges[:, -1:]
    found = torch.searchsorted(edges, point, right=True).clamp_(max=probs.shape[1] - 1)
    return found[:, 0].int()


def draw_truncated(
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    _: Tensor,
    needs_min_p: bool,
    sampling_seed: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw a token of each row from its top-k and its top-p.

    SGLang draws from a sorted vocabulary, so what a seed draws depends on the other requests.
    """
    ranked, places = probs.sort(dim=-1, descending=True)
    # The sum of a row may be a little over 1, and top-p 1 keeps all of it.
    limits = top_ps.masked_fill(top_ps >= 1, torch.inf)[:, None]
    outside = ranked.double().cumsum(-1) - ranked > limits
    outside |= torch.arange(probs.shape[1], device=probs.device) >= top_ks[:, None]
    kept = torch.zeros_like(probs).scatter_(-1, places, ranked.masked_fill_(outside, 0.0))
    return draw(kept, sampling_seed, positions)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a float64 number in (0, 1) for each pair, by SplitMix64 (Steele et al. 2014)."""
    return (_shifted(_mixed(_mixed(seeds) + positions.long()), 12).double() + 0.5) / 2.0**52


def _mixed(state: Tensor) -> Tensor:
    state = state * -0x61C8864680B583EB
    state = (state ^ _shifted(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shifted(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift as if the int64 were unsigned."""
    return (state >> bits) & (_MASK >> (bits - 1))


_handle_rpc = Scheduler.handle_rpc_request
_handle_request = Scheduler.handle_generate_request
_abort_request = Scheduler.abort_request
_process_chunked_abort = Scheduler.process_pending_chunked_abort
_process = Scheduler.process_batch_result
_from_batch = SamplingBatchInfo.from_schedule_batch


def _no_snapshots(*_: Any, **__: Any) -> None:
    """Write no load of this scheduler to a file in /dev/shm, which nothing reads or removes."""


def run(*args: Any, **kwargs: Any) -> None:
    """Be a scheduler process, until the host ends it."""
    if (host := multiprocessing.parent_process()) and host.pid:
        die_with(host.pid)  # SGLang does not see that its host died during the imports
    side = start_in_worker(f"core-{args[3]}")  # the rank of the scheduler
    began("imports")
    Scheduler.handle_rpc_request = _answer
    Scheduler.handle_generate_request = _receive
    Scheduler.abort_request = _abort
    Scheduler.process_pending_chunked_abort = _abort_chunked
    Scheduler.process_batch_result = _process_and_count
    SamplingBatchInfo.from_schedule_batch = staticmethod(_with_seeds)
    sglang_scheduler.create_load_snapshot_writer = _no_snapshots
    # SGLang's schedulers find each other through this store. torch's own store would listen on every
    # interface.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    setattr(rendezvous, "TCPStore", bound_store)  # noqa: B010
    sampler.sampling_from_probs_torch = draw
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = draw_truncated
    experts.replace()
    _counter()  # its file is deleted once SGLang has started
    ignore_stop_signals()  # only the driver acts on them, after it has saved
    try:
        sglang_scheduler.run_scheduler_process(*args, **kwargs)
    finally:
        if side is not None:
            side.close()
